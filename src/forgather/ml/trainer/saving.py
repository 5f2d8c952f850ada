"""What a trainer checkpoints, when it saves, and which checkpoint is the best."""

import contextlib
import logging
import os
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.coordinator import CheckpointCoordinator
from forgather.ml.checkpoint.retention import is_better, metric_value, note_best_metric
from forgather.ml.checkpoint.store import CHECKPOINTS_FOLDER, checkpoint_path
from forgather.ml.checkpoint.weights.module_weights import load_checkpoint as load_weights
from forgather.ml.trainer.loop.nonfinite import nonfinite_weights, weights_error
from forgather.ml.trainer.reporting import ReportingTrainer

logger = logging.getLogger(__name__)


class SavingTrainer(ReportingTrainer):
    """Declares its state, saves and loads it."""

    _is_sound = True
    """Whether the weights were finite when they were looked at last."""
    _has_warned_of_weights = False

    @abstractmethod
    def _evaluate_while_training(self) -> None:
        """Evaluate at the present step, unless that was done."""

    def get_state_components(self) -> list[StateComponent]:
        """Model, optimizer, schedule, progress, position in the data, random numbers."""
        one = SharingPattern.GLOBAL
        averages = [] if self._average is None else [StateComponent("ema", self._average, one, required=False)]
        return [
            self._model_component(),
            StateComponent("optimizer", self.optimizer_state, one, required=False),
            StateComponent("scheduler", self._scheduler_state, one, required=False),
            *averages,
            StateComponent("trainer", self._progress, one, required=False),
            self._dataset_component(),
            StateComponent("rng", self.rng, SharingPattern.PER_RANK, required=False),
        ]

    def save_checkpoint(self, path: str | None = None) -> str:
        """Save everything a resume needs, by default as the checkpoint of the present step."""
        if self.checkpoint_manager is None:
            self._prepare(False)
        assert self.checkpoint_manager is not None
        self._before_save()
        if path is None:
            # A later save of this step may know more: its evaluation may be under way.
            self._saved_step = -1
        step = None if path else self.state.global_step
        return self.checkpoint_manager.save_checkpoint(path, step, is_sound=self._is_sound)

    def load_checkpoint(self, path: str | None = None) -> str | None:
        """Load a checkpoint, by default the newest complete one."""
        if self.checkpoint_manager is None:
            self._to_be_loaded = True if path is None else path
            try:
                self._prepare(False)
            finally:
                self._to_be_loaded = False
        self._loaded_path = self._load_state(path)
        return self._loaded_path

    def _default_resume(self) -> bool | str:
        """What `train` resumes from unless it is told: a checkpoint that was loaded by hand, else as the arguments say."""
        loaded, self._loaded_path = self._loaded_path, None
        return loaded or self.args.resume_from_checkpoint

    def _warn_of_nothing_to_resume(self) -> None:
        output_dir = os.path.abspath(self.args.output_dir)
        found = {folder: _entries(os.path.join(output_dir, folder)) for folder in ("", CHECKPOINTS_FOLDER)}
        logger.warning(
            "train(resume_from_checkpoint=True) found nothing to resume: %s has no complete checkpoint of ours in its folder "
            "%r (the directory has %s; that folder has %s). Training starts at step 0. Check output_dir, or give the path of a "
            "checkpoint.",
            *(output_dir, CHECKPOINTS_FOLDER, found[""], found[CHECKPOINTS_FOLDER]),
        )

    def save_model(self, output_dir: str | None = None, *, use_ema: bool = False) -> None:
        """Write the model alone, as a Hugging Face directory, by default into the output directory.

        `use_ema` writes the averaged weights (`ema_decay`) in place of the present ones.
        """
        self._prepare_evaluation()
        with self.averaged_weights() if use_ema else self._common_weights():
            self._model_exporter().export_model(output_dir or self.args.output_dir, overwrite=True)

    def _common_weights(self) -> contextlib.AbstractContextManager[None]:
        """In this context ranks that have copies of the model have the same weights, which are to be seen from outside."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """In this context the model has the averaged weights, which `ema_decay` keeps; on all ranks at once."""
        if self._average is None or not self._average.is_begun:
            reason = "has not trained yet, nor loaded a checkpoint" if self.args.ema_decay is not None else "keeps none"
            raise ValueError(
                f"The averaged weights were asked for, but this trainer {reason} (ema_decay={self.args.ema_decay}). Set "
                "ema_decay, such as 0.999, and call train() or load_checkpoint() first."
            )
        with self._average.in_model():
            yield

    def _save_while_training(self, is_scheduled: bool = True) -> str:
        """Save the present step once, with the evaluation that ran for it; returns the path, "" without a save.

        A save that only a stop request caused (`is_scheduled=False`) does not evaluate and cannot become the best: an
        uninterrupted run has no such checkpoint. A scheduled save of the same step, after a resume, replaces it.
        """
        self.control.should_save = False
        step = self.state.global_step
        if self.control.should_abort_without_save:
            return ""
        scheduled_before = self._scheduled_step
        is_first_scheduled = is_scheduled and scheduled_before != step
        if self._saved_step == step and not is_first_scheduled:
            return self._saved_path
        if is_scheduled and self.args.eval_on_save and self.eval_dataset is not None:
            self._evaluate_while_training()
            # This save is what a callback may have asked for on that occasion.
            self.control.should_save = False
        started = time.perf_counter()
        metrics = self._eval_metrics if self._evaluated_step == step else None
        rated = metrics if is_first_scheduled else None
        assert self.checkpoint_manager is not None
        best_before = self._best_saved_metric, self.state.best_model_checkpoint
        # Record this first, so that the checkpoint contains its own entry.
        self._note_best_saved(rated)
        self._scheduled_step = step if is_scheduled else scheduled_before
        self.checkpoint_manager.set_eval_metrics(metrics)
        self._before_save()
        path = self.checkpoint_manager.save_checkpoint(checkpoint_id=step, is_sound=self._is_sound)
        if not path:
            self._best_saved_metric, self.state.best_model_checkpoint = best_before
            self._scheduled_step = scheduled_before
        else:
            self._saved_step, self._saved_path = step, path
            self._preserve_best(path, rated)
            self._dispatch("on_save", checkpoint_path=path)
            self._settle_requests("log")
        self._speed.pause(time.perf_counter() - started)
        return path

    def _before_save(self) -> None:
        """Bring what ranks share to where it is the same on all of them."""
        if self._average is not None and self._average.is_in_model:
            raise ValueError(
                "A checkpoint cannot be saved inside averaged_weights(): it would have the average in place of the weights. "
                "Leave the context first; save_model() exports the average."
            )
        self._settle_interval()
        self._look_at_weights()

    def _look_at_weights(self) -> None:
        """Find out whether the weights are finite; only with nonfinite_grad="ignore" are others saved."""
        found = nonfinite_weights(self._parameters)
        self._is_sound = self._number_of_ranks_with(bool(found)) == 0
        if self._is_sound:
            return
        names = self._names_of_parameters()
        own = replace(self._own_finding(), parameters=[names[one] for one in found if one in names])
        error = weights_error(self.state.global_step, self.args.nonfinite_grad, self._findings_of_ranks(own))
        if self.args.nonfinite_grad != "ignore":
            raise error
        if not self._has_warned_of_weights:
            self._has_warned_of_weights = True
            logger.warning(
                "Checkpoints are saved from step %d on with weights that are not finite (nonfinite_grad='ignore'): %s",
                self.state.global_step,
                ", ".join(error.parameters),
            )

    def _number_of_ranks_with(self, is_so: bool) -> int:
        return int(is_so)

    def _note_best(self, metrics: Mapping[str, Any]) -> None:
        args = self.args
        note_best_metric(self.state, metrics, args.best_model_metric, args.best_model_greater_is_better)

    def _note_best_saved(self, metrics: Mapping[str, Any] | None) -> None:
        """The best checkpoint is the best of the saved steps: the best evaluation may be that of another step."""
        if metrics is None:
            return
        args = self.args
        value = metric_value(metrics, args.best_model_metric)
        if is_better(value, self._best_saved_metric, args.best_model_metric, args.best_model_greater_is_better):
            self._best_saved_metric = value
            self.state.best_model_checkpoint = checkpoint_path(args.output_dir, self.state.global_step)

    def _list_resumed_best(self) -> None:
        """Enter a resumed checkpoint that is the best into the list: the process may have died between save and entry."""
        manager, best = self.checkpoint_manager, self.state.best_model_checkpoint
        if manager is None or best is None or self._eval_metrics is None:
            return
        names = [os.path.basename(path) for path, _ in manager.best_checkpoints]
        if os.path.basename(best) == f"checkpoint-{self.state.global_step}" and os.path.basename(best) not in names:
            self._preserve_best(best, self._eval_metrics)

    def _preserve_best(self, path: str, metrics: Mapping[str, Any] | None) -> None:
        args = self.args
        if metrics is None or not (args.preserve_best_model or args.load_best_model_at_end):
            return
        assert self.checkpoint_manager is not None
        self.checkpoint_manager.update_best_checkpoints(
            path, metrics, args.best_model_metric, args.best_model_greater_is_better, args.preserve_n_best
        )

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            assert self.checkpoint_manager is not None
            if not self.checkpoint_manager.load_external_weights(best):
                self._load_best_weights(best)
            self._load_average_of(best)
            logger.info("Loaded the best weights, of %s", best)

    def _load_best_weights(self, checkpoint_path: str) -> None:
        """Those of this rank, which talks to no other meanwhile."""
        self._load_weights_of(checkpoint_path)

    def _load_average_of(self, checkpoint_path: str) -> None:
        """The average belongs to the weights; where a checkpoint has none, it starts from them."""
        if self._average is not None:
            assert self.checkpoint_manager is not None
            self._average.forget()
            self.checkpoint_manager.load_component(checkpoint_path, "ema")
            self._average.begin()

    def _load_weights_of(self, checkpoint_path: str) -> None:
        load_weights(checkpoint_path, self.unwrapped_model())

    def _model_component(self) -> StateComponent:
        """The model and how ranks share it."""
        return StateComponent("model", self.unwrapped_model(), SharingPattern.GLOBAL)

    def _dataset_component(self) -> StateComponent:
        """The position in the data and how ranks share it."""
        return StateComponent("dataset", self.train_dataloader, self._get_dataset_sharing_pattern(), required=False)

    def _model_exporter(self) -> CheckpointCoordinator:
        return CheckpointCoordinator(
            [self._model_component()],
            self.get_process_groups(),
            self.env,
            self.args.output_dir,
            self.args.save_safetensors,
            **self._model_to_save(),
            model_preprocessor=self.processing_class,
        )


def _entries(directory: str, limit: int = 5) -> str:
    """What is in a directory, in a few words."""
    try:
        names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except FileNotFoundError:
        return "nothing"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "nothing"
