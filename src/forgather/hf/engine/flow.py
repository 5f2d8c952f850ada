"""Flow of a run as in transformers: `control` lists the due actions before on_step_end and on_epoch_end, and callbacks decide.

A callback may set `control.should_evaluate = False` and so on to skip a due action. Forgather's own trainers ask callbacks
for more actions only. `FacadeHooks` inherits the hooks.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from forgather.ml.trainer.periodic_function import PeriodicFunction
from forgather.ml.trainer.trainer import Trainer

if TYPE_CHECKING:
    _Base = Trainer[Any]
else:
    _Base = object

_ACTIONS = ("log", "evaluate", "save")
_NEVER = PeriodicFunction(0, "no", 1, 1, 0)


class FlowHooks(_Base):
    """Hooks that show callbacks the due actions, and skip the actions that they cancel."""

    _due: tuple[str, ...] = ()
    """Actions that were due before on_step_end."""

    def _dispatch_event(self, event: str, readers: bool | None = None, **extra: Any) -> None:
        if event == "on_step_end":
            self._due = self._due_actions()
            for name in self._due:
                setattr(self.control, f"should_{name}", True)
        super()._dispatch_event(event, readers, **extra)

    def _due_actions(self) -> tuple[str, ...]:
        cadence, step = self.loop.cadence, self.state.global_step
        if step < cadence.quiet_until:
            return ()
        answers = (
            cadence.log_is_due(cadence.log),
            cadence.evaluate.due(step) or self._evaluates_at_end(step),
            cadence.is_due(cadence.save),
        )
        return tuple(name for name, is_due in zip(_ACTIONS, answers, strict=True) if is_due)

    def _evaluates_at_end(self, step: int) -> bool:
        """Return whether this is the last step of a run that evaluates by steps: it is evaluated, as in transformers."""
        args, plan = self.args, self.plan
        is_last = plan.has_limit and step >= plan.num_steps
        return is_last and args.eval_strategy == "steps" and step >= args.eval_delay

    def _maybe_log_save_evaluate(
        self,
        loss_log: list[Tensor],
        total_norm_log: list[Tensor],
        tokens_log: list[int | Tensor],
        periodic_log: PeriodicFunction,
        periodic_eval: PeriodicFunction,
        periodic_save: PeriodicFunction,
    ) -> None:
        # Read here, after the ranks have combined their requests: an action is cancelled if all ranks cancel it.
        cancelled = [name for name in self._due if not getattr(self.control, f"should_{name}")]
        self._due = ()
        if "evaluate" in cancelled:
            # Otherwise a checkpoint of this step would record the evaluation as pending.
            self.loop.evaluated_step, self.loop.eval_metrics = self.state.global_step, None
        periodics = zip(_ACTIONS, (periodic_log, periodic_eval, periodic_save), strict=True)
        log, evaluate, save = (_NEVER if name in cancelled else periodic for name, periodic in periodics)
        super()._maybe_log_save_evaluate(loss_log, total_norm_log, tokens_log, log, evaluate, save)

    def _act_at_epoch_end(self) -> None:
        # The actions follow on_epoch_end, if its handlers do not cancel them.
        args, control = self.args, self.control
        is_late_enough = self.state.global_step >= args.eval_delay
        control.should_log = control.should_log or args.logging_strategy == "epoch"
        control.should_evaluate = control.should_evaluate or (args.eval_strategy == "epoch" and is_late_enough)
        control.should_save = control.should_save or args.save_strategy == "epoch"
