"""Evaluation loop for one or many ranks: the loss is the mean over all targets of the dataset.

Evaluation does not affect training: random state, train/eval modes and the loss weights of the step are restored.
`Trainer.evaluate` and the training loop call it on every rank.
"""

import contextlib
import logging
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
from forgather.ml.trainer.metrics.collector import Collected, Collector, Place, Request, require_all_collecting
from forgather.ml.trainer.metrics.computing import with_prefix
from forgather.ml.trainer.metrics.model_outputs import (
    has_labels,
    ignored_keys,
    label_ids_of,
    label_names_of,
    predictions_of,
)
from forgather.ml.trainer.metrics.named_datasets import datasets_by_name
from forgather.ml.trainer.setup.devices import maybe_cleanup_memory
from forgather.ml.trainer.setup.hook_checks import is_overridden
from forgather.ml.trainer.setup.model_modes import set_train
from forgather.ml.trainer.setup.seeding import undisturbed_random_numbers
from forgather.ml.trainer.step_loss.index_errors import explaining_indices
from forgather.ml.trainer.step_loss.model_loss import Forward, ModelLoss
from forgather.ml.trainer.step_loss.model_outputs import own_loss_of
from forgather.ml.trainer.step_loss.training_loss import TrainingLoss
from forgather.ml.trainer.trainer_types import BaseDataset

if TYPE_CHECKING:
    from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

    from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

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
        self.is_aside = False
        """Whether this evaluation was requested by `forgather control`. It must not change training."""
        self.dataset: BaseDataset | None = None
        """The dataset of the trainer's `eval_dataloader`."""
        self.collector: Collector | None = None
        """Collector of the predictions of this evaluation; None if only losses are asked for."""
        self.is_unlabelled = False
        """Whether the batches of a prediction have no labels. They are then predicted without a loss."""
        self._request = Request()
        self._label_names: list[str] = []
        self._collected = Collected(None, None, {})
        self.num_samples = 0
        """Number of samples of the last evaluation, over all ranks."""
        self._started = 0.0

    # --- an evaluation

    def evaluate(self, dataset: BaseDataset | None, use_ema: bool = False, prefix: str = "eval") -> dict[str, Any]:
        """Evaluate a dataset or a dict of datasets, dispatch on_evaluate for each, and return the metrics; collective."""
        named = datasets_by_name(dataset)
        if named is None:
            with self._asked(Request(prefix, self._computes_metrics)):
                return self._evaluate_one(dataset, use_ema)
        metrics: dict[str, Any] = {}
        for name, one in named.items():
            metrics.update(self.evaluate(one, use_ema, f"{prefix}_{name}"))
        return metrics

    def predict_dataset(self, dataset: BaseDataset, prefix: str) -> "PredictionOutput":
        """Predict a dataset, dispatch on_predict, and return predictions, labels and metrics; collective."""
        from transformers.trainer_utils import PredictionOutput

        output = self.predict_all(dataset, metric_key_prefix=prefix, keep_predictions=True)
        with self._trainer.team.final_agreement("reporting predictions"):
            self._trainer._dispatch_event("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def predict_all(
        self,
        dataset: BaseDataset,
        *,
        prediction_loss_only: bool | None = None,
        metric_key_prefix: str = "eval",
        keep_predictions: bool | None = None,
    ) -> "EvalLoopOutput":
        """Return predictions, labels, metrics and the number of samples of a dataset or loader; collective, no events.

        `prediction_loss_only=None` follows the arguments. With `batch_eval_metrics`, predictions are returned only if
        `keep_predictions` is True. Batches without labels are predicted without a loss.
        """
        from transformers.trainer_utils import EvalLoopOutput

        args = self._trainer.args
        loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        by_batch = args.batch_eval_metrics and self._trainer.compute_metrics is not None
        keeps = not by_batch if keep_predictions is None else keep_predictions
        with self._asked(Request(metric_key_prefix, not loss_only, keeps, allows_no_labels=True)):
            with self._trainer._common_weights():
                metrics = self._metrics_on(dataset)
            collected, self._collected = self._collected, Collected(None, None, {})
        return EvalLoopOutput(collected.predictions, collected.label_ids, metrics, self.num_samples)

    @property
    def _computes_metrics(self) -> bool:
        return self._trainer.compute_metrics is not None and not self._trainer.args.prediction_loss_only

    @contextlib.contextmanager
    def _asked(self, request: Request) -> Iterator[None]:
        """Run the body as an evaluation that returns what `request` asks for."""
        before, self._request = self._request, request
        try:
            yield
        finally:
            self._request, self.is_unlabelled = before, False

    def _evaluate_one(self, dataset: BaseDataset | None, use_ema: bool) -> dict[str, Any]:
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
        # An evaluation may exchange the weights for their averages.
        trainer.saver.before_update()
        # A checkpoint saved before the end of the evaluation records it as pending. The resumed run starts with it.
        loop.evaluation_is_pending = True
        try:
            metrics = self._metrics_in_training()
        except EvaluationInterrupted:
            return
        loop.evaluation_is_pending = False
        loop.evaluated_step, loop.eval_metrics = loop.state.global_step, metrics
        trainer.saver.note_best(metrics)
        trainer.reporter.speed.pause(time.perf_counter() - started)
        maybe_cleanup_memory(trainer.args.gc_threshold)
        trainer.settle_requests("log")

    def evaluate_aside(self) -> dict[str, Any]:
        """Evaluate the current weights for somebody outside of the run; collective.

        Training continues as without it: neither the best metric nor the log history changes, and only loggers hear of
        it (callbacks with `reads_final_metrics` and without requests).
        """
        trainer, loop = self._trainer, self._trainer.loop
        if loop.evaluated_step == loop.state.global_step and loop.eval_metrics is not None:
            return loop.eval_metrics
        trainer.reporter.settle(trainer.lr_scheduler)
        started = time.perf_counter()
        trainer.saver.before_update()
        self.is_aside = True
        try:
            return self.evaluate(trainer.eval_dataset)
        finally:
            self.is_aside = False
            trainer.reporter.speed.pause(time.perf_counter() - started)

    def _metrics_in_training(self) -> dict[str, Any]:
        """Evaluate the trainer's dataset, and append the metrics to the log history."""
        metrics, state = self.evaluate(self._trainer.eval_dataset), self._trainer.loop.state
        # After the dispatch of on_evaluate: callbacks may have added metrics.
        state.log_history.append({**metrics, "epoch": state.epoch, "step": state.global_step})
        return metrics

    def _all_metrics_on(self, dataset: BaseDataset | None) -> dict[str, Any]:
        """Evaluate the current weights, and with `eval_ema` also the averaged weights."""
        trainer = self._trainer
        with trainer._common_weights():
            metrics = self._metrics_on(dataset)
        if trainer.args.eval_ema and trainer.recipes.average is not None:
            self.is_second_look = True
            try:
                prefix = self._request.prefix
                with trainer.averaged_weights():
                    metrics[f"{prefix}_ema_loss"] = self._metrics_on(dataset)[f"{prefix}_loss"]
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
        prefix = self._request.prefix
        with self._running():
            metrics = trainer._eval_loop()
            if self._request.collects and self.collector is None and not self.is_second_look:
                logger.warning(
                    "No predictions were collected and compute_metrics was not called: %s._eval_loop runs its own loop. "
                    "Call super()._eval_loop() there, or compute the metrics in it.",
                    type(trainer).__name__,
                )
        # Overrides of `_eval_loop` may return other names.
        return metrics if prefix == "eval" else with_prefix(metrics, prefix)

    def _announce(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Dispatch on_evaluate, and return the metrics including the additions of callbacks, equal on all ranks."""
        trainer = self._trainer
        if self.is_aside:
            metrics = trainer._shared_metrics(metrics)
            trainer._callback_handler.tell_loggers("on_evaluate", trainer.control, metrics=dict(metrics))
            return metrics
        # Two passes: callbacks that add metrics come first, and loggers or early stopping read the broadcast result.
        trainer._dispatch_event("on_evaluate", readers=False, metrics=metrics)
        metrics = trainer._shared_metrics(metrics)
        # Pass a copy: a metric added on one rank only could make that rank choose a different best model.
        with trainer.team.final_agreement("reporting an evaluation"):
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
            self.loss, self.is_running, self.collector = trained, False, None

    # --- loop over batches

    def run(self) -> EvaluationSums:
        """Evaluate at most `max_eval_steps` batches of `eval_dataloader`, and sum over ranks; collective."""
        trainer, sums = self._trainer, EvaluationSums()
        self._start_collecting()
        collector = self.collector

        def look(batch: Batch | None) -> None:
            # Every rank calls this in the first round, also with batch=None: agreeing on the loss is a collective.
            if self._request.allows_no_labels:
                lacks_labels = batch is not None and not has_labels(self._label_names, batch)
                self.is_unlabelled = any(trainer.team.gather(lacks_labels))
            if not self.loss.can_count and not self.is_unlabelled:
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
            None if collector is None else collector.end_round,
        )
        return self._summed(sums)

    def _start_collecting(self) -> None:
        """Make the collector of this evaluation, if it is asked for."""
        trainer, request = self._trainer, self._request
        if request.collects or request.allows_no_labels:
            self._label_names = label_names_of(trainer._whole_model(), trainer.args.label_names)
        if not request.collects or self.is_second_look:
            return
        part = trainer._data_layout(for_training=False).part.number
        main_input = getattr(trainer._whole_model(), "main_input_name", "input_ids")
        place = Place(trainer.team, part, trainer.device, main_input)
        functions = (trainer.compute_metrics, trainer.preprocess_logits_for_metrics)
        self.collector = Collector(place, request, trainer.args, *functions)

    def metrics(self, sums: EvaluationSums) -> dict[str, Any]:
        """Return loss, speed and the result of `compute_metrics`; collective if it is asked for."""
        prefix = self._request.prefix
        if self.collector is not None:
            collected = self.collector.finish()
            # Free the predictions at once if only their metrics are asked for.
            self._collected = collected if self._request.keeps else Collected(None, None, collected.metrics)
        metrics = evaluation_metrics(sums, self._started, prefix)
        if self.is_unlabelled and sums.targets == 0:
            del metrics[f"{prefix}_loss"], metrics[f"{prefix}_tokens"]
        elif sums.targets == 0 and not self.is_second_look:
            warn_of_no_targets(sums.num_batches)
        if self.collector is not None:
            # As in transformers, a metric of the same name replaces ours.
            metrics.update(self._collected.metrics)
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
        targets = self._count(batch, labels) if self.has_losses else 0
        if self.has_losses and prediction["loss"] is None:
            sums.add_without_loss(samples_in(batch))
        elif self.has_losses:
            sums.add(prediction["loss"], targets, samples_in(batch))
        if self.has_losses and self.collector is not None:
            self.collector.take(prediction, batch, samples_in(batch))
        if not self.is_second_look and not self.is_aside:
            trainer._dispatch_event("on_prediction_step", tokens=targets, batch=batch, **prediction)
        note_batch(EVALUATION)

    def _count(self, batch: Batch, labels: Any) -> int | Tensor:
        """Return the number of targets of a batch; the number of samples if it has no labels."""
        if self.is_unlabelled:
            return samples_in(batch)
        counted = labels if is_overridden(self._trainer, "_prepare_batch") else batch.get("labels")
        return self.loss.count(counted, batch)

    def _join(self, batch: Batch) -> None:
        """Run a forward pass without using its result, so that other ranks can evaluate their batches."""
        self._trainer._prediction_step(*self._trainer._prepare_batch(batch))

    def _summed(self, sums: EvaluationSums) -> EvaluationSums:
        team = self._trainer.team
        # Separate sums: int64 counts stay exact, and losses keep float64.
        loss_sum = team.sum(torch.tensor([sums.loss_sum], dtype=torch.float64))
        counts = [sums.targets, sums.num_batches, sums.num_samples, int(self.collector is not None)]
        targets, num_batches, num_samples, num_collecting = team.sum(torch.tensor(counts, dtype=torch.int64)).tolist()
        require_all_collecting(num_collecting, team.size)
        self.num_samples = num_samples
        return EvaluationSums.of(float(loss_sum), targets, num_batches, num_samples)

    @property
    def shows_predictions(self) -> bool:
        """Whether the collector, a callback or an override of `_prediction_step` receives logits."""
        if self.collector is not None:
            return True
        is_shown = not self.is_second_look and not self.is_aside
        listens = is_shown and self._trainer.is_listened_to("on_prediction_step")
        return listens or is_overridden(self._trainer, "_prediction_step")

    def predict(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor | None) -> Prediction:
        """Return the mean loss of one batch, with logits and labels if `shows_predictions`."""
        if self.is_unlabelled:
            return self._predict_without_labels(model, inputs)
        forward = self.loss.forward(model, inputs, labels, keeps=self.collector is not None)
        count = self.loss.count(labels, {"labels": labels} if labels is not None else inputs)
        loss = self.loss.mean(forward, labels, count)
        shows = self.shows_predictions
        return {
            "loss": loss,
            "logits": self._logits(model, forward) if shows else None,
            "labels": self.label_ids(inputs, labels) if shows else None,
        }

    def _logits(self, model: nn.Module, forward: Forward) -> Any:
        """Return the logits; all predictions of the model if they are collected."""
        if forward.outputs is None:
            return self.loss.logits(forward)
        return predictions_of(forward.outputs, ignored_keys(model))

    def label_ids(self, inputs: Mapping[str, Any], labels: Any) -> Any:
        """Return the labels; all columns in `label_names` if predictions are collected."""
        return labels if self.collector is None else label_ids_of(self._label_names, inputs, labels)

    def _predict_without_labels(self, model: nn.Module, inputs: dict[str, Any]) -> Prediction:
        # Some models compute a loss without labels, such as a contrastive loss.
        outputs = self.loss.outputs(model, inputs)
        logits = predictions_of(outputs, ignored_keys(model)) if self.shows_predictions else None
        return {"loss": own_loss_of(outputs), "logits": logits, "labels": None}


def _plain_means(loss_fn: Any, loss: ModelLoss) -> AbstractContextManager[None]:
    """Return a context that disables the loss weights of training steps in a loss function."""
    if isinstance(loss_fn, TrainingLoss):
        return loss_fn.evaluating(loss)
    no_rescale = getattr(loss_fn, "no_rescale", None)
    context: AbstractContextManager[None] = contextlib.nullcontext() if no_rescale is None else no_rescale()
    return context
