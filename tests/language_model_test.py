#!/usr/bin/env python3
"""train, generate and eval from outside: kills and interrupts at random moments, pipes in any pieces,
states saved and gone on from, full disks, closed pipes, files of others.

usage: language_model_test.py PATH_OF_OUZEL
"""

import base64
import fcntl
import json
import os
import pty
import random
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest
from pathlib import Path

OUZEL = ""
SHARED = None  # a folder with a text and a small model trained on it

SHAPE = ["--layers", 2, "--dim", 32, "--heads", 2]
RUN = ["--context", 32, "--batch", 2, "--warmup", 4, "--lr", 0.01]


def setUpModule():
    global SHARED
    SHARED = Path(tempfile.mkdtemp(prefix="ouzel-model-"))
    rng = random.Random(1)
    words = "in the beginning god created heaven and earth light day night waters".split()
    text = ""
    while len(text) < 20000:
        text += " ".join(rng.choices(words, k=rng.randint(3, 9))) + rng.choice([".\n", ", ", "; "])
    (SHARED / "text").write_text(text)
    check("train", "--data", SHARED / "text", "--out", SHARED / "model", *SHAPE, *RUN,
          "--iterations", 60)


def tearDownModule():
    shutil.rmtree(SHARED)


def arguments(parts):
    return [OUZEL, *map(str, parts)]


def run(*parts, **options):
    """The finished process; its output is bytes."""
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(arguments(parts), timeout=60, check=False, **options)


def check(*parts, **options):
    """stdout of a process that must succeed."""
    process = run(*parts, **options)
    if process.returncode != 0:
        raise AssertionError(f"{parts}: {process.returncode}: {process.stderr.decode()}")
    return process.stdout


def limit_files_to(size):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


class ModelTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ouzel-model-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.text = SHARED / "text"
        self.model = SHARED / "model"

    def assert_fails(self, process, code, *parts):
        stderr = process.stderr.decode()
        self.assertEqual(process.returncode, code, stderr)
        self.assertEqual(process.stdout, b"")
        for part in parts:
            self.assertIn(str(part), stderr)

    def generate(self, *parts, **options):
        return check("generate", "-m", self.model, "-q", *parts, **options)


WILD = ["--temperature", 1.1, "--top-k", 60, "--top-p", 0.97, "--min-p", 0.001,
        "--repetition-penalty", 1.1, "--seed", 11]


class Generate(ModelTest):
    def test_a_resumed_text_is_the_unbroken_one(self):
        whole, part = self.folder / "whole", self.folder / "part"
        text = self.generate("-p", "in the ", "-n", 40, *WILD, "--state-out", whole)
        self.assertEqual(len(text), 40)
        for split in (0, 1, 17, 40):
            # With its options repeated, and without: they are in the state.
            for again in ([], WILD):
                first = self.generate("-p", "in the ", "-n", split, *WILD, "--state-out", part)
                second = self.generate("--state-in", part, "-n", 40 - split, *again,
                                       "--state-out", part)
                self.assertEqual(first + second, text)
                self.assertEqual(part.read_bytes(), whole.read_bytes())
        self.assertNotEqual(self.generate("-p", "in the ", "-n", 40, *WILD, "--seed", 12), text)

    def test_a_prompt_may_come_in_any_pieces(self):
        prompt = self.text.read_bytes()[:1300]
        whole, part = self.folder / "whole", self.folder / "part"
        text = self.generate("-p", prompt.decode(), "-n", 30, "--state-out", whole)
        self.assertEqual(self.generate("-f", self.text, "-n", 0), b"")
        for sizes in ([1300], [1, 1, 510, 1, 700, 87], [600, 700]):
            with subprocess.Popen(
                    arguments(["generate", "-m", self.model, "-q", "-p", "-", "-n", 30,
                               "--state-out", part]),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                at = 0
                for size in sizes:
                    process.stdin.write(prompt[at:at + size])
                    process.stdin.flush()
                    at += size
                    time.sleep(0.02)
                process.stdin.close()
                self.assertEqual(process.stdout.read(), text, sizes)
                self.assertEqual(process.wait(), 0)
            self.assertEqual(part.read_bytes(), whole.read_bytes(), sizes)
        # Over several runs, too.
        self.generate("-p", prompt[:400].decode(), "-n", 0, "--state-out", part)
        self.generate("--state-in", part, "-p", prompt[400:900].decode(), "-n", 0,
                      "--state-out", part)
        self.assertEqual(self.generate("--state-in", part, "-p", prompt[900:].decode(), "-n", 30,
                                       "--state-out", part), text)
        self.assertEqual(part.read_bytes(), whole.read_bytes())

    def test_memory_and_the_state_do_not_grow_with_what_is_read(self):
        peaks, sizes = [], []
        for size in (1, 2000, 60000):
            state = self.folder / "state"
            told = json.loads(check("generate", "-m", self.model, "-p", "-", "-n", 1, "--json",
                                    "--state-out", state, input=b"x" * size))
            self.assertEqual(told["position"], size + 1)
            peaks.append(told["peak_bytes"])
            sizes.append(state.stat().st_size)
        self.assertLess(peaks[2] - peaks[1], 1 << 20)
        self.assertEqual(sizes[0], sizes[1])
        self.assertEqual(sizes[0], sizes[2])

    def test_greedy_text_does_not_depend_on_seed_or_threads(self):
        text = self.generate("-p", "god ", "-n", 60, "--temperature", 0, "--seed", 1, "-t", 1)
        self.assertEqual(text, self.generate("-p", "god ", "-n", 60, "--temperature", 0, "--seed",
                                             2, "-t", 2))
        self.assertRegex(text, rb"[a-z]")

    def test_bytes_are_streamed_and_a_closed_pipe_ends_it_quietly(self):
        state = self.folder / "state"
        with subprocess.Popen(
                arguments(["generate", "-m", self.model, "-p", "in", "-n", 10**9, "--seed", 3,
                           "--state-out", state]),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            first = os.read(process.stdout.fileno(), 1)
            self.assertIsNone(process.poll())
            first += process.stdout.read(99)
            process.stdout.close()
            self.assertEqual(process.stderr.read(), b"")
            self.assertEqual(process.wait(timeout=20), 0)
        self.assertEqual(first, self.generate("-p", "in", "-n", 100, "--seed", 3))
        self.assertTrue(state.exists())

    def test_an_interrupt_saves_the_state(self):
        state = self.folder / "state"
        with subprocess.Popen(
                arguments(["generate", "-m", self.model, "-p", "in", "-n", 10**9, "--seed", 4,
                           "--state-out", state]),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            first = process.stdout.read(50)
            process.send_signal(signal.SIGINT)
            first += process.stdout.read()
            process.stderr.read()
            self.assertEqual(process.wait(timeout=20), 130)
        second = self.generate("--state-in", state, "-n", 20)
        self.assertEqual(first + second,
                         self.generate("-p", "in", "-n", len(first) + 20, "--seed", 4))

    def test_an_interrupt_while_a_pipe_is_silent(self):
        state = self.folder / "state"
        with subprocess.Popen(
                arguments(["generate", "-m", self.model, "-q", "-p", "-", "--state-out", state]),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdin.write(b"in the beginning")
            process.stdin.flush()
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(timeout=20), 130)
            self.assertEqual(process.stdout.read(), b"")
        told = json.loads(check("info", state, "--json"))["state"]
        self.assertEqual(told["position"], 16)
        self.assertEqual(self.generate("--state-in", state, "-n", 20),
                         self.generate("-p", "in the beginning", "-n", 20))

    def test_a_full_disk_leaves_the_old_state(self):
        state = self.folder / "state"
        self.generate("-p", "in", "-n", 0, "--state-out", state)
        before = state.read_bytes()
        process = run("generate", "-m", self.model, "-q", "-p", "x", "-n", 0, "--state-out", state,
                      preexec_fn=limit_files_to(2000))
        self.assert_fails(process, 1, state)
        self.assertEqual(state.read_bytes(), before)
        self.assertEqual(os.listdir(self.folder), ["state"])

    def test_stop_texts(self):
        text = self.generate("-p", "in", "-n", 80, "--seed", 5)
        stop = text[30:33].decode()
        cut = text[:text.index(stop.encode())]
        self.assertEqual(self.generate("-p", "in", "-n", 80, "--seed", 5, "--stop", stop), cut)
        self.assertEqual(self.generate("-p", "in", "-n", 80, "--seed", 5, "--stop", "%%", "--stop",
                                       stop), cut)
        state = self.folder / "state"
        for split in (31, 32):
            first = self.generate("-p", "in", "-n", split, "--seed", 5, "--stop", stop,
                                  "--state-out", state)
            self.assertEqual(first + self.generate("--state-in", state, "-n", 50), cut)
            rest = self.generate("--state-in", state, "-n", 80 - split, "--stop", "")
            self.assertEqual(first + rest, text)

    def test_json(self):
        told = json.loads(check("generate", "-m", self.model, "-p", "in ", "-n", 30, "--seed", 6,
                                "--json"))
        text = self.generate("-p", "in ", "-n", 30, "--seed", 6)
        self.assertEqual(base64.b64decode(told["base64"]), text)
        self.assertEqual(told["text"], text.decode(errors="replace"))
        self.assertEqual((told["finish"], told["prompt_tokens"], told["generated_tokens"]),
                         ("length", 3, 30))
        for key in ("prompt_tokens_per_second", "generated_tokens_per_second", "state_bytes",
                    "peak_bytes"):
            self.assertGreater(told[key], 0)
        # A hot model says bytes that are not UTF-8.
        told = json.loads(check("generate", "-m", self.model, "-p", "x", "-n", 64, "--temperature",
                                1000, "--json"))
        self.assertEqual(len(base64.b64decode(told["base64"])), 64)

    def test_statistics_go_to_stderr(self):
        process = run("generate", "-m", self.model, "-p", "in ", "-n", 10)
        self.assertEqual(len(process.stdout), 10)
        for part in (r"prompt +3 tokens, [\d,]+ tokens/s", r"generated +10 tokens, [\d,]+ tokens/s",
                     r"state +\S+ \S+ after 13 tokens", r"memory +\S+ MiB"):
            self.assertRegex(process.stderr.decode(), part)

    def test_an_empty_prompt_is_a_line_break_and_none_is_wrong_use(self):
        text = self.generate("-p", "", "-n", 20)
        self.assertEqual(text, self.generate("-p", "\n", "-n", 20))
        self.assertEqual(text, self.generate("-p", "-", "-n", 20))
        self.assertEqual(text, self.generate("-f", os.devnull, "-n", 20))
        self.assert_fails(run("generate", "-m", self.model), 2, "--state-in")
        self.assert_fails(run("generate", "-m", self.model, "-p", "x", "-f", "y"), 2, "-p and -f")
        self.assert_fails(run("generate", "-p", "x"), 2, "--model")
        for flag, value in (("--temperature", -1), ("--top-p", 2), ("--top-k", -3), ("-n", -1),
                            ("--seed", "x"), ("--repetition-penalty", 0)):
            self.assert_fails(run("generate", "-m", self.model, "-p", "x", flag, value), 2)
        self.assert_fails(run("generate", "-m", self.model, "-f", self.folder / "none"), 1,
                          "No such file")
        self.assert_fails(run("generate", "-m", self.folder, "-p", "x"), 1, self.folder)
        self.assert_fails(run("generate", "-m", self.model, "-p", "x", "--state-out",
                              self.folder / "none" / "state"), 1, "no folder")

    def test_foreign_and_damaged_states_are_refused(self):
        state = self.folder / "state"
        self.generate("-p", "in", "-n", 3, "--state-out", state)
        check("train", "--data", self.text, "--out", self.folder / "other", *SHAPE, *RUN,
              "--iterations", 1, "--seed", 2, "-q")
        other = self.folder / "other"
        process = run("generate", "-m", other, "--state-in", state, "-n", 3)
        mine = json.loads(check("info", state, "--json"))["state"]["fingerprint"]
        check("generate", "-m", other, "-p", "x", "-n", 0, "-q", "--state-out",
              self.folder / "others")
        theirs = json.loads(check("info", self.folder / "others", "--json"))["state"]["fingerprint"]
        self.assertNotEqual(mine, theirs)
        self.assert_fails(process, 1, state, mine, theirs)

        whole = state.read_bytes()
        sampler = whole.index(b"OZSS")
        for name, content in (("cut", whole[:-1]), ("empty", b""), ("text", b"in the beginning"),
                              ("format", whole.replace(b"ouzel-state-1", b"ouzel-state-9")),
                              ("model", (self.model / "model.safetensors").read_bytes()),
                              ("sampler", whole[:sampler] + b"\xff" * 60 + whole[sampler + 60:])):
            with self.subTest(name):
                (self.folder / name).write_bytes(content)
                self.assert_fails(run("generate", "-m", self.model, "--state-in",
                                      self.folder / name, "-n", 3), 1, self.folder / name)

    def test_info_shows_a_state(self):
        state = self.folder / "state"
        self.generate("-p", "in the beginning", "-n", 4, "--top-k", 7, "--stop", "%%",
                      "--state-out", state)
        told = json.loads(check("info", state, "--json"))["state"]
        self.assertEqual((told["position"], told["processed"], told["waiting"]), (20, 19, 1))
        self.assertEqual((told["sampling"]["top_k"], told["sampling"]["stop"]), (7, ["%%"]))
        shown = check("info", state).decode()
        for part in (told["fingerprint"], "after 20 tokens (19 processed, 1 waiting)", "top-k 7",
                     "stop '%%'"):
            self.assertIn(part, shown)


class Eval(ModelTest):
    def evaluate(self, *parts, **options):
        return json.loads(check("eval", "-m", self.model, "-q", "--json", *parts, **options))

    def test_files_and_pipes_give_the_same_numbers(self):
        data = self.text.read_bytes()[:5000]
        part = self.folder / "part"
        part.write_bytes(data)
        losses, logits = self.folder / "losses", self.folder / "logits"
        told = self.evaluate("--data", part, "--window", 100, "--losses-out", losses,
                             "--logits-out", logits)
        self.assertEqual((told["tokens"], told["window"]), (5000, 100))
        values = struct.unpack("<4999f", losses.read_bytes())
        self.assertAlmostEqual(sum(values) / 4999 / 0.6931471805599453,
                               told["bits_per_byte_carried"], places=6)
        self.assertEqual(logits.stat().st_size, 256 * 4)
        self.assertLess(told["bits_per_byte"], 4)
        for threads, step in ((1, 5000), (2, 999)):
            with subprocess.Popen(
                    arguments(["eval", "-m", self.model, "-q", "--json", "--data", "-", "--window",
                               100, "-t", threads, "--losses-out", self.folder / "again"]),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                for at in range(0, 5000, step):
                    process.stdin.write(data[at:at + step])
                    process.stdin.flush()
                    time.sleep(0.01)
                process.stdin.close()
                again = json.loads(process.stdout.read())
            for key in ("tokens", "bits_per_byte", "bits_per_byte_carried"):
                self.assertEqual(again[key], told[key])
            self.assertEqual((self.folder / "again").read_bytes(), losses.read_bytes())

    def test_both_numbers_are_labelled(self):
        shown = check("eval", "-m", self.model, "--data", self.text).decode()
        self.assertRegex(shown, r"windows of 256 +\d\.\d+ bits per byte\n"
                                r"state carried +\d\.\d+ bits per byte\n$")
        self.assertNotIn("bits_per_byte_carried", self.evaluate("--data", self.text, "--no-carry"))

    def test_a_state_that_predicts_worse_is_explained(self):
        model = self.folder / "model"
        check("train", "-q", "--data", self.text, "--model", "linear_attn", *SHAPE, "--context", 16,
              "--batch", 8, "--lr", 0.01, "--warmup", 4, "--iterations", 150, "--out", model)
        call = ["eval", "-m", model, "--data", self.text]
        told = json.loads(check(*call, "-q", "--json"))
        self.assertGreater(told["bits_per_byte_carried"], 1.05 * told["bits_per_byte"])
        said = "with the state carried the model does worse"
        self.assertIn(said, run(*call).stderr.decode())
        self.assertNotIn(said, run(*call, "--no-carry").stderr.decode())
        self.assertNotIn(said, run("eval", "-m", self.model, "--data", self.text).stderr.decode())

    def test_an_interrupt_leaves_no_files(self):
        # With something there before, and without.
        before = self.folder / "losses"
        before.write_bytes(b"before")
        with subprocess.Popen(
                arguments(["eval", "-m", self.model, "-q", "--data", "-", "--losses-out", before,
                           "--logits-out", self.folder / "logits"]),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdin.write(self.text.read_bytes())
            process.stdin.flush()
            for _ in range(2000):
                written = [path.stat().st_size for path in self.folder.glob("losses.*.tmp")]
                if any(written):
                    break
                time.sleep(0.01)
            self.assertTrue(any(written), "nothing was written before the interrupt")
            process.send_signal(signal.SIGINT)
            process.stdin.close()
            self.assertEqual(process.wait(timeout=20), 130)
        self.assertEqual(os.listdir(self.folder), ["losses"])
        self.assertEqual(before.read_bytes(), b"before")

    def test_a_full_disk_leaves_both_files_or_none(self):
        # The second file is larger than the limit, the first is not.
        part = self.folder / "part"
        part.write_bytes(self.text.read_bytes()[:100])
        process = run("eval", "-m", self.model, "-q", "--data", part, "--losses-out",
                      self.folder / "losses", "--logits-out", self.folder / "logits",
                      preexec_fn=limit_files_to(900))
        self.assert_fails(process, 1, self.folder / "logits")
        self.assertEqual(os.listdir(self.folder), ["part"])

    def test_a_key_that_looks_misspelt_is_noted(self):
        shutil.copytree(self.model, self.folder / "model")
        path = self.folder / "model" / "config.json"
        config = json.loads(path.read_text())
        config["norm_esp"] = config.pop("norm_eps")
        path.write_text(json.dumps({**config, "transformers_version": "5"}))
        call = ["generate", "-m", self.folder / "model", "-p", "in", "-n", 3]
        process = run(*call)
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertIn("config.json: there is no key 'norm_esp'; did you mean 'norm_eps'? It is "
                      "ignored", process.stderr.decode())
        self.assertEqual(run(*call, "-q").stderr, b"")
        self.assertNotIn("no key", run("generate", "-m", self.model, "-p", "a", "-n", 1).stderr.decode())

    def test_short_data(self):
        empty, one = self.folder / "empty", self.folder / "one"
        empty.write_bytes(b"")
        one.write_bytes(b"x")
        self.assert_fails(run("eval", "-m", self.model, "--data", empty), 1, empty, "empty")
        losses, logits = self.folder / "losses", self.folder / "logits"
        told = self.evaluate("--data", one, "--losses-out", losses, "--logits-out", logits)
        self.assertEqual((told["bits_per_byte"], told["bits_per_byte_carried"]), (None, None))
        self.assertEqual((losses.stat().st_size, logits.stat().st_size), (0, 1024))
        self.assertIn(b"nothing to predict", check("eval", "-m", self.model, "--data", one))

    def test_wrong_use(self):
        self.assert_fails(run("eval", "-m", self.model, "--data", self.text, "--window", 0), 2)
        self.assert_fails(run("eval", "-m", self.model, "--data", self.text, "--no-carry",
                              "--losses-out", self.folder / "x"), 2, "--no-carry")
        self.assert_fails(run("eval", "-m", self.model, "--data", self.folder / "none"), 1, "none")
        process = run("eval", "-m", self.model, "-q", "--data", self.text, "--losses-out",
                      self.folder / "x", preexec_fn=limit_files_to(2000))
        self.assert_fails(process, 1, self.folder / "x")
        self.assertEqual(os.listdir(self.folder), [])


class Tokens(ModelTest):
    def test_a_model_of_other_tokens_is_refused_in_one_breath(self):
        model = self.folder / "model"
        shutil.copytree(self.model, model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "vocab_size": 128}))
        raw = (model / "model.safetensors").read_bytes()
        begin = 8 + struct.unpack("<Q", raw[:8])[0]
        header, data = json.loads(raw[8:begin]), b""
        for name in [name for name in header if name != "__metadata__"]:
            first, last = header[name]["data_offsets"]
            if header[name]["shape"][0] == 256 and ("embeddings" in name or "lm_head" in name):
                header[name]["shape"][0], last = 128, (first + last) // 2
            header[name]["data_offsets"] = [len(data), len(data) + last - first]
            data += raw[begin + first:begin + last]
        text = json.dumps(header).encode()
        (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        self.assert_fails(run("generate", "-m", model, "-p", "x"), 1,
                          "ouzel generate: the model has a vocabulary of 128 tokens")


class Overwriting(ModelTest):
    """No verb writes over a file that it reads."""

    def test_files_that_are_read_stay(self):
        model, text = self.folder / "model", self.folder / "text"
        shutil.copytree(self.model, model)
        shutil.copy(self.text, text)
        os.symlink(text, self.folder / "link")
        read = {path: path.read_bytes() for path in [*model.iterdir(), text]}
        for out in (model / "model.safetensors", model / "config.json", text, self.folder / "link"):
            for flag in ("--losses-out", "--logits-out"):
                self.assert_fails(run("eval", "-m", model, "--data", text, flag, out), 2,
                                  "would overwrite", out)
            self.assert_fails(run("generate", "-m", model, "-f", text, "-n", 1, "--state-out", out),
                              2, "would overwrite", out)
        for name in ("config.json", "metrics.jsonl", "model.safetensors", "training.safetensors"):
            path = model / name
            path.touch()
            read.setdefault(path, b"")
            self.assert_fails(run("train", "--data", path, "--overwrite", "--out", model), 2,
                              "would overwrite", path)
        for path, content in read.items():
            self.assertEqual(path.read_bytes(), content, path)
        both = self.folder / "both"
        for other in (both, self.folder / "." / "x" / ".." / "both", f"{self.folder}/./both"):
            self.assert_fails(run("eval", "-m", model, "--data", text, "--losses-out", both,
                                  "--logits-out", other), 2, "two names")
        self.assert_fails(run("eval", "-m", model, "--data", text, "--losses-out", "both",
                              "--logits-out", "./both", cwd=self.folder), 2, "two names")

    def test_a_configuration_in_out_stays_as_it_is_written(self):
        out, model = self.folder / "out", ["train", "--data", self.text, *RUN, "--iterations", 1]
        out.mkdir()
        config = out / "config.json"
        config.write_text(json.dumps({"model_type": "retnet", "vocab_size": 256, "num_heads": 2,
                                      "hidden_size": 32, "num_hidden_layers": 1}))
        mine = config.read_bytes()
        os.symlink(config, self.folder / "link")
        for name in (config, out / ".." / "out" / "config.json", self.folder / "link"):
            self.assert_fails(run(*model, "--config", name, "--out", out), 2, f"would overwrite {name}",
                              "move the file")
        self.assertEqual((config.read_bytes(), os.listdir(out)), (mine, ["config.json"]))
        config.rename(self.folder / "mine.json")
        check(*model, "--config", self.folder / "mine.json", "--out", out)
        written = config.read_bytes()
        # What a run has left there may be trained from again, as it is.
        again = [*model, "--config", config, "--out", out, "--overwrite"]
        check(*again)
        self.assert_fails(run(*again, "--layers", 2), 2, "would overwrite")
        self.assertEqual(config.read_bytes(), written)
        self.assertEqual((self.folder / "mine.json").read_bytes(), mine)

    def test_links_to_what_is_not_there_are_followed(self):
        link, other = self.folder / "link", self.folder / "other"
        (self.folder / "far").mkdir()
        os.symlink("far/state", link)
        os.symlink("far/state", other)
        generate = ["generate", "-m", self.model, "-q", "-p", "in", "-n", 0, "--state-out"]
        both = ["eval", "-m", self.model, "-q", "--data", self.text, "--losses-out", link,
                "--logits-out"]
        self.assert_fails(run(*both, other), 2, "two names")
        self.assert_fails(run(*both, self.folder / "far" / "state"), 2, "two names")
        check(*generate, link)
        self.assertTrue(link.is_symlink())
        check("generate", "-m", self.model, "-q", "--state-in", self.folder / "far" / "state", "-n", 1)
        other.unlink()
        os.symlink("none/state", other)
        self.assert_fails(run(*generate, other), 1, "no folder", "none")
        os.symlink("round", self.folder / "round")
        self.assert_fails(run(*generate, self.folder / "round"), 1, "round", "levels of symbolic links")

    def test_links_in_a_circle_are_named(self):
        circle = self.folder / "circle"
        os.symlink("circle", circle)
        for call in (["generate", "-m", circle, "-p", "a"], ["generate", "-m", self.model, "-f", circle],
                     ["generate", "-m", self.model, "--state-in", circle],
                     ["generate", "-m", self.model, "-p", "a", "--state-out", circle],
                     ["eval", "-m", circle, "--data", self.text], ["eval", "-m", self.model, "--data", circle],
                     ["eval", "-m", self.model, "--data", self.text, "--losses-out", circle],
                     ["info", circle], ["attend", circle, "--compare"],
                     ["train", "--data", circle, "--out", self.folder / "out"],
                     ["train", "--data", self.text, "--out", circle],
                     ["train", "--data", self.text, "--out", circle, "--resume"],
                     ["train", "--data", self.text, "--config", circle, "--out", self.folder / "out"]):
            with self.subTest(call=call):
                self.assert_fails(run(*call), 1, circle, "levels of symbolic links")
        # In the middle of a path, too.
        for call in (["generate", "-m", circle / "m", "-p", "a"],
                     ["generate", "-m", self.model, "-p", "a", "--state-out", circle / "a" / "state"],
                     ["train", "--data", self.text, "--out", circle / "out"],
                     ["train", "--data", self.text, "--out", circle / "a" / "out", "--resume"]):
            with self.subTest(call=call):
                self.assert_fails(run(*call), 1, circle, "levels of symbolic links")
        self.assertTrue(circle.is_symlink())

    def test_a_folder_is_no_file_to_write(self):
        for flag, call in (("--state-out", ["generate", "-m", self.model, "-p", "a", "-n", 1]),
                           ("--losses-out", ["eval", "-m", self.model, "--data", self.text]),
                           ("--logits-out", ["eval", "-m", self.model, "--data", self.text])):
            self.assert_fails(run(*call, flag, self.folder), 1, self.folder)

    def test_an_empty_name_is_no_file(self):
        for call in (["generate", "-m", self.model, "-p", "a", "--state-in", ""],
                     ["generate", "-m", self.model, "-p", "a", "--state-out", ""],
                     ["generate", "-m", "", "-p", "a"],
                     ["eval", "-m", self.model, "--data", self.model / "config.json", "--losses-out", ""],
                     ["train", "--data", self.model / "config.json", "--out", ""]):
            self.assert_fails(run(*call), 2, "empty name")

    def test_a_state_may_replace_the_one_it_goes_on_from(self):
        state, model = self.folder / "state", ["generate", "-m", self.model, "-q"]
        whole = check(*model, "-p", "in the ", "-n", 20, "--seed", 1)
        parts = check(*model, "-p", "in the ", "-n", 12, "--seed", 1, "--state-out", state)
        parts += check(*model, "-n", 8, "--state-in", state, "--state-out", state)
        self.assertEqual(parts, whole)

    def test_devices_may_be_both(self):
        process = run("eval", "-m", self.model, "--data", "/dev/stdin", "--losses-out", "/dev/null",
                      stdin=subprocess.DEVNULL)
        self.assert_fails(process, 1, "empty")


class Train(ModelTest):
    def train(self, out, *parts):
        return ["train", "--data", self.text, "--out", out, *SHAPE, *RUN, "--validate-every", 7,
                "--checkpoint-every", 5, *parts]

    def results(self, out):
        return [(out / name).read_bytes() for name in ("model.safetensors", "metrics.jsonl")]

    def test_killed_at_random_moments_it_ends_the_same(self):
        options = ["--iterations", 120, "--grad-accumulation", 2, "-q"]
        begin = time.monotonic()
        check(*self.train(self.folder / "whole", *options))
        duration = time.monotonic() - begin
        rng, kills = random.Random(), 0
        for attempt in range(60):
            with subprocess.Popen(arguments(self.train(self.folder / "killed", *options,
                                                       "--resume"))) as process:
                try:
                    # A start takes a while itself; later attempts are allowed more.
                    code = process.wait(rng.uniform(0.02, (0.2 + 0.03 * attempt) * duration))
                    self.assertEqual(code, 0)
                    break
                except subprocess.TimeoutExpired:
                    process.kill()
                    kills += 1
        self.assertGreater(kills, 0)
        self.assertEqual(self.results(self.folder / "killed"), self.results(self.folder / "whole"))
        names = sorted(os.listdir(self.folder / "killed"))
        for name in ("config.json", "metrics.jsonl", "model.safetensors", "training.safetensors"):
            self.assertIn(name, names)

    def test_an_interrupt_saves_and_says_how_to_go_on(self):
        options = ["--iterations", 150, "-t", 1]
        check(*self.train(self.folder / "whole", *options, "-q"))
        out = self.folder / "a folder"
        with subprocess.Popen(arguments(self.train(out, *options)), stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE) as process:
            for line in process.stderr:
                if b"/150  loss" in line:
                    break
            process.send_signal(signal.SIGINT)
            said = process.stderr.read().decode()
            self.assertEqual(process.wait(timeout=20), 130)
        self.assertRegex(said, r"interrupted after \d+ of 150 iterations")
        command = shlex.split(said.splitlines()[-1])
        self.assertEqual((command[0], command[-1]), ("ouzel", "--resume"))
        check(*command[1:])
        self.assertEqual(self.results(out), self.results(self.folder / "whole"))
        # Once more there is nothing to do.
        check(*command[1:])
        self.assertEqual(self.results(out), self.results(self.folder / "whole"))
        # Other options are not those of the run.
        process = run(*command[1:], "--lr", 0.02)
        self.assert_fails(process, 1, "lr", 0.02)

    def test_a_run_is_lengthened(self):
        out, whole = self.folder / "out", self.folder / "whole"
        check(*self.train(out, "--iterations", 20, "-q"))
        self.assert_fails(run(*self.train(out, "--iterations", 30)), 1,
                          "train it on (--resume, more iterations)")
        shutil.copytree(out, whole)
        # Not by accident: without a number it is that of the run.
        again = run(*self.train(out, "--resume"))
        self.assertEqual((again.returncode, self.results(out)), (0, self.results(whole)), again.stderr)
        process = run(*self.train(out, "--iterations", 30, "--resume"))
        said = process.stderr.decode()
        self.assertEqual(process.returncode, 0, said)
        self.assertRegex(said, r"lengthened +20 of 20 iterations are done, now it is to have 30")
        self.assertIn("30/30  loss", said)
        quiet = run(*self.train(whole, "--iterations", 30, "--resume", "-q"))
        self.assertEqual(quiet.stderr, b"")
        self.assertEqual(self.results(out), self.results(whole))
        again = run(*self.train(out, "--iterations", 30, "--resume"))
        self.assertNotIn(b"lengthened", again.stderr)
        self.assert_fails(run(*self.train(out, "--iterations", 25, "--resume")), 1,
                          "iterations = 30, not 25", "learning rates", "only more", "another folder")
        # Of another model, what differs and no more.
        other = run(*self.train(out, "--iterations", 40, "--resume", "--layers", 3))
        self.assert_fails(other, 1, "num_hidden_layers = ", ", not 3", "options of its start again")
        self.assertNotIn(b"vocab_size", other.stderr)
        self.assertNotIn(b"lengthened", other.stderr)

    def test_files_of_others_are_not_replaced(self):
        out = self.folder / "out"
        out.mkdir()
        (out / "config.json").write_text("of another program")
        self.assert_fails(run(*self.train(out)), 1, "config.json is there without a model",
                          "--overwrite")
        self.assertEqual((out / "config.json").read_text(), "of another program")
        (out / "config.json").unlink()
        for foreign in ("of another program", '{"iteration": 1, "loss": 5.5}\n'):
            (out / "metrics.jsonl").write_text(foreign)
            self.assert_fails(run(*self.train(out)), 1, "metrics.jsonl is there without a model",
                              "--overwrite")
            self.assertEqual((out / "metrics.jsonl").read_text(), foreign)
        # Of a run that was stopped before its first checkpoint.
        for begun in ("", '{"iter', '{"iteration":1,"loss":5.5}\n{"iter'):
            (out / "metrics.jsonl").write_text(begun)
            check(*self.train(out, "--iterations", 1))
            shutil.rmtree(out)
            out.mkdir()
        resumed = run(*self.train(self.folder / "new", "--iterations", 1, "--resume"))
        self.assertIn(b"nothing to go on from", resumed.stderr)

    def test_a_run_killed_before_its_first_checkpoint(self):
        out, options = self.folder / "out", ["--iterations", 30, "-q"]
        check(*self.train(out, "--iterations", 1, "-q"))
        model = (out / "model.safetensors").read_bytes()
        call = self.train(out, "--iterations", 10**9, "--checkpoint-every", 10**9, "-q")
        with subprocess.Popen(arguments([*call, "--overwrite"])) as process:
            while (out / "training.safetensors").exists():
                time.sleep(0.01)
            process.kill()
        self.assertEqual((out / "model.safetensors").read_bytes(), model)
        said = run(*self.train(out, *options, "--resume"))
        self.assert_fails(said, 1, "no checkpoint to go on from", "start it again (--overwrite without "
                          "--resume)")
        check(*self.train(out, *options, "--overwrite"))
        check(*self.train(self.folder / "whole", *options))
        self.assertEqual(self.results(out), self.results(self.folder / "whole"))

    def test_threads_recomputation_and_checkpoints_do_not_matter(self):
        options = ["--iterations", 12, "-q"]
        check(*self.train(self.folder / "one", *options, "-t", 1))
        check(*self.train(self.folder / "two", *options, "-t", 2, "--recompute",
                          "--checkpoint-every", 100))
        self.assertEqual(self.results(self.folder / "one"), self.results(self.folder / "two"))

    def test_carried_states_survive_a_resume(self):
        options = ["--iterations", 14, "--carry", "-q"]
        check(*self.train(self.folder / "whole", *options))
        process = run(*self.train(self.folder / "part", *options),
                      preexec_fn=limit_files_to(10**9))
        self.assertEqual(process.returncode, 0)
        with subprocess.Popen(arguments(self.train(self.folder / "part", *options))) as process:
            time.sleep(0.05)
            process.kill()
        check(*self.train(self.folder / "part", *options, "--resume"))
        self.assertEqual(self.results(self.folder / "whole"), self.results(self.folder / "part"))

    def test_a_full_disk_leaves_the_last_checkpoint(self):
        out = self.folder / "out"
        check(*self.train(self.folder / "whole", "--iterations", 20, "-q"))
        process = run(*self.train(out, "--iterations", 20, "-q"),
                      preexec_fn=limit_files_to(100 * 1000))
        self.assert_fails(process, 1, out)
        self.assertFalse((out / "training.safetensors").exists())
        check(*self.train(out, "--iterations", 20, "-q", "--resume"))
        self.assertEqual(self.results(out), self.results(self.folder / "whole"))
        before = self.results(out)
        process = run(*self.train(out, "--iterations", 20, "-q"),
                      preexec_fn=limit_files_to(100 * 1000))
        self.assertEqual(process.returncode, 1)
        self.assertEqual(self.results(out)[0], before[0])

    def test_what_it_says(self):
        process = run(*self.train(self.folder / "out", "--iterations", 20))
        said = process.stderr.decode()
        self.assertEqual((process.returncode, process.stdout), (0, b""))
        self.assertNotIn("\r", said)
        for part in (r"model +retnet, 2 layers of 32, 2 heads", r"parameters [\d,]+",
                     r"memory +at most", r"20/20  loss \d\.\d+  validation \d\.\d+ .*tokens/s",
                     r"% of peak", r"ouzel generate -m \S+/out -p"):
            self.assertRegex(said, part)
        lines = (self.folder / "out" / "metrics.jsonl").read_text().splitlines()
        self.assertEqual([json.loads(line)["iteration"] for line in lines], list(range(1, 21)))
        again = self.train(self.folder / "out", "--iterations", 20, "-q", "--json")
        self.assert_fails(run(*again), 1, "holds a trained model", "(--overwrite)")
        loud = run(*self.train(self.folder / "out", "--iterations", 20))  # without a summary before
        self.assert_fails(loud, 1, "holds a trained model", "(--overwrite)")
        self.assertEqual(loud.stderr.count(b"\n"), 1, loud.stderr)
        told = json.loads(check(*again, "--overwrite"))
        self.assertEqual((told["iteration"], told["iterations"]), (20, 20))
        self.assertLess(told["peak_bytes"], told["planned_peak_bytes"])

    def test_progress_fits_the_terminal(self):
        for columns in (60, 80, 200):
            terminal, end = pty.openpty()
            fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            with subprocess.Popen(arguments(self.train(self.folder / str(columns), "--iterations", 30)),
                                  stdout=subprocess.DEVNULL, stderr=end) as process:
                os.close(end)
                said = b""
                while True:
                    try:
                        part = os.read(terminal, 1 << 16)
                    except OSError:  # the other end is closed
                        break
                    if not part:
                        break
                    said += part
                self.assertEqual(process.wait(), 0)
            os.close(terminal)
            rows = [row.strip() for row in re.split(r"\r\n|\r\x1b\[K", said.decode()) if "/30  loss" in row]
            self.assertTrue(any(row.startswith("[") for row in rows))
            self.assertTrue(any(row.startswith("30/30") for row in rows))
            for row in rows:
                self.assertLess(len(row), columns, row)
                self.assertRegex(row, r"bits\)(  \S+( s)? left(  [\d,]+ tokens/s(  \d+ % of peak)?)?)?$")
                self.assertTrue("% of peak" in row if columns == 200 else "left" in row or columns < 80, row)

    def test_without_memory_it_says_what_takes_less(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

        process = run("train", "--data", self.text, "--out", self.folder / "out", "--context", 256,
                      "--batch", 2000, "-t", 1, "-q", preexec_fn=limit)
        self.assert_fails(process, 1, "cannot allocate", "the run takes up to", "--recompute", "--batch",
                          "--context", "--dry-run")

    def test_it_says_when_the_data_are_learnt_by_heart(self):
        few = self.folder / "few"
        few.write_bytes(random.Random(3).randbytes(400))
        shape = ["--layers", 1, "--dim", 32, "--heads", 2, "--context", 32, "--batch", 4, "--lr", 0.02]
        process = run("train", "--data", few, *shape, "--validation", 0.3, "--iterations", 150,
                      "--validate-every", 10, "--out", self.folder / "out")
        said = process.stderr.decode()
        self.assertEqual(process.returncode, 0, said)
        self.assertRegex(said, r"validation loss was \d\.\d+ before it rose to \d+\.\d+.*by heart.*fewer")
        self.assertIn("the model, with the weights of the last iteration, is in", said)
        self.assertNotIn("more --iterations", said)
        process = run("train", "--data", self.text, *shape, "--iterations", 1, "--out",
                      self.folder / "one")
        self.assertIn("hardly words: give it more --iterations", process.stderr.decode())
        process = run("train", "--data", self.text, *shape, "--lr", 50, "--iterations", 15, "--out",
                      self.folder / "steep")
        self.assertIn("a lower --lr would do better", process.stderr.decode())

    def test_a_dry_run_plans(self):
        shape = ["--layers", 3, "--dim", 96, "--context", 128, "--batch", 8]
        data = ["train", "--data", self.text]
        told = json.loads(check(*data, *shape, "--dry-run", "--json"))
        self.assertEqual(told["peak_bytes"], sum(told[key] for key in (
            "weight_bytes", "optimizer_bytes", "activation_bytes", "other_bytes")))
        self.assertIn(f"{told['parameters']:,}".encode(), check(*data, *shape, "--dry-run"))
        less = json.loads(check(*data, *shape, "--dry-run", "--json", "--recompute"))
        self.assertLess(less["peak_bytes"], told["peak_bytes"])
        ran = json.loads(check(*data, *shape, "--iterations", 2, "--out", self.folder / "out",
                               "--json", "-q"))
        self.assertEqual(ran["parameters"], told["parameters"])
        self.assertEqual(ran["planned_peak_bytes"], told["peak_bytes"])
        self.assertLess(ran["peak_bytes"], told["peak_bytes"])
        self.assertFalse((self.folder / "none").exists())

    def test_a_hybrid_by_its_configuration(self):
        config = self.folder / "config.json"
        config.write_text(json.dumps({
            "model_type": "linear_attn", "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 2,
            "vocab_size": 256, "intermediate_size": 64,
            "attn": {"layers": [1], "num_heads": 2}}))
        process = run("train", "--data", self.text, "--config", config, *RUN, "--iterations", 3,
                      "--out", self.folder / "out")
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertIn("linear_attn (hybrid), 3 layers of 32", process.stderr.decode())
        text = check("generate", "-m", self.folder / "out", "-p", "in", "-n", 9, "-q")
        self.assertEqual(len(text), 9)
        self.assert_fails(run("train", "--data", self.text, "--config", config, "--model", "retnet",
                              "--out", self.folder / "out"), 2, "--config")
        told = json.loads(config.read_text())
        config.write_text(json.dumps({**told, "norm_esp": 1, "torch_dtype": "float32"}))
        process = run("train", "--data", self.text, "--config", config, "--out", self.folder / "out")
        self.assert_fails(process, 1, "config.json", "'norm_esp'; did you mean 'norm_eps'?")
        self.assertEqual(process.stderr.count(b"\n"), 1, process.stderr)
        config.write_text(json.dumps({**told, "attention": {}, "attn": {**told["attn"], "window": 8}}))
        process = run("train", "--data", self.text, "--config", config, "--out", self.folder / "out")
        self.assert_fails(process, 1, "no key 'attention'", "no key 'attn.window'")
        config.write_text('{"model_type": "mamba"}')
        self.assert_fails(run("train", "--data", self.text, "--config", config, "--out",
                              self.folder / "out"), 1, "config.json", "mamba")

    def test_wrong_use(self):
        empty, tiny = self.folder / "empty", self.folder / "tiny"
        empty.write_bytes(b"")
        tiny.write_bytes(b"in the beginning")
        out = self.folder / "out"
        self.assert_fails(run("train", "--data", empty, "--out", out), 1, empty)
        self.assert_fails(run("train", "--data", tiny, "--out", out), 1, tiny, "256")
        self.assert_fails(run("train", "--data", self.folder / "none", "--out", out), 1, "none")
        self.assert_fails(run("train", "--data", self.text), 2, "--out")
        self.assert_fails(run("train", "--out", out), 2, "--data")
        self.assert_fails(run("train", "--data", "-", "--out", out), 2, "--data - is no file", "name a file")
        # Before anything is said of the run.
        for options in (["--data", tiny], ["--data", self.text, "--carry", "--batch", 3000]):
            process = run("train", *options, "--out", out)
            self.assert_fails(process, 1, "are for training")
            self.assertEqual(process.stderr.count(b"\n"), 1, process.stderr)
        self.assertFalse(out.exists())
        common = ["train", "--data", self.text, "--out", out]
        self.assert_fails(run(*common, "--model", "retnot"), 2, "--model", "did you mean 'retnet'?")
        self.assert_fails(run(*common, "--model", "gla"), 2,
                          "--model: 'gla' is none of retnet, linear_attn, transformer")
        self.assert_fails(run(*common, "--lr", "1e-3x"), 2, "--lr: '1e-3x' is not a number")
        self.assert_fails(run(*common, "--iteratons", 3), 2, "did you mean '--iterations'?")
        self.assert_fails(run(*common, "--dim", 33, "--heads", 2), 2, "--dim 33 is its hidden_size",
                          "--heads 2 is its num_heads")
        # Options are named as they were given.
        for flag, value in (("--lr", -1), ("--min-lr", 2), ("--batch", 0), ("--grad-accumulation", 0),
                            ("--validate-every", 0), ("--weight-decay", "nan"), ("--beta2", 1)):
            self.assert_fails(run(*common, flag, value), 2, f"ouzel train: {flag} is {value}, which is not")
        self.assert_fails(run(*common, "--resume", "--overwrite"), 2, "--resume goes on", "--overwrite")
        self.assert_fails(run(*common, "--model", "transformer", "--carry"), 2,
                          "ouzel train: --carry: the state of layer 0")
        self.assertFalse(out.exists())


if __name__ == "__main__":
    OUZEL = os.path.abspath(sys.argv.pop(1))
    unittest.main()
