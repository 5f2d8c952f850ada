"""Job of the rank tests, started by torchrun: a script, or several styles one after the other.

`python rank_job.py SCRIPT ARGUMENTS.json` or `python rank_job.py --styles MODULE FOLDER STYLE ...`
"""

import os
import sys
from pathlib import Path

# Imported before the ranks fork, because each import takes seconds.
import accelerate  # noqa: F401
import datasets  # noqa: F401
import torch

from tests.guarantees.drop_in_scripts.script_runs import command_line, run_script
from tests.guarantees.drop_in_scripts.styles import STYLES
from tests.guarantees.drop_in_scripts.styles.recipes import run_recipe


def run_styles(module: str, folder: str, *names: str) -> None:
    """Run the styles with half of the batch on each rank, and save their results on the first."""
    for name in names:
        result = run_recipe(STYLES[name], module, Path(folder, name), per_device_train_batch_size=2)
        if os.environ["RANK"] == "0":
            torch.save([result.losses, result.metrics, result.weights], Path(folder, f"{name}.pt"))


if __name__ == "__main__":
    if sys.argv[1] == "--styles":
        run_styles(*sys.argv[2:])
    else:
        with command_line(*sys.argv[1:]):
            run_script(Path(sys.argv[0]))
