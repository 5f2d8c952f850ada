"""Default callbacks: what a trainer uses beside the callbacks that it is given.

The module is also the function: `default_callbacks()` makes the list. A package cannot have a submodule and a function
under one name, since importing the submodule replaces the function.
"""

import sys
from types import ModuleType

from forgather.ml.trainer.callbacks.default_metrics import DefaultMetrics
from forgather.ml.trainer.callbacks.info import InfoCallback
from forgather.ml.trainer.callbacks.json_logger import JsonLogger
from forgather.ml.trainer.callbacks.progress import ProgressCallback
from forgather.ml.trainer.trainer_types import TrainerCallback

__all__ = ["DefaultMetrics", "InfoCallback", "JsonLogger", "ProgressCallback"]


class _DefaultCallbacks(ModuleType):
    def __call__(self) -> list[TrainerCallback]:
        """New default callbacks: progress, a summary of the run, speed metrics, and a JSON log."""
        return [ProgressCallback(), InfoCallback(), DefaultMetrics(), JsonLogger(evaluations_alone=False)]


sys.modules[__name__].__class__ = _DefaultCallbacks
