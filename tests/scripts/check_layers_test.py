"""A planted violation of each kind is found, and what is allowed is not reported."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

CHECKER = Path(__file__).parents[2] / "scripts" / "check_layers.py"


def run(files):
    """Exit code and output of the checker over a tree of these files."""
    with tempfile.TemporaryDirectory() as root:
        for name, text in files.items():
            path = Path(root) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        done = subprocess.run(
            [sys.executable, CHECKER, root], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout


class CheckLayers(unittest.TestCase):
    def assert_clean(self, files):
        code, output = run(files)
        self.assertEqual((code, output), (0, "layers: 0 violations\n"))

    def assert_found(self, path, line):
        code, output = run({path: f"// A file.\n{line}\n"})
        self.assertEqual(code, 1, output)
        self.assertTrue(output.startswith(f"{path}:2: "), output)
        self.assertTrue(output.endswith("layers: 1 violations\n"), output)

    def test_the_ladder_goes_down(self):
        self.assert_clean(
            {
                "src/base/a.cc": '#include <vector>\n#include "ouzel/error.h"\n#include "src/base/a.h"\n',
                "src/kernels/k.cc": '#include "hwy/highway.h"\n#include "src/base/a.h"\n',
                "src/ops/o.cc": '#include "src/kernels/k.h"\n',
                "src/models/m.cc": '#include "src/formats/f.h"\n#include "src/layers/l.h"\n',
                "src/train/t.cc": '#include "src/models/m.h"\n',
                "apps/ouzel/cmd.cc": '#include <CLI/CLI.hpp>\n#include "src/infer/i.h"\n',
                "tests/a_test.cc": '#include "src/ops/reference/r.h"\n#include "helpers.h"\n',
                "include/ouzel/x.h": '#include <span>\n#include "ouzel/error.h"\n',
                "include/ouzel/c.h": "#include <stdint.h>\n",
            }
        )

    def test_upward_includes_are_found(self):
        self.assert_found("src/base/a.cc", '#include "src/kernels/k.h"')
        self.assert_found("src/formats/f.cc", '#include "src/kernels/k.h"')
        self.assert_found("src/kernels/k.cc", '#include "src/ops/o.h"')
        self.assert_found("src/layers/l.cc", '#include "src/formats/f.h"')
        self.assert_found("src/train/t.cc", '#include "src/infer/i.h"')
        self.assert_found("src/infer/i.cc", '#include "src/train/t.h"')
        self.assert_found("src/capi/c.cc", '#include "apps/ouzel/cmd.h"')
        self.assert_found("src/models/m.cc", '  #  include "src/train/t.h"')

    def test_the_reference_shares_nothing(self):
        self.assert_found("src/ops/reference/r.cc", '#include "src/kernels/k.h"')
        self.assert_found("src/ops/reference/r.cc", '#include "src/ops/o.h"')

    def test_public_headers_stand_alone(self):
        for header in ("<immintrin.h>", "<fmt/format.h>", '"hwy/highway.h"', '"src/base/a.h"'):
            self.assert_found("include/ouzel/x.h", f"#include {header}")
        self.assert_found("examples/e.cc", '#include "src/base/a.h"')

    def test_files_outside_the_rooms_are_found(self):
        code, output = run({"src/misc/x.cc": "// Lost.\n"})
        self.assertEqual(code, 1)
        self.assertIn("src/misc/x.cc:1: this file of src/ is in no room", output)

    def test_paths_of_one_machine_are_found(self):
        for folder in ("tmp", "work", "root", "home"):
            self.assert_found("docs/d.md", f"see /{folder}/x for more")
            self.assert_found("src/base/a.cc", f'const char* p = "/{folder}";')
        self.assert_clean({"docs/d.md": "work/tmp and ./tmp/x and $TMPDIR/tmp are fine\n"})


if __name__ == "__main__":
    unittest.main()
