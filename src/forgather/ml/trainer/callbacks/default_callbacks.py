"""Default callbacks of a trainer, used in addition to the user's callbacks.

The module itself is callable: `default_callbacks()` returns the list. `BaseTrainer.default_callbacks` calls it.
"""

import sys
from types import ModuleType

from forgather.ml.trainer.callbacks.default_metrics import DefaultMetrics
from forgather.ml.trainer.callbacks.info import InfoCallback
from forgather.ml.trainer.callbacks.json_logger import JsonLogger
from forgather.ml.trainer.callbacks.progress import ProgressCallback
from forgather.ml.trainer.callbacks.run_recorder import RunRecorder
from forgather.ml.trainer.trainer_types import TrainerCallback

__all__ = ["DefaultMetrics", "InfoCallback", "JsonLogger", "ProgressCallback", "RunRecorder"]


# A package cannot have a submodule and a function of the same name: importing the submodule replaces the function.
# Both `callbacks.default_callbacks()` and `callbacks.default_callbacks.InfoCallback` must work, so the module is callable.
class _DefaultCallbacks(ModuleType):
    def __call__(self) -> list[TrainerCallback]:
        """Return new default callbacks: progress, run summary, speed metrics, JSON log and run record."""
        log = JsonLogger(evaluations_alone=False)
        return [ProgressCallback(), InfoCallback(), DefaultMetrics(), log, RunRecorder()]


sys.modules[__name__].__class__ = _DefaultCallbacks
