"""Evaluation loop for one or many ranks: the loss is the mean over all targets of the dataset.

Evaluation does not affect training: random state, train/eval modes and the loss weights of the step are restored.
`Trainer.evaluate` and the training loop call it on every rank.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sized
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forgather.ml.distributed.watch import EVALUATION, EVALUATION_START, in_phase, note_batch
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
    """Evaluation through the trainer's hooks, with losses summed over all ranks."""

    def __init__(self, trainer: "Trainer[Any]") -> None:
        self._trainer = trainer
        self.loss: ModelLoss = trainer.step_loss
        """The loss of this evaluation. It is the training loss, or a separate object while that is unresolved."""
        self.has_losses = True
        """Whether this rank computes losses. False on all pipeline stages except the last."""
        self.waits_for_errors = True
        """Whether a failing rank still finishes its round. False for pipelines: ranks wait for each other inside a round."""
        self.joins_all_rounds = False
        """Whether ranks without a batch run a forward pass too. True for FSDP2: a forward pass gathers parameters."""
        self.shares_loss = False
        """Whether an evaluation before the first step may resolve the training loss. True for pipelines."""
        self.is_running = False
        self.is_second_look = False
        """Whether this is the second pass, with averaged weights (`eval_ema`). Callbacks do not see its batches."""
        self.dataset: BaseDataset | None = None
        """The dataset of the trainer's `eval_dataloader`."""
        self._started = 0.0

    # --- an evaluation

    def evaluate(self, dataset: BaseDataset | None, use_ema: bool = False) -> dict[str, Any]:
        """Evaluate a dataset, dispatch on_evaluate, and return the metrics; collective."""
        trainer = self._trainer
        count = trainer.num_dispatched("on_evaluate")
        with trainer.averaged_weights() if use_ema else contextlib.nullcontext():
            metrics = self._metrics_on(dataset) if use_ema else self._all_metrics_on(dataset)
        if trainer.num_dispatched("on_evaluate") != count:
            # An override of `_eval_loop` has dispatched the event itself.
            return metrics
        return self._announce(metrics)

    def evaluate_in_training(self) -> None:
        """Evaluate at the current step, once."""
        trainer, loop = self._trainer, self._trainer.loop
        trainer.control.should_evaluate = False
        if loop.evaluated_step == loop.state.global_step:
            return
        # Raises for non-finite gradients before an evaluation of spoiled weights. The device synchronisation costs
        # nothing extra, since the evaluation needs it anyway.
        trainer.reporter.settle(trainer.lr_scheduler)
        started = time.perf_counter()
        # A checkpoint saved before the end of the evaluation records it as pending. The resumed run starts with it.
        loop.evaluation_is_pending = True
        try:
            metrics = self.evaluate(trainer.eval_dataset)
        except EvaluationInterrupted:
            return
        loop.evaluation_is_pending = False
        loop.evaluated_step, loop.eval_metrics = loop.state.global_step, metrics
        # After the dispatch of on_evaluate: callbacks may have added metrics.
        loop.state.log_history.append({**metrics, "epoch": loop.state.epoch, "step": loop.state.global_step})
        trainer.saver.note_best(metrics)
        trainer.reporter.speed.pause(time.perf_counter() - started)
        maybe_cleanup_memory(trainer.args.gc_threshold)
        trainer.settle_requests("log")

    def _all_metrics_on(self, dataset: BaseDataset | None) -> dict[str, Any]:
        """Evaluate the current weights, and with `eval_ema` also the averaged weights."""
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
        with in_phase(EVALUATION_START):
            return self._evaluate(dataset)

    def _evaluate(self, dataset: BaseDataset | None) -> dict[str, Any]:
        trainer = self._trainer
        if dataset is None:
            raise ValueError(
                "An evaluation needs an eval_dataset: pass it to evaluate() or to the trainer's constructor."
            )
        if dataset is not self.dataset or trainer.eval_dataloader is None:
            trainer.load_for_evaluation(dataset)
            self.dataset = dataset
        trainer._before_evaluation()
        with self._running():
            return trainer._eval_loop()

    def _announce(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Dispatch on_evaluate, and return the metrics including the additions of callbacks, equal on all ranks."""
        trainer = self._trainer
        # Two passes: callbacks that add metrics come first, and loggers or early stopping read the broadcast result.
        trainer._dispatch_event("on_evaluate", readers=False, metrics=metrics)
        metrics = trainer._shared_metrics(metrics)
        # Pass a copy: a metric added on one rank only could make that rank choose a different best model.
        trainer._dispatch_event("on_evaluate", readers=True, metrics=dict(metrics))
        return metrics

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Run the body in eval mode, without gradients and loss weights, and restore the random state."""
        trainer, trained = self._trainer, self._trainer.step_loss
        # The first batch resolves the loss (see `ModelLoss`). An evaluation before the first step uses a separate loss
        # object: a rank without evaluation batches would enter training with an unresolved loss, while the other ranks
        # skip the collective that resolves it.
        self.loss = trained if trained.can_count or self.shares_loss else trained.unresolved()
        self._started = time.perf_counter()
        self.is_running = True
        try:
            # `loss_fn` may wrap a loss of the user with its own scale factor, so both are switched off.
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

    # --- loop over batches

    def run(self) -> EvaluationSums:
        """Evaluate at most `max_eval_steps` batches of `eval_dataloader`, and sum over ranks; collective."""
        trainer, sums = self._trainer, EvaluationSums()

        def look(batch: Batch | None) -> None:
            # Every rank calls this in the first round, also with batch=None: agreeing on the loss is a collective.
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
            self._join if self.joins_all_rounds else None,
        )
        return self._summed(sums)

    def metrics(self, sums: EvaluationSums) -> dict[str, Any]:
        metrics = evaluation_metrics(sums, self._started)
        if metrics["eval_tokens"] == 0 and not self.is_second_look:
            warn_of_no_targets(sums.num_batches)
        return metrics

    def explain_no_batches(self, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return header and settings of the error message for an evaluation without batches."""
        header = f"The evaluation had no batches{self._trainer.team.where}"
        if self.is_second_look:
            header += " in its second pass for eval_ema=True, which needs a dataset that can be iterated twice"
        size = str(len(self.dataset)) if isinstance(self.dataset, Sized) else "unknown"
        return f"{header}: no loss can be computed.", {SAMPLES_IN_DATASET: size, **settings}

    def _evaluate_batch(self, batch: Batch, sums: EvaluationSums) -> None:
        trainer = self._trainer
        require_mapping(batch)
        with explaining_indices(trainer.unwrapped_model(), [batch]):
            input_dict, labels = trainer._prepare_batch(batch)
            prediction = trainer._prediction_step(input_dict, labels)
        # Count after the forward pass: the first forward pass may resolve which labels are targets.
        counted = labels if is_overridden(trainer, "_prepare_batch") else batch.get("labels")
        targets = self.loss.count(counted, batch) if self.has_losses else 0
        if self.has_losses:
            sums.add(prediction["loss"], targets, samples_in(batch))
        if not self.is_second_look:
            trainer._dispatch_event("on_prediction_step", tokens=targets, batch=batch, **prediction)
        note_batch(EVALUATION)

    def _join(self, batch: Batch) -> None:
        """Run a forward pass without using its result, so that other ranks can evaluate their batches."""
        self._trainer._prediction_step(*self._trainer._prepare_batch(batch))

    def _summed(self, sums: EvaluationSums) -> EvaluationSums:
        team = self._trainer.team
        # Separate sums: int64 counts stay exact, and losses keep float64.
        loss_sum = team.sum(torch.tensor([sums.loss_sum], dtype=torch.float64))
        counts = torch.tensor([sums.targets, sums.num_batches, sums.num_samples], dtype=torch.int64)
        targets, num_batches, num_samples = team.sum(counts).tolist()
        return EvaluationSums.of(float(loss_sum), targets, num_batches, num_samples)

    @property
    def shows_predictions(self) -> bool:
        """Whether a callback or an override of `_prediction_step` receives logits."""
        listens = self._trainer.is_listened_to("on_prediction_step") and not self.is_second_look
        return listens or is_overridden(self._trainer, "_prediction_step")

    def predict(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor | None) -> Prediction:
        """Return the mean loss of one batch, with logits and labels if `shows_predictions`."""
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
    """Return a context that disables the loss weights of training steps in a loss function."""
    if isinstance(loss_fn, TrainingLoss):
        return loss_fn.evaluating(loss)
    no_rescale = getattr(loss_fn, "no_rescale", None)
    context: AbstractContextManager[None] = contextlib.nullcontext() if no_rescale is None else no_rescale()
    return context
