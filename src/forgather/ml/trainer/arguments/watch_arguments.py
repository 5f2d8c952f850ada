"""Arguments of the watch over ranks: time limits of the phases of a run.

A limit that must be positive raises ValueError otherwise. Every trainer has them as `args.watch`.
"""

from dataclasses import dataclass

from forgather.ml.trainer.arguments.minimal_arguments import ArgumentGroup

_LIMITS = ("setup_timeout", "step_timeout", "save_timeout", "data_timeout", "evaluation_timeout")


@dataclass(kw_only=True)
class WatchArguments(ArgumentGroup):
    """Time limits, in seconds without progress. A rank that exceeds one is named, and the job ends with exit code 75."""

    enabled: bool = True
    """Watch the ranks. Set it to False for a debugger that the watch does not recognise."""
    setup_timeout: float = 1800.0
    """Set-up and loading a checkpoint. Also the first five steps and evaluation batches, callbacks, `compute_metrics`."""
    step_timeout: float | None = None
    """Forward, backward, reduce, optimizer, and callbacks if set. None: ten times the median of 50 steps, at least 60."""
    save_timeout: float = 3600.0
    """Saving a checkpoint."""
    data_timeout: float = 600.0
    """Loading the batches of a step, or a batch of an evaluation."""
    evaluation_timeout: float | None = None
    """One evaluation batch, and `compute_metrics` if set. None: ten times the median of 50 batches, at least 60."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _LIMITS:
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ValueError(
                    f"watch.{name}={seconds!r} cannot be used: it is a number of seconds above 0. Set watch.enabled=False "
                    "to switch the watch off."
                )
