"""How a trainer evaluates: the loss over the whole evaluation set, the same number for every batch size."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgather.ml.trainer.loading.collation import require_mapping
from forgather.ml.trainer.loop.evaluation_sums import (
    EvaluationInterrupted,
    EvaluationSums,
    checked_by,
    evaluation_metrics,
    first_batches,
    no_batches_error,
    samples_in,
)
from forgather.ml.trainer.loop.index_errors import explaining_indices
from forgather.ml.trainer.loop.target_watch import warn_of_no_targets
from forgather.ml.trainer.saving import SavingTrainer
from forgather.ml.trainer.setup.seeding import undisturbed_random_numbers
from forgather.ml.trainer.setup.torch_settings import torch_settings
from forgather.ml.trainer.setup.trainer_utils import maybe_cleanup_memory, moved, set_train
from forgather.ml.trainer.step_loss.model_loss import ModelLoss
from forgather.ml.trainer.trainer_types import BaseDataset


class Prediction(NamedTuple):
    """What a batch of an evaluation gave; logits and labels only when a callback wants them."""

    loss: Tensor
    targets: int | Tensor
    logits: Tensor | None = None
    labels: Tensor | None = None


class EvaluatingTrainer(SavingTrainer):
    """Evaluates, between steps of training or on its own."""

    _is_second_look = False
    """Whether the batches of an evaluation are gone through again, of which callbacks are not to know."""

    def evaluate(self, eval_dataset: BaseDataset | None = None, *, use_ema: bool = False) -> dict[str, Any]:
        """The token-weighted loss over the evaluation set, and how long it took.

        `use_ema` evaluates the averaged weights (`ema_decay`) in place of the present ones.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise _no_dataset_error()
        with torch_settings(self.args):
            self._prepare_evaluation()
            with self.averaged_weights() if use_ema else contextlib.nullcontext():
                metrics = self._evaluate_on(dataset) if use_ema else self._metrics_on(dataset)
        return self._announce_evaluation(metrics)

    def _metrics_on(self, dataset: BaseDataset) -> dict[str, Any]:
        """Those of the present weights, with the loss of the averaged ones if that is asked for."""
        with self._common_weights():
            metrics = self._evaluate_on(dataset)
        if self.args.eval_ema and self._average is not None:
            self._is_second_look = True
            try:
                with self.averaged_weights():
                    metrics["eval_ema_loss"] = self._evaluate_on(dataset)["eval_loss"]
            finally:
                self._is_second_look = False
        return metrics

    def _announce_evaluation(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Tell callbacks, and return the metrics with those that they added; their readers are told these, on all ranks."""
        self._callback_handler.dispatch("on_evaluate", self.control, readers=False, metrics=metrics)
        metrics = self._shared_metrics(metrics)
        # A copy: what a reader on one rank adds must not choose another best model there.
        self._callback_handler.dispatch("on_evaluate", self.control, readers=True, metrics=dict(metrics))
        return metrics

    def _shared_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The same on every rank, also those that callbacks have added, since the best model is chosen by them."""
        return metrics

    def _evaluate_on(self, dataset: BaseDataset) -> dict[str, Any]:
        started = time.perf_counter()
        if dataset is None:
            raise _no_dataset_error()
        if dataset is not self._dataset_of_loader:
            self._dataset_of_loader, self.eval_dataloader = dataset, self._init_eval_dataloader(dataset)
        self._update_context()
        # A factor that is right for the steps of training has no place in the loss of an evaluation.
        no_rescale = getattr(self._loss_function, "no_rescale", contextlib.nullcontext)
        resolved, self.model_loss = self.model_loss, self._loss_for_evaluation()
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "model_loss", resolved)
            stack.enter_context(no_rescale())
            sums = self._undisturbed_sums()
        if sums.num_batches == 0:
            where = self._where_evaluated()
            if self._is_second_look:
                where += " when it was read again for eval_ema=True, which takes a dataset that can be read twice"
            raise no_batches_error(self._evaluation_settings(), _length(dataset), where)
        metrics = evaluation_metrics(sums, started)
        if metrics["eval_tokens"] == 0 and not self._is_second_look:
            warn_of_no_targets(sums.num_batches)
        return metrics

    def _undisturbed_sums(self) -> EvaluationSums:
        with undisturbed_random_numbers(), set_train(self._forward_model, False), torch.no_grad():
            return self._eval_loop(self.eval_dataloader)

    def _loss_for_evaluation(self) -> ModelLoss:
        """Before the first step another than that of training: ranks without a batch here learn nothing of the loss, and
        would begin the first step in another way than those that had one.
        """
        return self.model_loss if self.model_loss.can_count else self.model_loss.unresolved()

    def _agree_on_loss(self, batch: Mapping[str, Any] | None) -> None:
        """Let all ranks choose the same loss, by the first batches of those that have any; one finds out as it goes."""

    def _eval_loop(self, dataloader: Any) -> EvaluationSums:
        """Add up the losses of the evaluation batches, `max_eval_steps` of them at most."""
        sums = EvaluationSums()
        batches = first_batches(dataloader, self.args.max_eval_steps)
        for batch in checked_by(lambda: self._stop_requested() is not None, batches):
            self._evaluate_batch(batch, sums)
        return sums

    @property
    def _has_predictions(self) -> bool:
        """Whether this rank is where the losses of its batches come out."""
        return True

    def _evaluate_batch(self, batch: Mapping[str, Any], sums: EvaluationSums) -> None:
        require_mapping(batch)
        with explaining_indices(self.unwrapped_model(), [batch]):
            prediction = Prediction(*self._prediction_step(batch))
        if self._has_predictions:
            sums.add(prediction.loss, prediction.targets, samples_in(batch))
        if self._is_second_look:
            return
        self._dispatch(
            "on_prediction_step",
            loss=prediction.loss,
            tokens=prediction.targets,
            batch=batch,
            logits=prediction.logits,
            labels=prediction.labels,
        )

    def _prediction_step(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """A `Prediction`, or of it the mean loss of the batch and the number of its targets alone."""
        inputs, labels = self._prepare_batch(batch)
        with self.amp.autocast():
            forward = self.model_loss.forward(self._evaluated_model(), inputs, labels)
            count = self.model_loss.count(batch.get("labels"), batch)
            loss = self.model_loss.mean(forward, labels, count)
            if self._shows_predictions:
                return Prediction(loss, count, self.model_loss.logits(forward), labels)
        return Prediction(loss, count)

    @property
    def _shows_predictions(self) -> bool:
        """Whether a callback wants to see logits."""
        return self._callback_handler.listens("on_prediction_step") and not self._is_second_look

    def _evaluated_model(self) -> Any:
        """What runs the forward passes of an evaluation, which are not the same number on every rank."""
        return self._forward_model

    def _prepare_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """The inputs of the model and the labels, on the device."""
        inputs = dict(moved(batch, self.device))
        return inputs, inputs.pop("labels", None)

    def _where_evaluated(self) -> str:
        return ""

    def _evaluation_settings(self) -> dict[str, Any]:
        names = ("per_device_eval_batch_size", "dataloader_drop_last", "max_eval_steps")
        return {name: getattr(self.args, name) for name in names}

    def _evaluate_while_training(self) -> None:
        self.control.should_evaluate = False
        if self._evaluated_step == self.state.global_step:
            return
        # Waits for the device as the evaluation does, and spares one of weights that are no numbers.
        self._settle_interval()
        started = time.perf_counter()
        # A run that is resumed from a checkpoint made before the end begins with this evaluation.
        self._evaluation_is_pending = True
        try:
            metrics = self._metrics_on(self.eval_dataset)
        except EvaluationInterrupted:
            return
        metrics = self._announce_evaluation(metrics)
        self._evaluation_is_pending = False
        self._evaluated_step, self._eval_metrics = self.state.global_step, metrics
        # Only now: callbacks may have added metrics of their own.
        self.state.log_history.append({**metrics, "epoch": self.state.epoch, "step": self.state.global_step})
        self._note_best(metrics)
        self._speed.pause(time.perf_counter() - started)
        maybe_cleanup_memory(self.args.gc_threshold)
        self._settle_requests("log")


def _no_dataset_error() -> ValueError:
    return ValueError("An evaluation needs an eval_dataset: give one to evaluate(), or to the trainer when it is made.")


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None
