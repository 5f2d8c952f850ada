"""Evaluator: the evaluation loop for one rank and many; the loss is one mean over all targets of the set.

Evaluation leaves no trace in training: random numbers, modes of modules and the step's loss weights are as before.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sized
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forgather.ml.trainer.loading.collation import require_mapping
from forgather.ml.trainer.loop.evaluation_sums import (
    SAMPLES_IN_DATASET,
    EvaluationInterrupted,
    EvaluationSums,
    evaluation_metrics,
)
from forgather.ml.trainer.loop.target_watch import warn_of_no_targets
from forgather.ml.trainer.loop.window import samples_in
from forgather.ml.trainer.setup.devices import maybe_cleanup_memory
from forgather.ml.trainer.setup.hook_checks import is_overridden
from forgather.ml.trainer.setup.model_modes import set_train
from forgather.ml.trainer.setup.seeding import undisturbed_random_numbers
from forgather.ml.trainer.step_loss.index_errors import explaining_indices
from forgather.ml.trainer.step_loss.model_loss import ModelLoss
from forgather.ml.trainer.step_loss.training_loss import TrainingLoss
from forgather.ml.trainer.trainer_types import BaseDataset

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

Batch = Mapping[str, Any]
Prediction = dict[str, Any]
"""`loss` (the mean of this rank's batch), `logits` and `labels`."""


class Evaluator:
    """Evaluates batches through the trainer's hooks, and adds the losses up over all ranks."""

    def __init__(self, trainer: "Trainer[Any]") -> None:
        self._trainer = trainer
        self.loss: ModelLoss = trainer.step_loss
        """The loss of the present evaluation: that of training, unless training has not found out yet which it is."""
        self.has_losses = True
        """Whether the losses of this rank's batches come out on this rank; False off the last stage of a pipeline."""
        self.waits_for_errors = True
        """Whether a failing rank finishes its round; the ranks of a pipeline wait for each other inside of it."""
        self.shares_loss = False
        """Whether evaluations before the first step may find out training's loss; the stages of a pipeline agree on it."""
        self.is_running = False
        self.is_second_look = False
        """Whether the batches are gone through again, for averaged weights; callbacks are not told."""
        self.dataset: BaseDataset | None = None
        """The dataset of the trainer's `eval_dataloader`."""
        self._started = 0.0

    # --- an evaluation

    def evaluate(self, dataset: BaseDataset | None, use_ema: bool = False) -> dict[str, Any]:
        """Metrics of a dataset, announced to callbacks; collective."""
        trainer = self._trainer
        count = trainer.num_dispatched("on_evaluate")
        with trainer.averaged_weights() if use_ema else contextlib.nullcontext():
            metrics = self._metrics_on(dataset) if use_ema else self._all_metrics_on(dataset)
        if trainer.num_dispatched("on_evaluate") != count:
            return metrics
        return self._announce(metrics)

    def evaluate_in_training(self) -> None:
        """Evaluate at the present step, unless that was done."""
        trainer, loop = self._trainer, self._trainer.loop
        trainer.control.should_evaluate = False
        if loop.evaluated_step == loop.state.global_step:
            return
        # Waits for the device as the evaluation does, and spares one of weights that are no numbers.
        trainer.reporter.settle(trainer.lr_scheduler)
        started = time.perf_counter()
        # A run that is resumed from a checkpoint made before the end begins with this evaluation.
        loop.evaluation_is_pending = True
        try:
            metrics = self.evaluate(trainer.eval_dataset)
        except EvaluationInterrupted:
            return
        loop.evaluation_is_pending = False
        loop.evaluated_step, loop.eval_metrics = loop.state.global_step, metrics
        # Only now: callbacks may have added metrics of their own.
        loop.state.log_history.append({**metrics, "epoch": loop.state.epoch, "step": loop.state.global_step})
        trainer.saver.note_best(metrics)
        trainer.reporter.speed.pause(time.perf_counter() - started)
        maybe_cleanup_memory(trainer.args.gc_threshold)
        trainer.settle_requests("log")

    def _all_metrics_on(self, dataset: BaseDataset | None) -> dict[str, Any]:
        """Metrics of the present weights, with the loss of the averaged ones if that is asked for."""
        trainer = self._trainer
        with trainer._common_weights():
            metrics = self._metrics_on(dataset)
        if trainer.args.eval_ema and trainer.recipes.average is not None:
            self.is_second_look = True
            try:
                with trainer.averaged_weights():
                    metrics["eval_ema_loss"] = self._metrics_on(dataset)["eval_loss"]
            finally:
                self.is_second_look = False
        return metrics

    def _metrics_on(self, dataset: BaseDataset | None) -> dict[str, Any]:
        trainer = self._trainer
        if dataset is None:
            raise ValueError(
                "An evaluation needs an eval_dataset: give one to evaluate(), or to the trainer when it is made."
            )
        if dataset is not self.dataset or trainer.eval_dataloader is None:
            trainer.load_for_evaluation(dataset)
            self.dataset = dataset
        trainer._before_evaluation()
        with self._running():
            return trainer._eval_loop()

    def _announce(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Tell callbacks, and return the metrics with those that they added; their readers are told these, on all ranks."""
        trainer = self._trainer
        trainer._dispatch_event("on_evaluate", readers=False, metrics=metrics)
        metrics = trainer._shared_metrics(metrics)
        # A copy: what a reader on one rank adds must not choose another best model there.
        trainer._dispatch_event("on_evaluate", readers=True, metrics=dict(metrics))
        return metrics

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Eval mode, no gradients, plain means, random numbers as before.

        Before the first step the loss is another object than that of training: ranks without a batch here learn nothing
        of the loss, and would begin the first step in another way than ranks that had one.
        """
        trainer, trained = self._trainer, self._trainer.step_loss
        self.loss = trained if trained.can_count or self.shares_loss else trained.unresolved()
        self._started = time.perf_counter()
        self.is_running = True
        try:
            with (
                _plain_means(trainer.loss_fn, self.loss),
                _plain_means(trained.given_loss, self.loss),
                undisturbed_random_numbers(),
                set_train(trainer._forward_modules(), False),
                torch.no_grad(),
            ):
                yield
        finally:
            self.loss, self.is_running = trained, False

    # --- its loop

    def run(self) -> EvaluationSums:
        """Evaluate the batches of `eval_dataloader`, `max_eval_steps` at most, and sum over ranks; collective."""
        trainer, sums = self._trainer, EvaluationSums()

        def look(batch: Batch | None) -> None:
            if not self.loss.can_count:
                trainer._agree_on_loss(self.loss, batch)

        trainer.team.evaluate_rounds(
            trainer.eval_dataloader,
            trainer.args.max_eval_steps,
            look,
            lambda batch: self._evaluate_batch(batch, sums),
            lambda: trainer.feed.stop_signal,
            trainer.feed.stop,
            self.waits_for_errors,
        )
        return self._summed(sums)

    def metrics(self, sums: EvaluationSums) -> dict[str, Any]:
        metrics = evaluation_metrics(sums, self._started)
        if metrics["eval_tokens"] == 0 and not self.is_second_look:
            warn_of_no_targets(sums.num_batches)
        return metrics

    def explain_no_batches(self, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Header and settings of the message for an evaluation without batches."""
        header = f"The evaluation had no batch at all{self._trainer.team.where}"
        if self.is_second_look:
            header += " when it was read again for eval_ema=True, which takes a dataset that can be read twice"
        size = str(len(self.dataset)) if isinstance(self.dataset, Sized) else "unknown"
        return f"{header}: there is nothing to compute a loss from.", {SAMPLES_IN_DATASET: size, **settings}

    def _evaluate_batch(self, batch: Batch, sums: EvaluationSums) -> None:
        trainer = self._trainer
        require_mapping(batch)
        with explaining_indices(trainer.unwrapped_model(), [batch]):
            input_dict, labels = trainer._prepare_batch(batch)
            prediction = trainer._prediction_step(input_dict, labels)
        # Only now: the first forward pass may be what tells which labels count.
        counted = labels if is_overridden(trainer, "_prepare_batch") else batch.get("labels")
        targets = self.loss.count(counted, batch) if self.has_losses else 0
        if self.has_losses:
            sums.add(prediction["loss"], targets, samples_in(batch))
        if not self.is_second_look:
            trainer._dispatch_event("on_prediction_step", tokens=targets, batch=batch, **prediction)

    def _summed(self, sums: EvaluationSums) -> EvaluationSums:
        team = self._trainer.team
        loss_sum = team.sum(torch.tensor([sums.loss_sum], dtype=torch.float64))
        counts = torch.tensor([sums.targets, sums.num_batches, sums.num_samples], dtype=torch.int64)
        targets, num_batches, num_samples = team.sum(counts).tolist()
        return EvaluationSums.of(float(loss_sum), targets, num_batches, num_samples)

    @property
    def shows_predictions(self) -> bool:
        """Whether a callback, or a user's hook, wants to see logits."""
        listens = self._trainer.is_listened_to("on_prediction_step") and not self.is_second_look
        return listens or is_overridden(self._trainer, "_prediction_step")

    def predict(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor | None) -> Prediction:
        """Mean loss of one batch, with logits and labels if somebody wants to see them."""
        forward = self.loss.forward(model, inputs, labels)
        count = self.loss.count(labels, {"labels": labels} if labels is not None else inputs)
        loss = self.loss.mean(forward, labels, count)
        shows = self.shows_predictions
        return {
            "loss": loss,
            "logits": self.loss.logits(forward) if shows else None,
            "labels": labels if shows else None,
        }


def _plain_means(loss_fn: Any, loss: ModelLoss) -> AbstractContextManager[None]:
    """A factor that is right for the steps of training has no place in the loss of an evaluation."""
    if isinstance(loss_fn, TrainingLoss):
        return loss_fn.evaluating(loss)
    no_rescale = getattr(loss_fn, "no_rescale", None)
    context: AbstractContextManager[None] = contextlib.nullcontext() if no_rescale is None else no_rescale()
    return context
