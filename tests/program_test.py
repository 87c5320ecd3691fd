#!/usr/bin/env python3
"""The program's manners, from outside: exit codes, nearest names, what goes to stdout and what to
stderr, closed pipes, full disks, hostile files.

usage: program_test.py PATH_OF_OUZEL
"""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

OUZEL = ""


def run(*arguments, **options):
    """The finished process; text is decoded, and nothing may take longer than 20 seconds."""
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run([OUZEL, *map(str, arguments)], text=True, timeout=20, check=False,
                          **options)


def safetensors(tensors, metadata=None):
    """The bytes of a file; tensors: name -> (dtype, shape, bytes)."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def floats(*values):
    return struct.pack(f"<{len(values)}f", *values)


class ProgramTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ouzel-program-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def put(self, name, content):
        path = self.folder / name
        path.write_bytes(content)
        return path

    def assert_fails(self, process, code, *parts):
        """Exit code, nothing on stdout, one line on stderr that starts with the program's name."""
        self.assertEqual(process.returncode, code, process.stderr)
        self.assertEqual(process.stdout, "")
        self.assertEqual(process.stderr.count("\n"), 1, process.stderr)
        self.assertRegex(process.stderr, r"^ouzel( [a-z]+)?: ")
        for part in parts:
            self.assertIn(part, process.stderr)


class Usage(ProgramTest):
    def test_version_is_one_line(self):
        process = run("--version")
        self.assertEqual((process.returncode, process.stderr), (0, ""))
        self.assertRegex(process.stdout, r"^ouzel \d+\.\d+\.\d+\n$")

    def test_help_lists_verbs_and_their_help_has_options_and_examples(self):
        process = run("--help")
        self.assertEqual((process.returncode, process.stderr), (0, ""))
        verbs = re.findall(r"^  ([a-z]+) ", process.stdout.split("verbs:")[1].split("\n\n")[0],
                           re.MULTILINE)
        self.assertIn("info", verbs)
        for verb in verbs:
            process = run(verb, "--help")
            self.assertEqual((process.returncode, process.stderr), (0, ""), verb)
            for part in ("usage: ouzel " + verb, "options:", "examples:\n  ouzel " + verb):
                self.assertIn(part, process.stdout)
            self.assertLessEqual(max(map(len, process.stdout.splitlines())), 100, verb)

    def test_without_a_verb_help_goes_to_stderr(self):
        process = run()
        self.assertEqual((process.returncode, process.stdout), (2, ""))
        self.assertIn("usage: ouzel VERB", process.stderr)

    def test_unknown_names_get_their_nearest_relative(self):
        self.assert_fails(run("inof"), 2, "'inof'", "did you mean 'info'?")
        self.assert_fails(run("--verison"), 2, "did you mean '--version'?")
        self.assert_fails(run("info", "--jsno"), 2, "ouzel info: ", "did you mean '--json'?")
        self.assert_fails(run("info", "-json"), 2, "did you mean '--json'?")
        self.assert_fails(run("info", "--treads=2"), 2, "did you mean '--threads'?")
        process = run("zzzzzzzz")
        self.assert_fails(process, 2)
        self.assertNotIn("did you mean", process.stderr)
        self.assert_fails(run("\x1b[31m"), 2, "\\x1b[31m")

    def test_values_are_checked(self):
        self.assert_fails(run("info", "--threads", "-1"), 2, "--threads")
        self.assert_fails(run("info", "--threads", "two"), 2, "--threads")
        self.assert_fails(run("info", "--threads"), 2, "--threads")
        self.assert_fails(run("info", "--isa", "sse9"), 2, "--isa", "avx2")
        self.assert_fails(run("info", "a", "b"), 2, "'b'", "one too many")

    def test_explain_counts(self):
        told = json.loads(run("explain", "retention", "--T", "1000", "--K", "32", "--V", "64",
                              "--H", "2", "--json").stdout)
        state = 2 * 32 * 64
        self.assertEqual(told["state_bytes"], 4 * state)
        self.assertEqual(told["law"]["prefill"]["mixing_flops"], 4 * state)
        self.assertEqual(told["law"]["training"]["mixing_flops"], 14 * state)
        # Rows of q, k, v and o; decoding also reads and writes the state.
        self.assertEqual(told["law"]["prefill"]["bytes"], 4 * 2 * (32 + 32 + 64 + 64))
        self.assertEqual(told["law"]["decode"]["bytes"],
                         told["law"]["prefill"]["bytes"] + 2 * 4 * state)
        self.assertEqual(told["softmax"]["prefill"]["mixing_flops"], 1000 * 2 * (32 + 64))
        self.assertEqual(told["softmax_bytes"]["naive"], 4 * 2 * 1000 * 1000)
        self.assertEqual(told["softmax_bytes"]["cache"], 4 * 1000 * 2 * (32 + 64))
        # Both sides are equal where they cross.
        self.assertAlmostEqual(told["crossing"]["prefill"] * 2 * (32 + 64), 4 * state)
        self.assertAlmostEqual(told["crossing"]["memory"] * 2 * (32 + 64), state)

    def test_explain_refuses(self):
        self.assert_fails(run("explain", "retentoin"), 2, "did you mean 'retention'?")
        self.assert_fails(run("explain", "softmax_attention"), 2, "no state of a fixed size")
        self.assert_fails(run("explain", "LinearAttention"), 2, "ONNX's node: linear_attention")
        for law in ("short_conv", "ttt_linear", "efficient_attention"):  # which have states
            process = run("explain", law)
            self.assert_fails(process, 2, "nothing is counted", f"attend --list {law}")
            self.assertNotIn("keeps no state", process.stderr)
        self.assert_fails(run("explain"), 2, "LAW")

    def test_whole_numbers_are_read_whole(self):
        verbs = {"train": ("--data", "x"), "generate": ("-m", "x", "-p", "a"),
                 "eval": ("-m", "x", "--data", "x"), "bench": ("ops",), "info": (),
                 "explain": ("retention",)}
        for verb, needed in verbs.items():
            flags = re.findall(r"(--[A-Za-z-]+) N\b", run(verb, "--help").stdout)
            self.assertTrue(flags)
            for flag in flags:
                for value in ("99999999999999999999", "-99999999999999999999", "-1", "010", "0x10",
                              "1e3", "1.0", "7 ", ""):
                    with self.subTest(verb=verb, flag=flag, value=value):
                        process = run(verb, *needed, f"{flag}={value}")
                        self.assert_fails(process, 2, flag)
                        if value:
                            self.assertIn("whole number", process.stderr)
        largest = 2**64 - 1
        process = run("generate", "-m", "no model", "-p", "a", "--seed", largest)
        self.assert_fails(process, 1, "no model")

    def test_environment(self):
        environment = dict(os.environ, OUZEL_THREADS="3", OUZEL_ISA="portable")
        told = json.loads(run("info", "--json", env=environment).stdout)
        self.assertEqual((told["threads"], told["isa"]), (3, "portable"))
        told = json.loads(run("info", "--json", "-t", "2", env=environment).stdout)
        self.assertEqual(told["threads"], 2)
        told = json.loads(run("info", "--json", "-t", "0", env=environment).stdout)
        self.assertEqual(told["threads"], 3)
        for name, value in (("OUZEL_THREADS", "-1"), ("OUZEL_ISA", "sse9")):
            process = run("info", env=dict(os.environ, **{name: value}))
            self.assert_fails(process, 1, value, name)

    def test_completion_and_man_page_know_every_flag(self):
        script = run("--completion-bash").stdout
        page = run("--man").stdout
        flags = set(re.findall(r"--[a-z-]+", run("info", "--help").stdout))
        self.assertIn("--json", flags)
        for flag in flags:
            self.assertIn(flag, script)
            self.assertIn(flag.replace("-", "\\-"), page)
        self.assertTrue(page.startswith(".TH OUZEL 1"))
        if shutil.which("bash"):
            asked = script + "COMP_WORDS=(ouzel info --j) COMP_CWORD=2; _ouzel; echo ${COMPREPLY[@]}"
            reply = subprocess.run(["bash", "-c", asked], capture_output=True, text=True,
                                   check=True)
            self.assertEqual(reply.stdout.strip(), "--json")
            asked = (script + "COMP_WORDS=(ouzel bench '') COMP_CWORD=2; _ouzel; "
                     "echo ${COMPREPLY[@]}")
            reply = subprocess.run(["bash", "-c", asked], capture_output=True, text=True,
                                   check=True)
            self.assertEqual(reply.stdout.strip(), "ops model")


class Streams(ProgramTest):
    def test_a_closed_pipe_ends_quietly(self):
        # More than a pipe holds, so that a write meets the closed end.
        tensors = {f"tensor.{i:06}": ("U8", [0], b"") for i in range(4000)}
        path = self.put("many.safetensors", safetensors(tensors))
        with subprocess.Popen([OUZEL, "info", str(path)], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as process:
            process.stdout.read(10)
            process.stdout.close()
            self.assertEqual(process.stderr.read(), b"")
            self.assertEqual(process.wait(timeout=20), 0)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_a_full_disk_is_an_error(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            for arguments in (["info"], ["--help"], ["--version"]):
                process = run(*arguments, stdout=full)
                self.assertEqual(process.returncode, 1)
                self.assertIn("No space left", process.stderr)

    def test_a_closed_stdout_is_an_error_and_no_file_takes_its_place(self):
        process = subprocess.run(["sh", "-c", f'"{OUZEL}" info >&-'], capture_output=True,
                                 text=True, timeout=20, check=False)
        self.assertEqual(process.returncode, 1)
        self.assertIn("stdout", process.stderr)


class Info(ProgramTest):
    def test_machine(self):
        process = run("info")
        self.assertEqual((process.returncode, process.stderr), (0, ""))
        for part in ("compiler", "instruction set", "threads", "caches"):
            self.assertIn(part, process.stdout)
        told = json.loads(run("info", "--json").stdout)
        self.assertIn(told["isa"], told["isas"])

    def test_json_is_told_what_to_do(self):
        self.assert_fails(run("info", self.put("config.json", b"{}")), 1, "name the folder of a model")
        self.assert_fails(run("info", "no.json"), 1, "No such file")

    def test_file(self):
        path = self.put("a.safetensors", safetensors(
            {"w": ("F32", [2, 2], floats(1, 2, 3, 4)), "mask": ("BOOL", [3], b"\0\1\0")},
            {"op": "gla", "note": "two\nlines\x1b[31m"}))
        process = run("info", path)
        self.assertEqual((process.returncode, process.stderr), (0, ""))
        for part in ("w ", "F32", "[2, 2]", "BOOL", "op: gla", "2 tensors, 7 elements"):
            self.assertIn(part, process.stdout)
        self.assertNotIn("\x1b", process.stdout)
        told = json.loads(run("info", path, "--json").stdout)
        self.assertEqual(told["elements"], 7)
        self.assertEqual(told["tensors"][0],
                         {"name": "w", "dtype": "F32", "shape": [2, 2], "bytes": 16})

    def test_model_in_one_and_in_several_files(self):
        self.put("config.json", b'{"model_type": "retnet", "hidden_size": 2}')
        self.assert_fails(run("info", self.folder), 1, "model.safetensors")
        self.put("model-1.safetensors", safetensors({"a": ("F32", [2], floats(1, 2))}))
        self.put("model-2.safetensors", safetensors({"b": ("F32", [1], floats(1))}))
        self.put("model.safetensors.index.json", json.dumps(
            {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode())
        told = json.loads(run("info", self.folder, "--json").stdout)
        self.assertEqual((told["model_type"], told["parameters"]), ("retnet", 3))
        self.put("model.safetensors.index.json",
                 b'{"weight_map": {"a": "../outside.safetensors"}}')
        self.assert_fails(run("info", self.folder), 1, "no file of this folder")
        self.put("model.safetensors", safetensors({"a": ("F32", [2], floats(1, 2))}))
        process = run("info", self.folder)
        self.assertIn("retnet, 1 tensor, 2 parameters", process.stdout)
        self.put("config.json", b'{"model_type": ')
        self.assert_fails(run("info", self.folder), 1, "config.json", "not JSON")
        (self.folder / "config.json").unlink()
        self.assert_fails(run("info", self.folder), 1, "no config.json")

    def test_files_cannot_steer_the_terminal(self):
        escape = "\x1b[2J\x07\x9b"
        config = {"model_type": "retnet", "num_heads": 2, "vocab_size": 256, "hidden_size": 16,
                  "num_hidden_layers": 1}
        self.put("data", b"text " * 100)
        for name, value in (("model_type", escape), ("hidden_size", escape), ("gate_fn", escape),
                            ("vocab_size", None)):
            with self.subTest(key=name):
                self.put("config.json", json.dumps({**config, name: value}).encode())
                self.put("model.safetensors", safetensors({escape: ("F32", [1], floats(1))}))
                for process in (run("generate", "-m", self.folder, "-p", "a"),
                                run("eval", "-m", self.folder, "--data", self.folder / "data"),
                                run("train", "--data", self.folder / "data", "--out",
                                    self.folder / "out", "--config", self.folder / "config.json")):
                    self.assertIn(process.returncode, (1, 2))
                    self.assertNotRegex(process.stderr, "[\x00-\x09\x0b-\x1f\x7f-\x9f]")
        self.put("config.json", json.dumps(config).encode())
        process = run("generate", "-m", self.folder, "-p", "a")  # names the unused tensor
        self.assertEqual(process.returncode, 1)
        self.assertIn("\\x1b[2J", process.stderr)
        self.assertNotRegex(process.stderr, "[\x00-\x09\x0b-\x1f\x7f-\x9f]")

    def test_positions_of_states_are_checked(self):
        for position in ("-1", "9223372036854775807", "99999999999999999999", "5x", "", "\x1b"):
            with self.subTest(position=position):
                path = self.put("state", safetensors({}, {
                    "format": "ouzel-state-1", "fingerprint": "f", "position": position}))
                self.assert_fails(run("info", path), 1, "position")

    def test_hostile_files(self):
        one = {"w": ("F32", [1], floats(1))}
        whole = safetensors(one)
        for name, content, part in (
                ("empty", b"", "0 bytes"),
                ("text", b"Lorem ipsum dolor sit amet", "header of"),
                ("cut", whole[:-1], "cut off"),
                ("longer", whole + b"x", "belong to no tensor"),
                ("giant", struct.pack("<Q", 1 << 63) + whole, "limit"),
                ("deep", struct.pack("<Q", 100000) + b"[" * 100000, "deeper"),
                ("bytes", struct.pack("<Q", 4) + b'{"\xff"', "not JSON"),
        ):
            with self.subTest(name):
                self.assert_fails(run("info", self.put(name, content)), 1, name, part)
        self.assert_fails(run("info", self.folder / "missing"), 1, "No such file")
        os.mkfifo(self.folder / "pipe")
        self.assert_fails(run("info", self.folder / "pipe"), 1, "pipe")


class Attend(ProgramTest):
    """A call small enough to do by hand: one head, K = V = 1, S_t = S_{t-1} + k v, o = scale q S."""

    def setUp(self):
        super().setUp()
        self.tensors = {"q": ("F32", [1, 2, 1, 1], floats(1, 2)),
                        "k": ("F32", [1, 2, 1, 1], floats(3, 4)),
                        "v": ("F32", [1, 2, 1, 1], floats(5, 6))}
        self.metadata = {"op": "linear_attn", "scale": "0.5", "note": "ignored"}
        self.out = self.folder / "out.safetensors"

    def attend(self, *arguments):
        path = self.put("in.safetensors", safetensors(self.tensors, self.metadata))
        return run("attend", path, *arguments)

    def results(self):
        """name -> list of numbers of the written file."""
        content = self.out.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:8 + size])
        self.metadata_out = header.pop("__metadata__")
        values = {}
        for name, tensor in header.items():
            self.assertEqual(tensor["dtype"], "F32")
            begin, end = (8 + size + at for at in tensor["data_offsets"])
            values[name] = list(struct.unpack(f"<{(end - begin) // 4}f", content[begin:end]))
        return values

    def test_forward_by_hand(self):
        process = self.attend("-o", self.out)
        self.assertEqual((process.returncode, process.stdout), (0, ""), process.stderr)
        self.assertIn("linear_attention", process.stderr)
        self.assertEqual(self.results(), {"o": [7.5, 39], "final_state": [39]})
        self.assertEqual(self.metadata_out["op"], "linear_attention")
        self.assertEqual(self.attend("-o", self.out, "-q").stderr, "")

    def test_backward_by_hand(self):
        self.tensors["do"] = ("F32", [1, 2, 1, 1], floats(1, 1))
        self.assertEqual(self.attend("-o", self.out, "--backward").returncode, 0)
        # dk_t = v_t * sum of later scale q; dq_t = scale S_t.
        self.assertEqual(self.results(), {"o": [7.5, 39], "final_state": [39], "dq": [7.5, 19.5],
                                          "dk": [7.5, 6], "dv": [4.5, 4]})

    def test_flags_override_metadata(self):
        self.assertEqual(self.attend("-o", self.out, "--scale", "1").returncode, 0)
        self.assertEqual(self.results()["o"], [15, 78])
        self.assertEqual(self.attend("-o", self.out, "--no-causal").returncode, 0)
        self.assertEqual(self.results(), {"o": [19.5, 39]})
        self.assertEqual(self.attend("-o", self.out, "--reverse").returncode, 0)
        self.assertEqual(self.results()["o"], [19.5, 24])
        self.assertEqual(self.attend("-o", self.out, "--cu-seqlens", "0,1,2").returncode, 0)
        self.assertEqual(self.results()["o"], [7.5, 24])
        self.metadata = {}
        self.assertEqual(self.attend("-o", self.out, "--op", "attention").returncode, 0)
        self.assertEqual(self.results()["o"][0], 5)

    def test_other_float_types_are_converted(self):
        self.tensors["q"] = ("F64", [1, 2, 1, 1], struct.pack("<2d", 1, 2))
        self.tensors["k"] = ("F16", [1, 2, 1, 1], struct.pack("<2e", 3, 4))
        self.tensors["v"] = ("BF16", [1, 2, 1, 1], struct.pack("<2H", 0x40a0, 0x40c0))
        self.assertEqual(self.attend("-o", self.out).returncode, 0)
        self.assertEqual(self.results()["o"], [7.5, 39])
        self.tensors["q"] = ("I16", [1, 2, 1, 1], b"\1\0\2\0")
        self.assert_fails(self.attend("-o", self.out), 1, "linear_attention: q is of type I16")

    def test_dtype_rounds_all_but_states(self):
        self.tensors["q"] = ("F32", [1, 2, 1, 1], floats(1.001, 2))  # 1 in bfloat16
        for dtype, size, code in (("bf16", 2, "BF16"), ("f16", 2, "F16"), ("f32", 4, "F32")):
            process = self.attend("-o", self.out, "--dtype", dtype)
            self.assertEqual(process.returncode, 0, process.stderr)
            content = self.out.read_bytes()
            length = struct.unpack("<Q", content[:8])[0]
            header = json.loads(content[8:8 + length])
            self.assertEqual(header["o"]["dtype"], code)
            self.assertEqual(header["final_state"]["dtype"], "F32")
            begin, end = (8 + length + at for at in header["o"]["data_offsets"])
            self.assertEqual(end - begin, 2 * size)
            if dtype == "bf16":
                self.assertEqual(content[begin:end], struct.pack("<2H", 0x40f0, 0x421c))  # 7.5, 39
        self.assert_fails(self.attend("-o", self.out, "--dtype", "f64"), 2, "bf16")

    def test_compare_of_rounded_numbers(self):
        self.tensors["o"] = ("F64", [1, 2, 1, 1], struct.pack("<2d", 7.5, 38))
        for q, returncode, verdict in ((1.001, 0, r"$"), (1, 1, r"  BEYOND the bound 4e-03$")):
            self.tensors["q"] = ("F32", [1, 2, 1, 1], floats(q, 2))
            process = self.attend("--compare", "-q", "--dtype", "bf16")
            self.assertEqual(process.returncode, returncode, process.stderr)
            self.assertRegex(process.stdout, r"^o +\d\.\d\de-02" + verdict)

    def test_compare(self):
        self.tensors["o"] = ("F64", [1, 2, 1, 1], struct.pack("<2d", 7.5, 39))
        process = self.attend("--compare", "-q")
        self.assertEqual((process.returncode, process.stderr), (0, ""))
        self.assertRegex(process.stdout, r"^o +0\.00e\+00 +within the bound 5e-06\n$")
        self.tensors["o"] = ("F64", [1, 2, 1, 1], struct.pack("<2d", 7.5, 39.001))
        process = self.attend("--compare")
        self.assertEqual(process.returncode, 1)
        self.assertIn("BEYOND", process.stdout)
        told = json.loads(self.attend("--compare", "--json").stdout)
        self.assertFalse(told["within"])
        self.assertAlmostEqual(told["comparisons"][0]["error"], 0.001 / (7.5**2 + 39**2)**0.5, 7)
        for wrong, part in (((7.5, float("inf")), "element 1"), ((7.5, float("nan")), "element 1")):
            self.tensors["o"] = ("F64", [1, 2, 1, 1], struct.pack("<2d", *wrong))
            process = self.attend("--compare")
            self.assertEqual(process.returncode, 1)
            self.assertIn(part, process.stdout)
        self.tensors["o"] = ("F64", [2], struct.pack("<2d", 7.5, 39))
        self.assertIn("shape [1, 2, 1, 1], expected [2]", self.attend("--compare").stdout)
        del self.tensors["o"]
        self.assert_fails(self.attend("--compare", "-q"), 1, "no expected tensor")

    def test_wrong_calls_name_operator_argument_and_remedy(self):
        def fails(*parts, code=1, arguments=("-o", self.out)):
            self.assert_fails(self.attend(*arguments), code, *parts)
            self.assertFalse(self.out.exists())
        fails("-o FILE", code=2, arguments=())
        fails("no flag '--bacward'", "did you mean '--backward'?", code=2,
              arguments=("--bacward",))
        fails("no flag '--window-sise'", "'--window-size'", code=2, arguments=("--window-sise=3",))
        fails("needs 'do'", "gradient of 'o'", arguments=("-o", self.out, "--backward"))
        fails("no attribute 'window_size'", code=2,
              arguments=("-o", self.out, "--window-size", "3"))
        fails("no operator 'retentoin'", "did you mean 'retention'?", code=2,
              arguments=("--op", "retentoin"))
        fails("feature_map 'expo' is not one of identity", code=2,
              arguments=("-o", self.out, "--feature-map", "expo"))
        for flags in (("--feature-map", "dpfp", "--nu", str(2**61 + 1)),
                      ("--feature-map", "dpfp", "--nu", "-1")):
            fails("nu", "from 1 to 1048576", code=2, arguments=("-o", self.out, *flags))
        self.metadata["op"] = "linear_atn"
        fails("no operator 'linear_atn'", "did you mean 'linear_attn'?")
        del self.metadata["op"]
        fails("--op", "--list")
        self.metadata = {"op": "linear_attn", "normalise": "true"}
        fails("no attribute 'normalise'", "did you mean 'normalize'?")
        self.metadata = {"op": "linear_attn", "window_size": "3"}  # another operator's
        fails("no attribute 'window_size'")
        self.metadata = {"op": "linear_attn", "weather": "fine"}
        fails("no attribute 'weather'", "It takes feature_map", "--ignore-metadata")
        # What flags say wrongly is wrong use; what files say is not.
        for name, value in (("c", "-1"), ("c", "nan"), ("first_multiplier_one", "2")):
            self.metadata = {"op": "rg_lru", name: value}
            fails(name, value)
        self.metadata = {"op": "rg_lru"}
        fails("c '-1' is not a number of at least 0; leave it out for 8", code=2,
              arguments=("-o", self.out, "--c", "-1"))
        self.metadata = {"op": "linear_attn"}
        self.tensors["vv"] = self.tensors["v"]
        fails("takes no tensor 'vv'")
        del self.tensors["vv"]
        self.tensors["k"] = ("F32", [1, 2, 1, 2], floats(1, 2, 3, 4))
        fails("k has shape [1, 2, 1, 2]; expected [B, T, HK, K]", "K = 1 as in q")
        self.tensors["k"] = ("F32", [1] * 7 + [2], floats(1, 2))
        fails("k has shape", "extents")
        del self.tensors["k"]
        fails("tensor 'k' [B, T, HK, K]", "missing")

    def test_a_full_disk_leaves_the_old_results(self):
        self.out.write_bytes(b"old")
        path = self.put("in.safetensors", safetensors(self.tensors, self.metadata))
        # A limit on file size stands in for a full disk.
        process = subprocess.run(["sh", "-c", f'ulimit -f 0; "{OUZEL}" attend "{path}" -o '
                                  f'"{self.out}"'], capture_output=True, text=True, timeout=20,
                                 check=False)
        self.assertEqual(process.returncode, 1, process.stderr)
        self.assertIn("cannot write", process.stderr)
        self.assertEqual(self.out.read_bytes(), b"old")
        self.assertEqual(sorted(os.listdir(self.folder)), ["in.safetensors", "out.safetensors"])

    def test_bounds_are_twice_as_wide_on_the_portable_instruction_set(self):
        # Expected values that are off by one and a half bounds.
        off = 1 + 1.5 * 5e-6
        self.tensors["o"] = ("F64", [1, 2, 1, 1], struct.pack("<2d", 7.5 * off, 39 * off))
        for isa in json.loads(run("info", "--json").stdout)["isas"]:
            process = self.attend("--compare", "--isa", isa)
            self.assertEqual(process.returncode, 0 if isa == "portable" else 1, process.stdout)

    def test_foreign_metadata(self):
        self.metadata |= {"format": "pt", "check_something": "1e-9", "window_size": "0"}
        self.assertEqual(self.attend("-o", self.out).returncode, 0)
        self.metadata = {}
        self.assertEqual(self.attend("-o", self.out, "--op", "linear_attn").returncode, 0)
        before = self.out.read_bytes()
        self.metadata = {"weather": "fine", "scale": "7"}
        self.assertEqual(self.attend("-o", self.out, "--op", "linear_attn",
                                     "--ignore-metadata").returncode, 0)
        self.assertEqual(self.out.read_bytes(), before)
        self.assert_fails(self.attend("-o", self.out, "--ignore-metadata"), 1, "--op")

    def test_list_finds_by_name(self):
        def names(text):
            told = json.loads(run("attend", "--list", text, "--json").stdout)
            return [row["name"] for row in told["operators"]]
        self.assertEqual(names("gla"), ["gla"])
        self.assertEqual(names("mamba1"), ["selective_scan"])
        self.assertEqual(names("gated_delta"), ["gated_delta_rule", "gated_delta_product"])
        self.assert_fails(run("attend", "--list", "glaa"), 2, "did you mean 'gla'?")
        text = run("attend", "--list", "gla").stdout
        self.assertNotIn("delta_rule", text)
        self.assertRegex(text, r"HK +key heads")

    def test_every_letter_of_a_shape_is_explained(self):
        told = json.loads(run("attend", "--list", "--json").stdout)
        for row in told["operators"]:
            for tensor in row["inputs"] + row["outputs"]:
                for letter in re.split(r"[ |]", tensor["shape"]):
                    self.assertTrue(letter.isdigit() or letter in told["letters"], letter)

    def test_a_flag_says_what_it_means_to_each_operator(self):
        text = re.sub(r"\s+", " ", run("attend", "--help").stdout)
        self.assertRegex(text, r"--scale X Factor on q \(default: K\^-0\.5\).* of [^;]*mlstm[^;]*: "
                         r"Factor on k")

    def test_list_knows_every_operator_and_attribute(self):
        text = run("attend", "--list").stdout
        told = json.loads(run("attend", "--list", "--json").stdout)["operators"]
        self.assertIn("short_conv", [row["name"] for row in told])
        flags = run("attend", "--help").stdout
        for row in told:
            self.assertIn(row["formula"], text)
            for attribute in row["attributes"]:
                self.assertIn("--" + attribute["name"].replace("_", "-"), flags)

    def test_threads_and_instruction_sets_agree_with_themselves(self):
        values = [0.1 * ((7 * i) % 13) - 0.5 for i in range(2 * 70 * 3 * 5)]
        shape = [2, 70, 3, 5]
        self.tensors = {name: ("F32", shape, floats(*values)) for name in "qkv"}
        self.metadata = {"op": "retention"}
        for isa in json.loads(run("info", "--json").stdout)["isas"]:
            written = set()
            for threads in (1, 2, 5):
                process = self.attend("-o", self.out, "--isa", isa, "-t", threads)
                self.assertEqual(process.returncode, 0, process.stderr)
                self.assertIn(isa, process.stderr)
                written.add(self.out.read_bytes())
            self.assertEqual(len(written), 1, isa)


class Interrupts(ProgramTest):
    def test_ctrl_c_ends_a_call_with_130(self):
        tokens = 20000  # quadratic: far more than the time until the signal
        data = bytes(4 * tokens * 4)
        tensors = {name: ("F32", [1, tokens, 1, 4], data) for name in "qkv"}
        path = self.put("long.safetensors", safetensors(tensors, {"op": "attention"}))
        out = self.folder / "out.safetensors"
        with subprocess.Popen([OUZEL, "attend", str(path), "-o", str(out), "-t", "1", "--isa",
                               "portable"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as process:
            # Once the pool's file is read and the operator runs, its time on the processor grows.
            while process.poll() is None and self.seconds_of(process.pid) < 0.1:
                pass
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=20)
        self.assertEqual((process.returncode, told), (130, "ouzel attend: interrupted\n"))
        self.assertFalse(out.exists())

    @staticmethod
    def seconds_of(pid):
        """Processor time of a process so far."""
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    OUZEL = os.path.abspath(sys.argv.pop(1))
    unittest.main()
