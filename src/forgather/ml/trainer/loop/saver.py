"""Checkpoint saves during training: each step once, the best checkpoint, and loading the best at the end.

Every method that saves is collective, and all ranks take the same branch. `CheckpointManager` writes the files and
applies retention, with `async_save` in the background; the saver then completes its records when all ranks have finished.
The training loop and `interruptions` call the saver.
"""

import contextlib
import copy
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from forgather.ml.checkpoint.components import MODEL_KEY
from forgather.ml.checkpoint.encoding.digest import iter_leaves
from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.checkpoint.files.layout import CHECKPOINTS_FOLDER, checkpoints_root
from forgather.ml.checkpoint.manager import CheckpointManager
from forgather.ml.checkpoint.retention import is_better, metric_value, note_best_metric
from forgather.ml.checkpoint.rotation import Ranking
from forgather.ml.checkpoint.weights.adapters import is_peft_model
from forgather.ml.distributed.watch import SAVING, SETUP, in_phase
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.loop.loop_state import LoopState
from forgather.ml.trainer.loop.nonfinite import GradientFinding, nonfinite_weights, weights_error
from forgather.ml.trainer.loop.signals import CONTROL_ABORT
from forgather.ml.trainer.metrics.named_datasets import datasets_by_name
from forgather.ml.trainer.trainer_types import TrainerState

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


class _Records(NamedTuple):
    """Records of the loop about saves."""

    best_saved_metric: float | None
    best_checkpoint: str | None
    scheduled_step: int
    saved_step: int
    saved_path: str

    @classmethod
    def of(cls, loop: LoopState) -> "_Records":
        best = loop.state.best_model_checkpoint
        return cls(loop.best_saved_metric, best, loop.scheduled_step, loop.saved_step, loop.saved_path)

    def restore(self, loop: LoopState) -> None:
        loop.best_saved_metric, loop.state.best_model_checkpoint, loop.scheduled_step = self[:3]
        loop.saved_step, loop.saved_path = self.saved_step, self.saved_path


def _copy_of(state: TrainerState) -> TrainerState:
    copied = copy.copy(state)
    for name, value in vars(state).items():
        # Such as the log history, which grows.
        if isinstance(value, (list, dict)):
            setattr(copied, name, copy.copy(value))
    return copied


class Saver:
    """Saves of the current step, with the metrics of its evaluation."""

    def __init__(self, trainer: "Trainer[Any]") -> None:
        self._trainer = trainer
        self._args: TrainingArguments = trainer.args
        self._loop: LoopState = trainer.loop
        self.manager: CheckpointManager = trainer.checkpoint_manager
        self._is_sound = True
        self._has_warned_of_weights = False
        # Records of the loop before the save in flight, which a failed save restores.
        self._before: _Records | None = None
        # State of the step of that save. Training changes the original until the commit.
        self._saved_state: TrainerState | None = None
        self._is_prepared = not self._args.async_save
        trainer.feed.finished_saves = lambda: self.manager.num_saves[1]
        self._gate = self.manager.update_gate
        if self._gate is not None:
            self._gate.declare(self._updated_tensors)
            trainer._callback_handler.guard(self._gate.wait)

    def before_update(self) -> None:
        """Wait until a background save has read the weights, moments and averages that training is about to change."""
        if self._gate is not None:
            self._gate.wait()

    def _updated_tensors(self) -> list[Tensor]:
        """Return the tensors that change only in the optimizer step, in the EMA update after it, or in callbacks."""
        trainer = self._trainer
        assert trainer.optimization is not None
        trained = [one for one in trainer.optimization.parameters if one.requires_grad]
        moments = [leaf for state in trainer.optimizer.state.values() for _, leaf in iter_leaves(state)]
        averages = [] if trainer.recipes.average is None else trainer.recipes.average.tensors()
        return [one for one in (*trained, *moments, *averages) if isinstance(one, Tensor)]

    def begin(self) -> None:
        """Prepare background saves before the first step: the first access to their memory is slow. Collective."""
        if not self._is_prepared:
            from forgather.ml.checkpoint.background.growth import growth_by

            self.manager.expect_background_saves(growth_by(self._trainer.optimizer))

    def look_after_step(self) -> None:
        """Complete a background save that has ended on all ranks; collective. Called at every step boundary."""
        if self._before is not None:
            if self._trainer.feed.all_have_finished(self.manager.num_saves[0]):
                self.finish_save()
        elif not self._is_prepared:
            # After the first step, since only then the optimizer has its state.
            self._is_prepared = True
            # The state cannot be collected, and so not measured, with pending sums.
            self._trainer.reporter.settle(self._trainer.lr_scheduler)
            self.manager.prepare_background_saves()

    def finish_save(self) -> None:
        """Wait for the background save, if any, and dispatch `on_save`; collective."""
        before, self._before = self._before, None
        saved_state, self._saved_state = self._saved_state, None
        if before is None:
            return
        try:
            with in_phase(SAVING):
                path = self.manager.finish_save()
        except BaseException:
            before.restore(self._loop)
            raise
        if path:
            self._tell(path, saved_state)
        else:
            before.restore(self._loop)
        if self._trainer.desk is not None:
            self._trainer.desk.note_saved(path or "")

    @property
    def is_saving(self) -> bool:
        """Whether a background save is in flight."""
        return self._before is not None

    def _tell(self, path: str, saved_state: TrainerState | None = None) -> None:
        # A callback may change the state, so it gets the original if that is still the state of the saved step.
        is_past = saved_state is not None and saved_state.global_step != self._loop.state.global_step
        of_step: dict[str, Any] = {"state": saved_state} if is_past else {}
        self._trainer._dispatch_event("on_save", checkpoint_path=path, **of_step)
        self._trainer.settle_requests("log")

    def save_in_training(self, is_scheduled: bool = True, waits: bool = True) -> str:
        """Save the current step, unless it is saved already; return the path, or "" without a save. Collective.

        A save after a stop signal (`is_scheduled=False`) does not evaluate and cannot become the best checkpoint, since
        an uninterrupted run has no such checkpoint. After a resume, a scheduled save of the same step replaces it.
        `waits=False` leaves such a save in the background, with `async_save`.
        """
        trainer, loop = self._trainer, self._loop
        # First, because a failed save restores the records that are compared below.
        self.finish_save()
        trainer.control.should_save = False
        if trainer.control.should_abort_without_save or trainer.feed.stop_signal == CONTROL_ABORT:
            return ""
        step = loop.state.global_step
        if loop.saved_step == step and not (is_scheduled and loop.scheduled_step != step):
            return loop.saved_path
        if is_scheduled and self._args.eval_on_save and trainer.eval_dataset is not None:
            trainer.evaluator.evaluate_in_training()
            # A save requested by a callback during that evaluation is the save below.
            trainer.control.should_save = False
        started = time.perf_counter()
        with in_phase(SAVING):
            path = self._save(is_scheduled)
        # Counted before callbacks are told: they record the time in steps.
        saved = time.perf_counter()
        trainer.reporter.speed.pause(saved - started)
        if path and self._before is None:
            self._tell(path)
        if not is_scheduled and waits:
            # The process ends after this save.
            self.finish_save()
            path = loop.saved_path if loop.saved_step == step else ""
        trainer.reporter.speed.pause(time.perf_counter() - saved)
        return path

    def _save(self, is_scheduled: bool) -> str:
        """Save the current step and update the best list; return "" if on_save_error="warn" ignored an error."""
        loop, step = self._loop, self._loop.state.global_step
        metrics = loop.eval_metrics if loop.evaluated_step == step else None
        rated = metrics if is_scheduled and loop.scheduled_step != step else None
        before = _Records.of(loop)
        # Record the best metric first, so that the checkpoint contains its own entry. A failed save restores `before`.
        self._note_best_saved(rated)
        loop.scheduled_step = step if is_scheduled else loop.scheduled_step
        self.manager.set_eval_metrics(metrics)
        self._trainer._before_save()
        # Ranked after the commit: a crash in between leaves a complete checkpoint, which `list_resumed_best` adds.
        path = self.manager.save_checkpoint(
            checkpoint_id=step, is_sound=self._is_sound, ranking=self._ranking_by(rated)
        )
        if not path:
            before.restore(loop)
            return ""
        loop.saved_step, loop.saved_path = step, path
        if self._args.async_save:
            self._before, self._saved_state = before, _copy_of(loop.state)
        return path

    def save_by_hand(self, path: str | None) -> str:
        """Save now, to a path or as the checkpoint of the current step, and wait for the commit; collective."""
        self.finish_save()
        with in_phase(SAVING):
            return self._save_to(path)

    def _save_to(self, path: str | None) -> str:
        self._trainer._before_save()
        if path is None:
            # The scheduled save of this step must still run: its evaluation may be pending.
            self._loop.saved_step = -1
        step = None if path else self._loop.state.global_step
        saved = self.manager.save_checkpoint(path, step, is_sound=self._is_sound)
        finished = self.manager.finish_save()
        return saved if finished is None else finished

    def look_at_weights(self, parameters: list[Tensor], names: Mapping[Tensor, str]) -> None:
        """Raise NonFiniteError for non-finite weights, or warn with nonfinite_grad="ignore"; collective."""
        team, found = self._trainer.team, nonfinite_weights(parameters)
        # Sum over ranks first: all ranks must reach the gather below, or none.
        self._is_sound = team.count(bool(found)) == 0
        if self._is_sound:
            return
        step, action = self._loop.state.global_step, self._args.nonfinite_grad
        own = replace(self.finding(), parameters=[names[one] for one in found if one in names])
        error = weights_error(step, action, team.gather(own))
        if action != "ignore":
            raise error
        if not self._has_warned_of_weights:
            self._has_warned_of_weights = True
            logger.warning(
                "Checkpoints from step %d on contain weights that are not finite (nonfinite_grad='ignore'): %s",
                *(step, ", ".join(error.parameters)),
            )

    def finding(self) -> GradientFinding:
        """Return the rank number and the newest checkpoint with finite weights, for an error message."""
        checkpoint = None
        # The other ranks wait in a gather, and an error here would hide the NonFiniteError.
        with contextlib.suppress(OSError, CheckpointError):
            checkpoint = self.manager.newest_sound_checkpoint()
        return GradientFinding(self._trainer.team.rank, checkpoint=checkpoint)

    # --- the best

    def _chooses(self) -> bool:
        """Return whether evaluations choose a best model."""
        args = self._args
        is_asked = args.preserve_best_model or args.load_best_model_at_end
        # Several evaluation datasets have several losses. Without a choice by the user, none of them selects the best.
        is_default = args.best_model_metric in ("loss", "eval_loss")
        return is_asked or not is_default or datasets_by_name(self._trainer.eval_dataset) is None

    def note_best(self, metrics: Mapping[str, Any]) -> None:
        args = self._args
        if not self._chooses():
            return
        note_best_metric(self._loop.state, metrics, args.best_model_metric, args.best_model_greater_is_better)

    def _note_best_saved(self, metrics: Mapping[str, Any] | None) -> None:
        """Make this step the best checkpoint if its metrics are the best of all saved steps."""
        if metrics is None or not self._chooses():
            return
        # `state.best_metric` covers all evaluations, but the best evaluation may belong to a step without a checkpoint.
        args, loop = self._args, self._loop
        value = metric_value(metrics, args.best_model_metric)
        if is_better(value, loop.best_saved_metric, args.best_model_metric, args.best_model_greater_is_better):
            loop.best_saved_metric = value
            loop.state.best_model_checkpoint = self.manager.path_of(loop.state.global_step)

    def _ranking_by(self, metrics: Mapping[str, Any] | None) -> Ranking | None:
        args = self._args
        if metrics is None or not (args.preserve_best_model or args.load_best_model_at_end):
            return None
        return Ranking(metrics, args.best_model_metric, args.best_model_greater_is_better, args.preserve_n_best)

    def load_best(self) -> None:
        """Load the weights of the best checkpoint, if any, and their EMA; collective."""
        self.finish_save()
        best, trainer = self._loop.state.best_model_checkpoint, self._trainer
        if best is None:
            return
        with in_phase(SETUP):
            self._load_weights(best)
        # The EMA must match the loaded weights, so the current average is discarded first.
        trainer.recipes.forget_average()
        if trainer.recipes.average is not None:
            self.manager.load_component(best, "ema")
        trainer.recipes.begin_average()
        logger.info("Loaded the best weights from %s", best)

    def _load_weights(self, path: str) -> None:
        if self.manager.load_external_weights(path):
            return
        if is_peft_model(self._trainer.unwrapped_model()):
            self.manager.load_component(path, MODEL_KEY)
        else:
            with self._trainer.team.agreement("loading the best model"):
                self._trainer._load_weights_of(path)

    def list_resumed_best(self) -> None:
        """Add the resumed checkpoint to the best list if it is the best but not listed."""
        # The process may have died between the save and the update of the list.
        best, metrics = self._loop.state.best_model_checkpoint, self._loop.eval_metrics
        if best is None or metrics is None:
            return
        name = os.path.basename(best)
        listed = [os.path.basename(path) for path, _ in self.manager.best_checkpoints]
        own_name = os.path.basename(self.manager.path_of(self._loop.state.global_step))
        if name == own_name and name not in listed:
            ranking = self._ranking_by(metrics)
            if ranking is not None:
                self.manager.update_best_checkpoints(best, *ranking)


def warn_of_nothing_to_resume(output_dir: str, layout: str) -> None:
    directory = os.path.abspath(output_dir)
    root = checkpoints_root(directory, layout)
    where, has = ("", "") if root == directory else (f" in its folder {CHECKPOINTS_FOLDER!r}", _entries(root))
    logger.warning(
        "train(resume_from_checkpoint=True) found nothing to resume: %s has no complete Forgather checkpoint%s (the "
        "directory has %s%s). Training starts at step 0. Check output_dir, or pass the path of a checkpoint.",
        *(directory, where, _entries(directory), has and f"; that folder has {has}"),
    )


def _entries(directory: str, limit: int = 5) -> str:
    """Return a short list of the entries in a directory."""
    try:
        names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except FileNotFoundError:
        return "nothing"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "nothing"
