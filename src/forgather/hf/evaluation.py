"""Evaluation and prediction of the facade: the order of calls of transformers, on the engine's evaluation loop.

`evaluate` and `predict` call the loader, the loop and the prediction step of the facade, so that overrides take part.
The engine gathers predictions in the order of the dataset, once from each sample. All functions are collective.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import nested_detach
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, speed_metrics

from forgather.hf.changes import pass_on_to_evaluation
from forgather.hf.data import EvaluationLoader
from forgather.hf.engine.num_items import NumItems, Use
from forgather.hf.methods import call
from forgather.ml.distributed.watch import EVALUATION_START
from forgather.ml.trainer.ranks.watch import watched
from forgather.ml.trainer.setup.torch_settings import torch_settings

if TYPE_CHECKING:
    from forgather.hf.trainer import Trainer

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Settings of the current evaluation."""

    prediction_loss_only: bool = True
    ignore_keys: list[str] | None = None


def evaluate(trainer: "Trainer", dataset: Any, ignore_keys: list[str] | None, prefix: str) -> dict[str, float]:
    """Return the metrics of one dataset, or of a dict of datasets with their names in the keys."""
    chosen = trainer.eval_dataset if dataset is None else dataset
    if isinstance(chosen, Mapping):
        metrics: dict[str, float] = {}
        for name, one in chosen.items():
            part = name if dataset is None else one
            metrics.update(call(trainer.evaluate, part, ignore_keys=ignore_keys, metric_key_prefix=f"{prefix}_{name}"))
        return metrics
    started = time.time()
    # Here and not in the loop: an override of the loop needs the model on its device too.
    trainer.engine._prepare_to_evaluate(None)
    output = call(
        trainer.evaluation_loop,
        trainer.get_eval_dataloader(dataset),
        description="Evaluation",
        prediction_loss_only=True if trainer.compute_metrics is None else None,
        ignore_keys=ignore_keys,
        metric_key_prefix=prefix,
    )
    _add_speed(trainer, output, prefix, started)
    with _evaluation_record(trainer):
        trainer.log(output.metrics)
    with trainer.engine.team.final_agreement("reporting an evaluation"):
        trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, output.metrics)
    result: dict[str, float] = output.metrics
    return result


def predict(trainer: "Trainer", dataset: Any, ignore_keys: list[str] | None, prefix: str) -> PredictionOutput:
    started = time.time()
    trainer.engine._prepare_to_evaluate(None)
    output = call(
        trainer.evaluation_loop,
        trainer.get_test_dataloader(dataset),
        description="Prediction",
        ignore_keys=ignore_keys,
        metric_key_prefix=prefix,
    )
    _add_speed(trainer, output, prefix, started)
    with trainer.engine.team.final_agreement("reporting predictions"):
        trainer.callback_handler.on_predict(trainer.args, trainer.state, trainer.control, output.metrics)
    return PredictionOutput(output.predictions, output.label_ids, output.metrics)


def loop(
    trainer: "Trainer", loader: Any, loss_only: bool | None, ignore_keys: list[str] | None, prefix: str
) -> EvalLoopOutput:
    """Evaluate a loader on the engine. The loader may come from an override, or be a dataset."""
    engine = trainer.engine
    loss_only = trainer.args.prediction_loss_only if loss_only is None else loss_only
    data = loader.dataset if isinstance(loader, EvaluationLoader) else loader
    settings = Settings(bool(loss_only), ignore_keys)
    with _evaluating(trainer, settings, loader), torch_settings(engine.args), watched(engine, EVALUATION_START):
        engine._prepare_to_evaluate(None)
        pass_on_to_evaluation(trainer)
        output: EvalLoopOutput = engine.evaluator.predict_all(
            data, prediction_loss_only=bool(loss_only), metric_key_prefix=prefix
        )
        if not trainer.is_in_train and trainer.model is not None:
            # As in transformers, which callers rely on: dropout stays off in their own forward passes.
            trainer.model.eval()
        return output


def prediction(
    trainer: "Trainer", model: nn.Module, inputs: Inputs, loss_only: bool, ignore_keys: list[str] | None
) -> tuple[Any, Any, Any]:
    """Return loss, logits and labels of a batch: all outputs of the model except the loss and ignored keys."""
    # A model without an argument for labels may still have them in its batches, for the causal loss.
    names = trainer.label_names or (["labels"] if inputs.get("labels") is not None else [])
    has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
    returns_loss = inputs.get("return_loss")
    has_loss = has_labels or (not names and bool(trainer.can_return_loss if returns_loss is None else returns_loss))
    inputs = trainer._prepare_inputs(inputs)
    trainer._prepared_labels = inputs.get("labels")
    labels = _single(nested_detach(tuple(inputs.get(name) for name in names))) if has_loss and names else None
    with torch.no_grad(), trainer.compute_loss_context_manager():
        loss, outputs = _loss_and_outputs(trainer, model, inputs) if has_loss else (None, model(**inputs))
    if loss_only:
        return loss, None, None
    return loss, _single(nested_detach(_logits(trainer, outputs, ignore_keys, loss is not None))), labels


def _loss_and_outputs(trainer: "Trainer", model: nn.Module, inputs: Inputs) -> tuple[Tensor, Any]:
    engine = trainer.engine
    labels = inputs.get("labels")
    if trainer._computes_loss or trainer.label_smoother is not None:
        num_items, num_reads = _num_items(trainer, labels), trainer.accelerator.num_reads
        loss, outputs = call(trainer.compute_loss, model, inputs, return_outputs=True, num_items_in_batch=num_items)
        mean = loss.detach().mean()
        if num_items is not None and num_items.use.was_made and trainer.accelerator.num_reads > num_reads:
            # Multiplied by the number of processes, for gradients that ranks average. A metric needs the mean itself.
            mean = mean / trainer.args.world_size
        return mean, outputs
    rest = {name: value for name, value in inputs.items() if name != "labels"}
    chosen = engine.evaluator.loss
    forward = chosen.forward(model, rest, labels, keeps=True)
    count = chosen.count(labels, inputs)
    return chosen.mean(forward, labels, count).detach(), forward.outputs


def _num_items(trainer: "Trainer", labels: Any) -> NumItems | None:
    """Return the number of targets of this batch, for a loss that divides by it."""
    if not isinstance(labels, Tensor):
        return None
    count = trainer.engine.evaluator.loss.count(labels, {"labels": labels})
    return NumItems.of(count, trainer.engine.device, Use())


def _logits(trainer: "Trainer", outputs: Any, ignore_keys: list[str] | None, has_loss: bool) -> tuple[Any, ...]:
    if ignore_keys is None:
        config = getattr(trainer.model, "config", None)
        ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])) if config else []
    if isinstance(outputs, Mapping):
        return tuple(value for name, value in outputs.items() if name not in (*ignore_keys, "loss"))
    if isinstance(outputs, Tensor):
        return (outputs,)
    starts_with_loss = has_loss and isinstance(outputs[0], Tensor) and outputs[0].ndim == 0
    return tuple(outputs[1:] if starts_with_loss else outputs)


def _single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _add_speed(trainer: "Trainer", output: EvalLoopOutput, prefix: str, started: float) -> None:
    batch_size = trainer.args.eval_batch_size * trainer.args.world_size
    num_samples = output.num_samples or 0
    steps = -(-num_samples // batch_size)
    assert output.metrics is not None
    output.metrics.update(speed_metrics(prefix, started, num_samples=num_samples, num_steps=steps))


@contextlib.contextmanager
def _evaluating(trainer: "Trainer", settings: Settings, loader: Any) -> Iterator[None]:
    before = trainer._evaluation, trainer._evaluated_loader
    trainer._evaluation, trainer._evaluated_loader = settings, loader
    try:
        yield
    finally:
        trainer._evaluation, trainer._evaluated_loader = before


@contextlib.contextmanager
def _evaluation_record(trainer: "Trainer") -> Iterator[None]:
    """Log a record that Forgather's callbacks read from on_evaluate."""
    handler: Any = trainer.engine._callback_handler
    handler.skips_own = True
    try:
        yield
    finally:
        handler.skips_own = False
