"""The most memory that training has needed."""

import resource
import sys
from typing import Any

import torch

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

_GIB = 1024**3


class PeakMemory(TrainerCallback):
    """Adds `peak_memory_gib` to each log record: of this rank's accelerator, or of the process when there is none.

    It is the peak since the process started: resetting it here would falsify what others measure.
    """

    changes_control = False

    def on_log_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **kwargs: object,
    ) -> None:
        logs["peak_memory_gib"] = peak_memory_bytes() / _GIB


def peak_memory_bytes() -> int:
    """Peak of the memory allocated on the current accelerator; without one, of the resident memory of the process."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes
    return peak if sys.platform == "darwin" else peak * 1024
