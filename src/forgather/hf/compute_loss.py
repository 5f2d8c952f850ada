"""Default loss of the facade, for subclasses that call `super().compute_loss` and for compute_loss_func.

A trainer without overrides does not come here: the engine computes its loss. All functions take the facade.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forgather.hf.engine.label_rules import shifts_labels
from forgather.hf.engine.micro_step import MicroStep
from forgather.hf.engine.num_items import NumItems
from forgather.hf.methods import call
from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.setup.devices import moved
from forgather.ml.trainer.step_loss.model_outputs import logits_of, own_loss_of
from forgather.ml.trainer.step_loss.own_loss import takes_labels
from forgather.ml.utils import unwrap_model

if TYPE_CHECKING:
    from forgather.hf.trainer import Trainer

Inputs = dict[str, Any]


def smoother(args: Any) -> Any:
    """Return the label smoother of transformers, or None."""
    if not args.label_smoothing_factor:
        return None
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(epsilon=args.label_smoothing_factor)


def called(trainer: "Trainer", model: nn.Module, inputs: Inputs, num_items: Any) -> Tensor:
    """Return the result of compute_loss, which a subclass may override with an older signature."""
    loss: Tensor = call(trainer.compute_loss, model, inputs, num_items_in_batch=num_items)
    step = trainer.engine_step
    if step is not None:
        step.computed = loss
    return loss


def training_step(trainer: "Trainer", model: nn.Module, inputs: Inputs, step: MicroStep) -> Tensor:
    """Call an overridden training_step, and note the losses that it computes and the labels that it changes."""
    compute, prepare = trainer.compute_loss, trainer._prepare_inputs

    def noted_loss(*values: Any, **keywords: Any) -> Any:
        result = call(compute, *values, **keywords)
        step.computed = result[0] if isinstance(result, tuple) else result
        return result

    def noted_inputs(inputs: Inputs) -> Inputs:
        prepared = prepare(inputs)
        # Labels of another shape belong to a part of the micro-batch, which has its own weight.
        if getattr(prepared.get("labels"), "shape", None) == getattr(step.labels, "shape", None):
            step.note_labels(prepared.get("labels"))
        return prepared

    noted: dict[str, Any] = {}
    if trainer._overrides("compute_loss"):
        noted["compute_loss"] = noted_loss
    if trainer._overrides("_prepare_inputs", "_prepare_input"):
        noted["_prepare_inputs"] = noted_inputs
    with _instance_methods(trainer, noted):
        loss: Tensor = call(trainer.training_step, model, inputs, num_items_in_batch=step.num_items)
    return loss


@contextlib.contextmanager
def _instance_methods(trainer: "Trainer", methods: Mapping[str, Any]) -> Iterator[None]:
    """Let calls of `self.<method>` in overrides come to these functions."""
    before = {name: vars(trainer)[name] for name in methods if name in vars(trainer)}
    vars(trainer).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(trainer)[name]
        vars(trainer).update(before)


def default(trainer: "Trainer", model: nn.Module, inputs: Inputs, num_items: Any) -> tuple[Tensor, Any]:
    """Return the loss and the outputs of the model. With `num_items`, the loss is a share of the step."""
    labels = inputs.get("labels")
    if trainer.compute_loss_func is not None:
        rest = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = model(**rest)
        return _scalar(call(trainer.compute_loss_func, outputs, labels, num_items_in_batch=num_items)), outputs
    if trainer.label_smoother is not None and labels is not None:
        outputs = model(**inputs)
        mean = trainer.label_smoother(outputs, labels, shift_labels=shifts_labels(model))
    else:
        mean, outputs = _own_mean(model, inputs, labels)
    step = trainer.engine_step
    loss = step.own_loss(mean, num_items) if isinstance(num_items, NumItems) and step is not None else mean
    if step is not None:
        step.computed = loss
    return loss, outputs


def _own_mean(model: nn.Module, inputs: Inputs, labels: Any) -> tuple[Tensor, Any]:
    """Return the model's own loss; the shifted causal loss for a model that takes no labels."""
    if labels is None or takes_labels(unwrap_model(model)):
        outputs = model(**inputs)
        loss = own_loss_of(outputs)
    else:
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        logits = logits_of(outputs)
        loss = CausalLoss()(logits, labels) if logits is not None and logits.ndim == 3 else None
    if loss is None:
        raise ValueError(
            f"{type(unwrap_model(model)).__name__} returned no loss for the inputs {', '.join(inputs)}. Put labels into the "
            "batches (see label_names), pass compute_loss_func, or override compute_loss."
        )
    return loss, outputs


def _scalar(loss: Any) -> Tensor:
    if isinstance(loss, Tensor):
        return loss
    raise TypeError(f"compute_loss_func returned {type(loss).__name__}, but must return a tensor with one value.")


def on_device(value: Any, device: torch.device) -> Any:
    """Return a structure with all tensors on the device; batches of the loader are there already."""
    if isinstance(value, Mapping) and all(_is_there(one, device) for one in value.values()):
        return value
    return moved(value, device)


def _is_there(value: object, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device == device
