"""How a trainer evaluates: the loss over the whole evaluation set, the same number for every batch size."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forgather.ml.trainer.evaluation import (
    EvaluationInterrupted,
    EvaluationSums,
    checked_by,
    evaluation_metrics,
    first_batches,
    no_batches_error,
    samples_in,
)
from forgather.ml.trainer.saving import SavingTrainer
from forgather.ml.trainer.seeding import undisturbed_random_numbers
from forgather.ml.trainer.trainer_types import BaseDataset
from forgather.ml.trainer.trainer_utils import maybe_cleanup_memory, set_train


class EvaluatingTrainer(SavingTrainer):
    """Evaluates, between steps of training or on its own."""

    def evaluate(self, eval_dataset: BaseDataset | None = None) -> dict[str, Any]:
        """The token-weighted loss over the evaluation set, and how long it took."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise _no_dataset_error()
        self._prepare_evaluation()
        metrics = self._evaluate_on(dataset)
        self._dispatch("on_evaluate", metrics=metrics)
        return metrics

    def _evaluate_on(self, dataset: BaseDataset) -> dict[str, Any]:
        started = time.perf_counter()
        if dataset is None:
            raise _no_dataset_error()
        if dataset is not self._dataset_of_loader:
            self._dataset_of_loader, self.eval_dataloader = dataset, self._init_eval_dataloader(dataset)
        self._update_context()
        with undisturbed_random_numbers(), set_train(self._forward_model, False), torch.no_grad():
            sums = self._eval_loop(self.eval_dataloader)
        if sums.num_batches == 0:
            raise no_batches_error(self._evaluation_settings(), _length(dataset))
        return evaluation_metrics(sums, started)

    def _eval_loop(self, dataloader: Any) -> EvaluationSums:
        """Add up the losses of the evaluation batches, `max_eval_steps` of them at most."""
        sums = EvaluationSums()
        batches = first_batches(dataloader, self.args.max_eval_steps)
        for batch in checked_by(lambda: self._stop_requested() is not None, batches):
            loss, targets = self._prediction_step(batch)
            sums.add(loss, targets, samples_in(batch))
            self._dispatch("on_prediction_step", loss=loss, tokens=targets)
        return sums

    def _prediction_step(self, batch: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """The mean loss of a batch and the number of its targets."""
        inputs, labels = self._prepare_batch(batch)
        with self.amp.autocast():
            forward = self.model_loss.forward(self._forward_model, inputs, labels)
            count = self.model_loss.count(batch.get("labels"), samples_in(batch))
            return self.model_loss.share(forward, labels, count, count, 1), count

    def _prepare_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """The inputs of the model and the labels, on the device."""
        if self.device.type == "cpu":
            inputs = dict(batch)
        else:
            inputs = {
                name: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
                for name, value in batch.items()
            }
        return inputs, inputs.pop("labels", None)

    def _evaluation_settings(self) -> dict[str, Any]:
        names = ("per_device_eval_batch_size", "dataloader_drop_last", "max_eval_steps")
        return {name: getattr(self.args, name) for name in names}

    def _evaluate_while_training(self) -> None:
        self.control.should_evaluate = False
        if self._evaluated_step == self.state.global_step:
            return
        started = time.perf_counter()
        try:
            metrics = self._evaluate_on(self.eval_dataset)
        except EvaluationInterrupted:
            # Whoever resumes from the checkpoint that follows begins with this evaluation.
            self._evaluation_is_pending = True
            return
        self._evaluated_step, self._eval_metrics = self.state.global_step, metrics
        self._evaluation_is_pending = False
        self.state.log_history.append({**metrics, "epoch": self.state.epoch, "step": self.state.global_step})
        self._dispatch("on_evaluate", metrics=metrics)
        self._note_best(metrics)
        self._speed.pause(time.perf_counter() - started)
        maybe_cleanup_memory(self.args.gc_threshold)


def _no_dataset_error() -> ValueError:
    return ValueError("An evaluation needs an eval_dataset: give one to evaluate(), or to the trainer when it is made.")


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None
