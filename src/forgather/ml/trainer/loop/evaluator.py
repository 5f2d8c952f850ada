"""Evaluator: the evaluation loop for one rank and many; the loss is one mean over all targets of the set.

Evaluation leaves no trace in training: random numbers, modes of modules and the step's loss weights are as before.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.trainer.loading.collation import require_mapping
from forgather.ml.trainer.loop.evaluation_sums import EvaluationSums, evaluation_metrics, samples_in
from forgather.ml.trainer.loop.index_errors import explaining_indices
from forgather.ml.trainer.loop.target_watch import warn_of_no_targets
from forgather.ml.trainer.ranks.team import Team
from forgather.ml.trainer.setup.model_modes import set_train
from forgather.ml.trainer.setup.seeding import undisturbed_random_numbers
from forgather.ml.trainer.step_loss.model_loss import ModelLoss
from forgather.ml.trainer.step_loss.training_loss import TrainingLoss

Batch = Mapping[str, Any]
Prediction = dict[str, Any]
"""`loss` (the mean of this rank's batch), `logits` and `labels`."""
Predict = Callable[[Batch], Prediction]


class Evaluator:
    """Evaluates batches through the trainer's hooks, and adds the losses up over all ranks."""

    has_losses = True
    """Whether the losses of this rank's batches come out on this rank; False off the last stage of a pipeline."""
    waits_for_errors = True
    """Whether a failing rank finishes its round; the ranks of a pipeline wait for each other inside of it."""

    shares_loss = False
    """Whether evaluations before the first step may find out training's loss; the stages of a pipeline agree on it."""

    def __init__(
        self,
        team: Team,
        loss: ModelLoss,
        predict: Predict,
        agree_on_loss: Callable[[ModelLoss, Batch | None], None],
        dispatch: Callable[..., None],
        stop_signal: Callable[[], str | None],
        interrupted: Callable[[str], None],
    ) -> None:
        self._team = team
        self._trained_loss = loss
        self._predict = predict
        self._agree_on_loss = agree_on_loss
        self._dispatch = dispatch
        self._stop_signal = stop_signal
        self._interrupted = interrupted
        self.loss = loss
        """The loss of the present evaluation: that of training, unless training has not found out yet which it is."""
        self.is_running = False
        self.is_second_look = False
        """Whether the batches are gone through again, for averaged weights; callbacks are not told."""
        self._started = 0.0

    @contextlib.contextmanager
    def running(self, model: nn.Module, loss_fn: Any, given_loss: Any) -> Iterator[None]:
        """The context of an evaluation: eval mode, no gradients, plain means, random numbers as before.

        Before the first step the loss is another object than that of training: ranks without a batch here learn nothing
        of the loss, and would begin the first step in another way than ranks that had one.
        """
        trained = self._trained_loss
        self.loss = trained if trained.can_count or self.shares_loss else trained.unresolved()
        self._started = time.perf_counter()
        self.is_running = True
        try:
            with (
                _plain_means(loss_fn, self.loss),
                _plain_means(given_loss, self.loss),
                undisturbed_random_numbers(),
                set_train(model, False),
                torch.no_grad(),
            ):
                yield
        finally:
            self.loss, self.is_running = trained, False

    def run(self, loader: Any, limit: int, model: nn.Module) -> EvaluationSums:
        """Evaluate all batches, `limit` at most, and sum over ranks; collective."""
        sums = EvaluationSums()

        def look(batch: Batch | None) -> None:
            if not self.loss.can_count:
                self._agree_on_loss(self.loss, batch)

        self._team.evaluate_rounds(
            loader,
            limit,
            look,
            lambda batch: self._evaluate(batch, sums, model),
            self._stop_signal,
            self._interrupted,
            self.waits_for_errors,
        )
        return self._summed(sums)

    def metrics(self, sums: EvaluationSums) -> dict[str, Any]:
        metrics = evaluation_metrics(sums, self._started)
        if metrics["eval_tokens"] == 0 and not self.is_second_look:
            warn_of_no_targets(sums.num_batches)
        return metrics

    def _evaluate(self, batch: Batch, sums: EvaluationSums, model: nn.Module) -> None:
        require_mapping(batch)
        with explaining_indices(model, [batch]):
            prediction = self._predict(batch)
        # Only now: the first forward pass may be what tells which labels count.
        targets = self.loss.count(batch.get("labels"), batch) if self.has_losses else 0
        if self.has_losses:
            sums.add(prediction["loss"], targets, samples_in(batch))
        if not self.is_second_look:
            self._dispatch("on_prediction_step", tokens=targets, batch=batch, **prediction)

    def _summed(self, sums: EvaluationSums) -> EvaluationSums:
        loss_sum = self._team.sum(torch.tensor([sums.loss_sum], dtype=torch.float64))
        counts = torch.tensor([sums.targets, sums.num_batches, sums.num_samples], dtype=torch.int64)
        targets, num_batches, num_samples = self._team.sum(counts).tolist()
        return EvaluationSums.of(float(loss_sum), targets, num_batches, num_samples)

    def predict_with(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor | None, shows: bool) -> Prediction:
        """Mean loss of one batch; `shows`: with its logits and labels, which somebody wants to see."""
        forward = self.loss.forward(model, inputs, labels)
        count = self.loss.count(labels, {"labels": labels} if labels is not None else inputs)
        loss = self.loss.mean(forward, labels, count)
        logits = self.loss.logits(forward) if shows else None
        return {"loss": loss, "logits": logits, "labels": labels if shows else None}


def _plain_means(loss_fn: Any, loss: ModelLoss) -> AbstractContextManager[None]:
    """A factor that is right for the steps of training has no place in the loss of an evaluation."""
    if isinstance(loss_fn, TrainingLoss):
        return loss_fn.evaluating(loss)
    no_rescale = getattr(loss_fn, "no_rescale", None)
    context: AbstractContextManager[None] = contextlib.nullcontext() if no_rescale is None else no_rescale()
    return context
