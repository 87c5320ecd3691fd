"""What tests of the program share: its processes, files of tensors, errors."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

OUZEL = os.path.abspath(sys.argv.pop(1))  # the tests' only argument


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
