"""Samples of a step: dataset indices with rank and micro-batch, computed from seed, epoch and position alone."""

from forgather.tools.samples.run_order import RunOrder, StepError, order_of_run
from forgather.tools.samples.step_order import Anchor, StepOrder, StepSample, samples_of_step

__all__ = ["Anchor", "RunOrder", "StepError", "StepOrder", "StepSample", "order_of_run", "samples_of_step"]
