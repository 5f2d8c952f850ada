"""Launcher: `python -m tests.support.rehearsal COMMAND ...` runs a command on the rehearsal device.

The device is active in the command and in all Python processes that it starts. Where it cannot be built, one line says
why, and the exit code is 0. The environment variable REHEARSAL_DEVICES gives the number of devices (8).
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tests.support.rehearsal.activation import EXTENSION_VARIABLE
from tests.support.rehearsal.build import CannotBuild, build

REPOSITORY = Path(__file__).parents[3]
STARTUP = Path(__file__).parent / "startup"


def environment(extension_folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a process with the device."""
    # The package `tests` hides all devices when it is imported, also by this launcher.
    hidden = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR")
    paths = [str(STARTUP), str(REPOSITORY), *filter(None, [variables.get("PYTHONPATH")])]
    return {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **{name: value for name, value in variables.items() if name not in hidden or value not in ("", "*:cpu")},
        "REHEARSAL": "1",
        EXTENSION_VARIABLE: str(extension_folder),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def main(command: Sequence[str]) -> NoReturn:
    if not command:
        sys.exit("usage: python -m tests.support.rehearsal COMMAND [ARGUMENT ...]")
    try:
        folder = build()
    except CannotBuild as error:
        print(f"Skipped on the rehearsal device: {error}.")
        sys.exit(0)
    os.execvpe(command[0], list(command), environment(folder, os.environ))


if __name__ == "__main__":
    main(sys.argv[1:])
