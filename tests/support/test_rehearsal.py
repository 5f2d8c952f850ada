"""The launcher of the rehearsal device, where the device cannot be built."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_without_a_compiler_the_launcher_skips_in_one_line(tmp_path: Path) -> None:
    variables = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "CXX": ""}
    command = [sys.executable, "-m", "tests.support.rehearsal", "false"]
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout == "Skipped on the rehearsal device: no C++ compiler (c++, g++ or clang++) found.\n"
