"""Saver: when a checkpoint is saved in training, which one is the best, and loading the best at the end."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from forgather.ml.checkpoint.manager import CheckpointManager
from forgather.ml.checkpoint.model_selection import is_better, note_best_metric
from forgather.ml.checkpoint.retention import metric_value
from forgather.ml.checkpoint.store import CHECKPOINTS_FOLDER, checkpoint_path
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.loop.loop_state import LoopState
from forgather.ml.trainer.loop.nonfinite import GradientFinding, nonfinite_weights, weights_error
from forgather.ml.trainer.ranks.team import Team

logger = logging.getLogger(__name__)


class Saver:
    """Saves the present step once, with the evaluation that ran for it."""

    def __init__(self, args: TrainingArguments, loop: LoopState, team: Team, manager: CheckpointManager) -> None:
        self._args = args
        self._loop = loop
        self._team = team
        self.manager = manager
        self._is_sound = True
        self._has_warned_of_weights = False

    def is_saved(self, is_scheduled: bool) -> bool:
        """Whether the present step has its checkpoint; a scheduled save replaces one that a stop request caused."""
        loop, step = self._loop, self._loop.state.global_step
        return loop.saved_step == step and not (is_scheduled and loop.scheduled_step != step)

    def save(self, is_scheduled: bool, prepare: Callable[[], None]) -> str:
        """Save the present step and enter it among the best; "" after an error that only warns. Collective.

        A save that only a stop request caused (`is_scheduled=False`) cannot become the best: an uninterrupted run has no
        such checkpoint. `prepare` makes the state of all ranks fit to be saved.
        """
        loop, step = self._loop, self._loop.state.global_step
        metrics = loop.eval_metrics if loop.evaluated_step == step else None
        rated = metrics if is_scheduled and loop.scheduled_step != step else None
        before = loop.best_saved_metric, loop.state.best_model_checkpoint, loop.scheduled_step
        # Record this first, so that the checkpoint contains its own entry.
        self._note_best_saved(rated)
        loop.scheduled_step = step if is_scheduled else loop.scheduled_step
        self.manager.set_eval_metrics(metrics)
        prepare()
        path = self.manager.save_checkpoint(checkpoint_id=step, is_sound=self._is_sound)
        if not path:
            loop.best_saved_metric, loop.state.best_model_checkpoint, loop.scheduled_step = before
            return ""
        loop.saved_step, loop.saved_path = step, path
        self._preserve_best(path, rated)
        return path

    def save_by_hand(self, path: str | None) -> str:
        """Save now, under a path or as the checkpoint of the present step; collective."""
        if path is None:
            # A later save of this step may know more: its evaluation may be about to run.
            self._loop.saved_step = -1
        step = None if path else self._loop.state.global_step
        return self.manager.save_checkpoint(path, step, is_sound=self._is_sound)

    def look_at_weights(
        self, parameters: list[Tensor], findings: Callable[[list[Tensor]], list[GradientFinding]]
    ) -> None:
        """Find out whether the weights are finite; only with nonfinite_grad="ignore" are others saved. Collective."""
        found = nonfinite_weights(parameters)
        self._is_sound = self._team.count(bool(found)) == 0
        if self._is_sound:
            return
        step, action = self._loop.state.global_step, self._args.nonfinite_grad
        error = weights_error(step, action, findings(found))
        if action != "ignore":
            raise error
        if not self._has_warned_of_weights:
            self._has_warned_of_weights = True
            logger.warning(
                "Checkpoints are saved from step %d on with weights that are not finite (nonfinite_grad='ignore'): %s",
                *(step, ", ".join(error.parameters)),
            )

    # --- the best

    def note_best(self, metrics: Mapping[str, Any]) -> None:
        args = self._args
        note_best_metric(self._loop.state, metrics, args.best_model_metric, args.best_model_greater_is_better)

    def _note_best_saved(self, metrics: Mapping[str, Any] | None) -> None:
        """The best checkpoint is the best of the saved steps: the best evaluation may be that of another step."""
        if metrics is None:
            return
        args, loop = self._args, self._loop
        value = metric_value(metrics, args.best_model_metric)
        if is_better(value, loop.best_saved_metric, args.best_model_metric, args.best_model_greater_is_better):
            loop.best_saved_metric = value
            loop.state.best_model_checkpoint = checkpoint_path(args.output_dir, loop.state.global_step)

    def _preserve_best(self, path: str, metrics: Mapping[str, Any] | None) -> None:
        args = self._args
        if metrics is None or not (args.preserve_best_model or args.load_best_model_at_end):
            return
        self.manager.update_best_checkpoints(
            path, metrics, args.best_model_metric, args.best_model_greater_is_better, args.preserve_n_best
        )

    def list_resumed_best(self) -> None:
        """Enter a resumed checkpoint that is the best into the list: the process may have died between save and entry."""
        best, metrics = self._loop.state.best_model_checkpoint, self._loop.eval_metrics
        if best is None or metrics is None:
            return
        name = os.path.basename(best)
        listed = [os.path.basename(path) for path, _ in self.manager.best_checkpoints]
        if name == f"checkpoint-{self._loop.state.global_step}" and name not in listed:
            self._preserve_best(best, metrics)


def timed(pause: Callable[[float], None], work: Callable[[], str]) -> str:
    """The result of work that does not count as training time."""
    started = time.perf_counter()
    try:
        return work()
    finally:
        pause(time.perf_counter() - started)


def warn_of_nothing_to_resume(output_dir: str) -> None:
    directory = os.path.abspath(output_dir)
    found = {folder: _entries(os.path.join(directory, folder)) for folder in ("", CHECKPOINTS_FOLDER)}
    logger.warning(
        "train(resume_from_checkpoint=True) found nothing to resume: %s has no complete checkpoint of ours in its folder "
        "%r (the directory has %s; that folder has %s). Training starts at step 0. Check output_dir, or give the path of a "
        "checkpoint.",
        *(directory, CHECKPOINTS_FOLDER, found[""], found[CHECKPOINTS_FOLDER]),
    )


def _entries(directory: str, limit: int = 5) -> str:
    """What is in a directory, in a few words."""
    try:
        names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except FileNotFoundError:
        return "nothing"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "nothing"
