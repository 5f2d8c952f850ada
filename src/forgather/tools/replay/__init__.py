"""Replay of a step: the same batches and random numbers again, with losses, gradients and activations in detail."""

from forgather.tools.replay.device_check import DeviceCheck, compare_ranks
from forgather.tools.replay.report import (
    ActivationReport,
    FirstNonFinite,
    LoggedStep,
    ModuleGradient,
    ReplayError,
    ReplayReport,
    SampleLoss,
    StepReport,
    TokenLoss,
)
from forgather.tools.replay.runner import replay, replay_run

__all__ = [
    "ActivationReport",
    "DeviceCheck",
    "FirstNonFinite",
    "LoggedStep",
    "ModuleGradient",
    "ReplayError",
    "ReplayReport",
    "SampleLoss",
    "StepReport",
    "TokenLoss",
    "compare_ranks",
    "replay",
    "replay_run",
]
