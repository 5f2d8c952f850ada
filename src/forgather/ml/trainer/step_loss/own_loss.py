"""Comparison of a model's own loss with shifted causal cross entropy, by declaration (`loss_type`, config) and by trial.

`compared` runs the model on a batch without side effects. `ModelLoss` uses it to choose the loss on the first batch,
and `fused` to reject models with another loss.
"""

import math
from collections.abc import Mapping
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.sharding.sharded_tensors import is_dtensor
from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.batch_size.memory_errors import is_out_of_memory
from forgather.ml.trainer.setup.model_modes import set_train
from forgather.ml.trainer.step_loss.loss_traits import IGNORE_INDEX, looking_only
from forgather.ml.trainer.step_loss.model_outputs import logits_of, own_loss_of
from forgather.ml.trainer.step_loss.token_weighting import parameters_of
from forgather.ml.utils import unwrap_model

TOLERANCE = 1e-4
"""Relative difference up to which two losses count as equal."""

_TOO_EVEN = 1e-3
"""Standard deviation of logits below which all classes are about equally likely, so losses cannot be distinguished."""

_SHIFTED_LOSS_TYPES = ("ForCausalLM", "ForConditionalGeneration")
"""Loss types of `transformers` that predict the next token, so that the first label is not a target."""


class Comparison(NamedTuple):
    """Result of a trial: the model's own loss of a batch, and the causal loss of its logits."""

    own: float | None = None
    """None if the model computes no loss from labels."""
    causal: float | None = None
    """None if the logits and labels do not fit the causal loss."""
    tolerance: float = TOLERANCE
    problem: str = ""
    """Error of the trial, if it failed."""
    takes_labels: bool = True
    counts_first: bool = False
    """Whether the model's own loss counts the first position of a sequence. The causal loss does not."""

    @property
    def differs(self) -> bool:
        """Whether the model's own loss differs from the causal loss; False if the trial was not conclusive."""
        if self.own is None or self.causal is None:
            return self.own is not None
        if self.counts_first:
            return True
        if not math.isfinite(self.own) or not math.isfinite(self.causal):
            return math.isfinite(self.own)
        return abs(self.own - self.causal) > self.tolerance * max(abs(self.own), abs(self.causal))

    def __str__(self) -> str:
        if self.causal is None:
            return "it computes a loss from the labels, and returns no logits of rank 3 that fit them"
        if self.counts_first:
            return "it counts the first label of a sequence, unlike shifted causal cross entropy"
        return f"it differs from shifted causal cross entropy ({self.own:.6g} instead of {self.causal:.6g})"


def compared(model: nn.Module, inputs: Mapping[str, Any], labels: Tensor) -> Comparison:
    """Run a model on a batch with labels, without side effects, and compare its loss with the causal loss.

    Both losses come from one forward pass, so dropout affects both equally. The train or eval mode stays unchanged,
    because some models add terms to the training loss only. Equal losses may be a coincidence, for example with a head
    of zeros. The trial is then repeated with varied parameters and with the first labels only.
    """
    if not takes_labels(model):
        return Comparison(takes_labels=False)
    has_classes = isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.is_complex())
    if has_classes and int(CausalLoss().num_targets(labels)) == 0:
        # A batch without targets, such as an EmptyBatch, shows nothing. Turn ignored labels into class 0.
        labels = labels.clamp(min=0)
    try:
        with looking_only(model):
            return _compared(model, inputs, labels)
    except Exception as error:
        if is_out_of_memory(error):
            # Not a property of the loss: `auto_find_batch_size` repeats the step with a smaller batch.
            raise
        # The causal loss may still work, and the caller logs the problem.
        text = f"{type(error).__name__}: {error}"
        # A wrapper with **kwargs may pass labels on to a forward that does not accept them.
        if isinstance(error, TypeError) and "unexpected keyword argument 'labels'" in str(error):
            return Comparison(takes_labels=False)
        return Comparison(problem=text)


def _compared(model: nn.Module, inputs: Mapping[str, Any], labels: Tensor) -> Comparison:
    outputs = model(**inputs, labels=labels)
    logits = logits_of(outputs)
    is_even = logits is not None and logits.ndim == 3 and float(logits.float().std(dim=-1).max()) < _TOO_EVEN
    # Other parameters cannot replace shards: each rank has only some rows.
    if is_even and not any(map(is_dtensor, model.parameters())):
        outputs = torch.func.functional_call(model, _varied(model), kwargs={**inputs, "labels": labels})
    comparison = _comparison(model, inputs, labels, outputs)
    if comparison.causal is None or comparison.differs or getattr(model, "loss_type", None) == "ForCausalLM":
        return comparison
    # Equal so far. Keep the first label of each sequence only: the causal loss has no target there.
    first = torch.full_like(labels, IGNORE_INDEX)
    first[:, 0] = labels[:, 0].clamp(min=0)
    of_first = own_loss_of(model(**inputs, labels=first))
    # A loss without targets is zero or NaN.
    counts_first = of_first is not None and math.isfinite(of_first) and abs(float(of_first)) > TOLERANCE
    return comparison._replace(counts_first=counts_first)


def _varied(model: nn.Module) -> dict[str, Tensor]:
    """Return noisy copies of constant parameters, such as heads that are initialised with zeros."""
    return {
        name: parameter + 0.1 * torch.randn_like(parameter)
        for name, parameter in model.named_parameters()
        if parameter.numel() > 1 and bool(parameter.eq(parameter.flatten()[0]).all())
    }


def _comparison(model: nn.Module, inputs: Mapping[str, Any], labels: Tensor, outputs: object) -> Comparison:
    own, logits = own_loss_of(outputs), logits_of(outputs)
    if own is None or own.numel() != 1:
        return Comparison()
    if logits is None:
        # Some models skip the logits if they get labels, to save memory. Two forward passes are needed then, and they
        # must run in eval mode: dropout would make them differ.
        with set_train(model, False):
            own = own_loss_of(model(**inputs, labels=labels))
            logits = logits_of(model(**inputs))
    # A difference below the resolution of the dtype is not a difference.
    tolerance = max(TOLERANCE, torch.finfo(own.dtype).eps) if own is not None and own.is_floating_point() else TOLERANCE
    return Comparison(None if own is None else float(own), _causal_loss(logits, labels), tolerance)


def _causal_loss(logits: Tensor | None, labels: object) -> float | None:
    if logits is None or logits.ndim != 3 or not isinstance(labels, Tensor):
        return None
    if labels.is_floating_point() or labels.is_complex() or logits.shape[:-1] != labels.shape:
        return None
    if int(labels.max()) >= logits.shape[-1] or bool(((labels < 0) & (labels != IGNORE_INDEX)).any()):
        # On CUDA, cross entropy with such labels fails a device-side assert, which makes the device unusable.
        return None
    return float(CausalLoss()(logits, labels))


def takes_labels(model: nn.Module) -> bool:
    """Return whether `forward` accepts `labels`."""
    parameters = parameters_of(model.forward)
    return "labels" in parameters or any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())


def reason_for_own_loss(model: nn.Module) -> str | None:
    """Return the reason why the model declares another loss than the causal loss; None if it does not."""
    inner = unwrap_model(model)
    config = getattr(inner, "config", None)
    loss_type = getattr(inner, "loss_type", None)
    if loss_type is not None and loss_type != "ForCausalLM":
        return f"its loss_type is {loss_type!r}"
    for name in ("is_encoder_decoder", "output_router_logits"):
        if getattr(config, name, False):
            return f"its config has {name}=True"
    labels = parameters_of(inner.forward).get("labels")
    if labels is not None and labels.default is labels.empty:
        return "its forward requires labels"
    return None


def declares_shift(model: nn.Module) -> bool:
    """Return whether a model declares a next-token loss; encoder-decoder models shift the decoder inputs instead."""
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(model, "loss_type", None) in _SHIFTED_LOSS_TYPES and not is_encoder_decoder
