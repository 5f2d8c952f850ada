"""Cadence of the training loop: the steps of logging, evaluation and saving, and the end of epochs and training.

Every answer depends on the arguments and `TrainerState.global_step`, never on the step where the process started.
A resumed run therefore logs, evaluates and saves at the same steps as an uninterrupted run. `Trainer` calls it.
"""

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.periodic_function import PeriodicFunction
from forgather.ml.trainer.setup.step_plan import StepPlan
from forgather.ml.trainer.trainer_types import NO_STEP_LIMIT, TrainerControl, TrainerState


class Cadence:
    """Rules for the actions that are due at the current step."""

    def __init__(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, plan: StepPlan, evaluates: bool
    ) -> None:
        """`evaluates`: whether the trainer has an evaluation dataset."""
        self._args = args
        self._state = state
        self._control = control
        self._plan = plan
        self._evaluates_on_save = bool(args.eval_on_save and evaluates)
        self.log, self.evaluate, self.save = _periodics(args)
        self.quiet_until = 0
        """The next step with a due action. Before it, only requests of callbacks need attention."""

    def follow_arguments(self) -> None:
        """Adopt changed arguments, from the current step on."""
        self.log, self.evaluate, self.save = _periodics(self._args)
        self.look_ahead()

    def look_ahead(self) -> None:
        """Set `quiet_until` to the next step with a due action."""
        # The loop compares one integer per step instead of asking three periodic functions.
        step = self._state.global_step
        nexts = [periodic.next_due(step) for periodic in (self.log, self.evaluate, self.save)]
        if self._plan.has_limit:
            nexts.append(self._plan.num_steps)
        if self._args.logging_first_step and step < 1:
            nexts.append(1)
        self.quiet_until = min((one for one in nexts if one is not None), default=NO_STEP_LIMIT)

    def log_is_due(self, periodic: PeriodicFunction) -> bool:
        return self.is_due(periodic) or (self._args.logging_first_step and self._state.global_step == 1)

    def is_due(self, periodic: PeriodicFunction) -> bool:
        """Return whether an action is due: by its period, or with strategy "steps" also at the last step."""
        return periodic.due(self._state.global_step) or (periodic.is_by_steps and self.is_last_step)

    @property
    def save_was_due(self) -> bool:
        at_epoch_end = self._state.global_step == self._state.epoch_start_step
        return self.is_due(self.save) or (self._args.save_strategy == "epoch" and at_epoch_end)

    def evaluation_is_due(self, evaluated_step: int) -> bool:
        """Return whether the current step still needs its evaluation."""
        # A checkpoint that the user saves by hand may precede the evaluation of its step. The checkpoint then records
        # the evaluation as pending, and a resumed run starts with it.
        step = self._state.global_step
        if step in (0, evaluated_step):
            return False
        return self.evaluate.due(step) or (self._evaluates_on_save and self.is_due(self.save))

    @property
    def has_more_epochs(self) -> bool:
        if self.is_last_step:
            return False
        # With max_steps, epochs repeat until the step limit.
        without_limit = self._plan.counts_steps or self._args.num_train_epochs < 0
        return without_limit or self._state.raw_epoch < self._args.num_train_epochs

    @property
    def is_last_step(self) -> bool:
        if self._control.should_training_stop or self._control.should_abort_without_save:
            return True
        return self._plan.has_limit and self._state.global_step >= self._plan.num_steps

    @property
    def leaves_epoch(self) -> bool:
        return self._control.should_epoch_stop or self.is_last_step

    @property
    def epoch_is_complete(self) -> bool:
        steps_done = self._state.global_step - self._state.epoch_start_step
        return self._control.should_epoch_stop or steps_done >= self._state.epoch_train_steps  # type: ignore[attr-defined]


def _periodics(args: TrainingArguments) -> tuple[PeriodicFunction, PeriodicFunction, PeriodicFunction]:
    """Return the periodic functions of logging, evaluation and saving."""
    return (
        _periodic(args.logging_strategy, args.logging_steps),
        _periodic(args.eval_strategy, args.eval_steps, args.eval_delay),
        _periodic(args.save_strategy, args.save_steps),
    )


def _periodic(strategy: str, period: int, first_step: int = 0) -> PeriodicFunction:
    """Return the periodic function of a strategy; "epoch" maps to "no"."""
    # `Trainer._end_epoch` handles strategy "epoch": an epoch may end earlier or later than its planned step.
    return PeriodicFunction(0, strategy if strategy == "steps" else "no", period, 1, first_step)
