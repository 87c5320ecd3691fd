#!/usr/bin/env python3
"""The program's manners, from outside: exit codes, nearest names, what goes to stdout and what to
stderr, closed pipes, full disks, hostile files.

usage: program_test.py PATH_OF_OUZEL
"""

import json
import os
import re
import shutil
import struct
import subprocess
import unittest
from pathlib import Path

from program import OUZEL, ProgramTest, floats, run, safetensors


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

    def test_help_is_a_verb_too(self):
        self.assertEqual(run("help").stdout, run("--help").stdout)
        for verb in ("train", "bench"):
            process = run("help", verb)
            self.assertEqual((process.returncode, process.stdout), (0, run(verb, "--help").stdout))
        self.assert_fails(run("help", "trian"), 2, "no verb 'trian'; did you mean 'train'?")

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
        for verb, flag, meant in (("generate", "--temp", "--temperature"), ("train", "--epochs", "--iterations"),
                                  ("train", "--batch-size=3", "--batch"), ("train", "--batch_size", "--batch"),
                                  ("train", "--steps", "--iterations"), ("train", "--learning-rate", "--lr"),
                                  ("generate", "--max-new-tokens", "--tokens")):
            self.assert_fails(run(verb, flag), 2, f"'{flag.split('=')[0]}'; did you mean '{meant}'?")
        self.assertNotIn("did you mean", run("info", "--epochs").stderr)
        # A letter is near to every other one.
        for call in (("train", "-i"), ("info", "-x"), ("eval", "-n"), ("attend", "-i")):
            self.assertNotIn("did you mean", run(*call).stderr)
        self.assert_fails(run("explain", "-T", "3"), 2, "did you mean '--T'?")
        # Only flags that there are.
        source = (Path(__file__).parent.parent / "apps" / "ouzel" / "main.cc").read_text()
        for elsewhere, here in re.findall(r'\{"(--[a-z-]+)",\s+"(--[a-z-]+)"\}', source):
            self.assertTrue(any(f"did you mean '{here}'?" in run(verb, elsewhere).stderr
                                for verb in ("train", "generate", "eval", "info")), elsewhere)
        process = run("zzzzzzzz")
        self.assert_fails(process, 2)
        self.assertNotIn("did you mean", process.stderr)
        self.assert_fails(run("\x1b[31m"), 2, "\\x1b[31m")

    def test_values_are_checked(self):
        self.assert_fails(run("info", "--threads", "-1"), 2, "--threads")
        self.assert_fails(run("info", "--threads", "two"), 2, "--threads")
        self.assert_fails(run("info", "--threads"), 2, "--threads")
        self.assert_fails(run("info", "--isa", "sse9"), 2, "--isa: 'sse9' is none of ")
        self.assert_fails(run("info", "--isa", "portabel"), 2, "did you mean 'portable'?")
        for verb, flag in (("train", "--lr"), ("train", "--clip"), ("generate", "--temperature")):
            for value in ("1e-3x", "x", "1,5"):
                self.assert_fails(run(verb, f"{flag}={value}"), 2, f"{flag}: '{value}' is not a number")
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
        # In words the first length that is cheaper: 85.3 rounded up.
        self.assertIn("prefill 86 tokens", run("explain", "retention", "--T", "1000", "--K", "32",
                                               "--V", "64", "--H", "2").stdout)

    def test_explain_knows_published_names(self):
        for name, law in (("retnet", "retention"), ("Mamba-2", "mamba2_ssd"), ("rwkv-7", "rwkv7")):
            self.assertEqual(json.loads(run("explain", name, "--json").stdout)["name"], law)

    def test_a_filter_of_bench_begins_a_part_of_a_name(self):
        def chosen(text):
            return run("bench", "ops", "--list", "--filter", text).stdout.splitlines()

        self.assertTrue(chosen("gla/"))
        self.assertTrue(all("/gla/" in "/" + name for name in chosen("gla/")))
        self.assertTrue(any(name.startswith("simple_gla/") for name in chosen("forward/64")))
        self.assertEqual(chosen(""), run("bench", "ops", "--list").stdout.splitlines())
        self.assert_fails(run("bench", "ops", "--list", "--filter", "la/"), 2, "'la/'")

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
            for words, expected in (("attend x.safetensors --op gated_delta_r", "gated_delta_rule"),
                                    ("attend --list selective", "selective_scan"),
                                    ("explain gated_delta_r", "gated_delta_rule"),
                                    ("bench ops --filter softmax", "softmax_attention"),
                                    ("bench model --filter start", "start_up")):
                words = ["ouzel", *words.split()]
                asked = (script + f"COMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1}; "
                         "_ouzel; echo ${COMPREPLY[@]}")
                reply = subprocess.run(["bash", "-c", asked], capture_output=True, text=True,
                                       check=True)
                self.assertEqual(reply.stdout.strip(), expected)


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
        self.put("model.safetensors.index.json", b'{"weight_map": {}}')
        self.assert_fails(run("info", self.folder), 1, "names no files")
        self.put("model.safetensors", safetensors({"a": ("F32", [2], floats(1, 2))}))
        process = run("info", self.folder)
        self.assertIn("retnet, 1 tensor, 2 parameters", process.stdout)
        self.put("config.json", b'{"model_type": ')
        self.assert_fails(run("info", self.folder), 1, "config.json", "not JSON")
        (self.folder / "config.json").unlink()
        self.assert_fails(run("info", self.folder), 1, "without their config.json")
        (self.folder / "model.safetensors").unlink()
        (self.folder / "model.safetensors.index.json").unlink()
        self.assert_fails(run("info", self.folder), 1, "no model is in this folder")

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
                ("text", b"Lorem ipsum dolor sit amet", "text that begins with"),
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


if __name__ == "__main__":
    unittest.main()
