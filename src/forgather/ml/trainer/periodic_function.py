"""PeriodicFunction: due steps of logging, evaluation and saving.

Invariant: the schedule depends only on the global step, so a resumed run keeps it. `Cadence` creates the instances.
Overrides of `Trainer._setup_periodic_functions` may replace them.
"""

from forgather.ml.trainer.trainer_types import IntervalStrategy


class PeriodicFunction:
    """Schedule of a recurring action such as logging, evaluation or saving.

    The schedule depends only on the global step, not on the step of the process start. With a period of 4, a run that
    resumes at step 6 continues with 8, 12, 16. `period` and `epoch_period` (the length of an epoch) count optimizer
    steps. `strategy` selects which of the two is used. Nothing is due before `first_step`.
    """

    def __init__(
        self,
        global_step: int,
        strategy: IntervalStrategy | str,
        period: int,
        epoch_period: int,
        first_step: int = 0,
    ) -> None:
        self.global_step = global_step
        self.strategy = IntervalStrategy(strategy)
        self.first_step = first_step
        # Precomputed: `due` runs at every step, where even the look-up of an enum member is measurable.
        self.is_by_steps = self.strategy is IntervalStrategy.STEPS
        self._is_never = self.strategy is IntervalStrategy.NO
        self._period = epoch_period if self.strategy is IntervalStrategy.EPOCH else period
        self._origin = 0
        if self.strategy is not IntervalStrategy.NO and self._period < 1:
            name = "epoch_period" if self.strategy is IntervalStrategy.EPOCH else "period"
            raise ValueError(f"{name}={self._period!r} cannot be used: it must be 1 step or more.")

    @property
    def rel_step(self) -> int:
        """Steps since the last multiple of the period. For "no", steps since the start."""
        steps = self.global_step - self._origin
        return steps if self._is_never else steps % self._period

    def step(self) -> bool:
        """Advance by one step, and return whether the action is due."""
        self.global_step += 1
        return self.due(self.global_step)

    def due(self, global_step: int) -> bool:
        if self._is_never or global_step <= self._origin or global_step < self.first_step:
            return False
        return (global_step - self._origin) % self._period == 0

    def next_due(self, global_step: int) -> int | None:
        """Return the first due step after `global_step`; None if the action is never due."""
        if self._is_never:
            return None
        earliest = max(global_step + 1, self.first_step, self._origin + 1)
        # Python's modulo of a negative number is not negative: this rounds up to a multiple of the period.
        return earliest + (self._origin - earliest) % self._period

    def reset(self, epoch_start_step: int | None = None) -> None:
        """Start a new epoch at the current step, or at `epoch_start_step`.

        Call it when an epoch ends early. The strategy "steps" counts global steps and does not change.
        """
        if self.strategy is IntervalStrategy.EPOCH:
            self._origin = self.global_step if epoch_start_step is None else epoch_start_step
