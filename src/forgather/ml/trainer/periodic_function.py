"""Intervals of logging, evaluation and saving."""

from forgather.ml.trainer.trainer_types import IntervalStrategy


class PeriodicFunction:
    """Says at which steps to log, evaluate or save.

    The answer depends on the global step alone, not on the step at which the process started: with a period of 4, a
    run that is resumed at 6 goes on with 8, 12, 16. `period` and `epoch_period` (an epoch's length) count optimizer
    steps; only the one that `strategy` names is used. Nothing is due before `first_step`.
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
        # Asked at every step, where even the look-up of an enum member shows.
        self.is_by_steps = self.strategy is IntervalStrategy.STEPS
        self._is_never = self.strategy is IntervalStrategy.NO
        self._period = epoch_period if self.strategy is IntervalStrategy.EPOCH else period
        self._origin = 0
        if self.strategy is not IntervalStrategy.NO and self._period < 1:
            name = "epoch_period" if self.strategy is IntervalStrategy.EPOCH else "period"
            raise ValueError(f"{name}={self._period!r} cannot be used: it must be 1 step or more.")

    @property
    def rel_step(self) -> int:
        """Steps since the last multiple of the period, where it is 0; for "no", steps since the beginning."""
        steps = self.global_step - self._origin
        return steps if self._is_never else steps % self._period

    def step(self) -> bool:
        """Advance by one step, and say whether the thing is due now."""
        self.global_step += 1
        return self.due(self.global_step)

    def due(self, global_step: int) -> bool:
        if self._is_never or global_step <= self._origin or global_step < self.first_step:
            return False
        return (global_step - self._origin) % self._period == 0

    def next_due(self, global_step: int) -> int | None:
        """The first step after this one at which the thing is due; None if it never is."""
        if self._is_never:
            return None
        earliest = max(global_step + 1, self.first_step, self._origin + 1)
        return earliest + (self._origin - earliest) % self._period

    def reset(self, epoch_start_step: int | None = None) -> None:
        """Forget the part of an epoch that was counted: an epoch begins at the present step, or at the given one.

        Epochs that end early need this. The cadence of "steps" belongs to the global step, so it does not change.
        """
        if self.strategy is IntervalStrategy.EPOCH:
            self._origin = self.global_step if epoch_start_step is None else epoch_start_step
