"""PeakMemory callback: peak memory of the accelerator, or of the process, in each log record.

The peak counts from the start of the process. The callback never resets the counters of torch.
"""

import resource
import sys
from typing import Any

import torch

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

_GIB = 1024**3


class PeakMemory(TrainerCallback):
    """Callback that adds `peak_memory_gib` to each log record: this rank's accelerator, or the process on CPU.

    The value is the peak since the process started. A reset here would falsify the measurements of other code.
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
    """Return the peak of allocated accelerator memory; without an accelerator, the peak resident set size."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux reports KiB, macOS reports bytes.
    return peak if sys.platform == "darwin" else peak * 1024
