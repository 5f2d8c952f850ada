"""Script with a Trainer that kills its process without notice: `python -m ... SCRIPT ARGUMENTS.json`."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.guarantees.drop_in_scripts.script_runs import command_line, run_script

LAST_IMPORT = "logger = logging.getLogger(__name__)\n"
DOOM = (
    "Trainer = __import__('tests.guarantees.drop_in_scripts.doomed_script', fromlist=['doomed']).doomed(Trainer, {})\n"
)


def doomed(trainer_class: Any, step: int) -> Any:
    """Return a subclass that dies at the start of the step."""

    class DoomedTrainer(trainer_class):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(*args, **kwargs)

    return DoomedTrainer


def doom(path: Path, step: int) -> None:
    """Change a script to use the subclass."""
    source = path.read_text()
    assert source.count(LAST_IMPORT) == 1
    path.write_text(source.replace(LAST_IMPORT, LAST_IMPORT + DOOM.format(step)))


if __name__ == "__main__":
    with command_line(*sys.argv[1:]):
        run_script(Path(sys.argv[0]))
