#!/usr/bin/env python3
"""attend from outside: results, types, comparisons, wrong calls, the table that it lists, interrupts.

usage: attend_test.py PATH_OF_OUZEL
"""

import json
import os
import re
import signal
import struct
import subprocess
import unittest
from pathlib import Path

from program import OUZEL, ProgramTest, floats, run, safetensors


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

    def test_inputs_are_not_overwritten(self):
        path = self.put("in.safetensors", safetensors(self.tensors, self.metadata))
        before = path.read_bytes()
        os.symlink(path, self.folder / "link")
        os.link(path, self.folder / "other name")
        for out in (path, self.folder / "." / "in.safetensors", "link", "other name"):
            out = self.folder / out
            self.assert_fails(run("attend", path, "-o", out), 2, "would overwrite", str(out))
            self.assert_fails(run("attend", path, "-o", out, "--compare"), 2, "would overwrite")
        self.assertEqual(path.read_bytes(), before)

    def test_expected_tensors_are_floats(self):
        self.tensors["o"] = ("I32", [1, 2, 1, 1], b"\0" * 8)
        self.assert_fails(self.attend("--compare", "-q"), 1, "the expected tensor o is I32")
        del self.tensors["o"]
        self.tensors["dq"] = ("F32", [1, 2, 1, 1], floats(1, 2))
        self.assert_fails(self.attend("--compare", "-q"), 1, "none is named", "gradients need --backward")

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
                      ("--feature-map", "dpfp", "--nu", "129"),
                      ("--feature-map", "dpfp", "--nu", "-1")):
            fails("nu", "from 1 to 128", code=2, arguments=("-o", self.out, *flags))
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

    def test_a_file_that_is_not_there_comes_first(self):
        self.assert_fails(run("attend", self.folder / "nowhere"), 1, "nowhere")
        self.assert_fails(run("attend", self.put("x", safetensors({}, {"op": "retention"}))), 2, "-o FILE")

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
        self.assertRegex(text, r"--scale X of .* of [^;]*mlstm[^;]*: Factor on k")
        self.assertRegex(text, r"of the others: Factor on q \(default: K\^-0\.5\) --slopes")
        # Few operators are named: what comes first is not left to whoever reads.
        self.assertIn("--activation NAME of short_conv: Applied to the sum", text)

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


class Conditions(ProgramTest):
    def test_expected_tensors_that_a_call_does_not_give_are_named(self):
        path = Path(__file__).parent / "golden" / "retention-basic.safetensors"
        said = run("attend", path, "--compare", "--form", "parallel").stderr
        self.assertIn("final_state is not compared: it is only given with ", said)
        self.assertNotIn("not compared", run("attend", path, "--compare").stderr)


if __name__ == "__main__":
    unittest.main()
