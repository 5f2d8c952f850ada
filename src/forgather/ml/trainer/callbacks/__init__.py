"""Callbacks that ship with the trainers.

Each is imported on first use, so that training without TensorBoard or plots does not pay for these imports.
"""

import importlib
from typing import TYPE_CHECKING

from forgather._lazy import lazily, listing

if TYPE_CHECKING:
    from forgather.ml.trainer.callbacks.default_metrics import DefaultMetrics as DefaultMetrics
    from forgather.ml.trainer.callbacks.divergence import DivergenceDetector as DivergenceDetector
    from forgather.ml.trainer.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from forgather.ml.trainer.callbacks.info import InfoCallback as InfoCallback
    from forgather.ml.trainer.callbacks.json_logger import JsonLogger as JsonLogger
    from forgather.ml.trainer.callbacks.parameter_norms import GradLogger as GradLogger
    from forgather.ml.trainer.callbacks.parameter_norms import WeightNormLogger as WeightNormLogger
    from forgather.ml.trainer.callbacks.peak_memory import PeakMemory as PeakMemory
    from forgather.ml.trainer.callbacks.plot import PlotCallback as PlotCallback
    from forgather.ml.trainer.callbacks.profiler import ProfilerCallback as ProfilerCallback
    from forgather.ml.trainer.callbacks.progress import ProgressCallback as ProgressCallback
    from forgather.ml.trainer.callbacks.ray_report import RayReportCallback as RayReportCallback
    from forgather.ml.trainer.callbacks.run_recorder import RunRecorder as RunRecorder
    from forgather.ml.trainer.callbacks.tensorboard import TBLogger as TBLogger
    from forgather.ml.trainer.callbacks.textgen import TextgenCallback as TextgenCallback
    from forgather.ml.trainer.trainer_types import TrainerCallback

    # At run time this is the callable module of the same name.
    def default_callbacks() -> list[TrainerCallback]: ...


_MODULES = {
    "DefaultMetrics": "default_metrics",
    "DivergenceDetector": "divergence",
    "EarlyStopping": "early_stopping",
    "GradLogger": "parameter_norms",
    "InfoCallback": "info",
    "JsonLogger": "json_logger",
    "PeakMemory": "peak_memory",
    "PlotCallback": "plot",
    "ProfilerCallback": "profiler",
    "ProgressCallback": "progress",
    "RayReportCallback": "ray_report",
    "RunRecorder": "run_recorder",
    "TBLogger": "tensorboard",
    "TextgenCallback": "textgen",
    "WeightNormLogger": "parameter_norms",
}

__all__ = ["default_callbacks", *_MODULES]


_find = lazily(__name__, _MODULES)


def __getattr__(name: str) -> object:
    if name == "default_callbacks":
        return importlib.import_module(f"{__name__}.default_callbacks")
    return _find(name)


__dir__ = listing(__name__, {**_MODULES, "default_callbacks": "default_callbacks"})
