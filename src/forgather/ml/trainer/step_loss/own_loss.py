"""Whether a model's own loss is the causal one: by what it declares, and by what it computes."""

import math
from collections.abc import Mapping
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.setup.model_modes import set_train
from forgather.ml.trainer.step_loss.loss_traits import IGNORE_INDEX, looking_only
from forgather.ml.trainer.step_loss.model_outputs import logits_of, own_loss_of
from forgather.ml.trainer.step_loss.token_weighting import parameters_of
from forgather.ml.utils import unwrap_model

TOLERANCE = 1e-4
"""Losses that differ by no more than this share of them are the same."""

_TOO_EVEN = 1e-3
"""Logits that vary less than this say nothing of a loss: all classes are as likely."""

_SHIFTED_LOSS_TYPES = ("ForCausalLM", "ForConditionalGeneration")
"""Those names of `transformers` whose loss predicts the next token, so that the first label is no target."""


class Comparison(NamedTuple):
    """What a model computed from the labels of a batch, and what the causal loss of its logits is."""

    own: float | None = None
    """None if the model computes no loss from labels."""
    causal: float | None = None
    """None if there are no logits and labels that there is a causal loss of."""
    tolerance: float = TOLERANCE
    problem: str = ""
    """Why the model could not be asked."""
    takes_labels: bool = True
    counts_first: bool = False
    """Whether the model's own loss has a target in the first position of a sequence, which the causal one has not."""

    @property
    def differs(self) -> bool:
        """Whether the causal loss would be another than the model's own; False if that cannot be told."""
        if self.own is None or self.causal is None:
            return self.own is not None
        if self.counts_first:
            return True
        if not math.isfinite(self.own) or not math.isfinite(self.causal):
            return math.isfinite(self.own)
        return abs(self.own - self.causal) > self.tolerance * max(abs(self.own), abs(self.causal))

    def __str__(self) -> str:
        if self.causal is None:
            return "it computes one from the labels, and there are no logits of rank 3 that fit them"
        if self.counts_first:
            return "the first label of a sequence is a target of it, and none of shifted causal cross entropy"
        return f"it differs from shifted causal cross entropy ({self.own:.6g} instead of {self.causal:.6g})"


def compared(model: nn.Module, inputs: Mapping[str, Any], labels: Tensor) -> Comparison:
    """Run a model on a batch with its labels, without a trace.

    Both losses are those of one forward pass, so that it does not matter what was dropped in it; and the model is in the
    mode in which it is used, since some add terms to the loss of training only. Where they are the same, it may be by
    chance, as with a head of zeros: then the model is tried with other values, and with the first labels alone.
    """
    if not takes_labels(model):
        return Comparison(takes_labels=False)
    has_classes = isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.is_complex())
    if has_classes and int(CausalLoss().num_targets(labels)) == 0:
        # Of losses without a target nothing can be told: let there be some of any class.
        labels = labels.clamp(min=0)
    try:
        with looking_only(model):
            return _compared(model, inputs, labels)
    except Exception as error:  # noqa: BLE001 - the model may still be trained with the causal loss, and it is said
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, TypeError) and "unexpected keyword argument 'labels'" in str(error):
            return Comparison(takes_labels=False)
        return Comparison(problem=text)


def _compared(model: nn.Module, inputs: Mapping[str, Any], labels: Tensor) -> Comparison:
    outputs = model(**inputs, labels=labels)
    logits = logits_of(outputs)
    if logits is not None and logits.ndim == 3 and float(logits.float().std(dim=-1).max()) < _TOO_EVEN:
        outputs = torch.func.functional_call(model, _varied(model), kwargs={**inputs, "labels": labels})
    comparison = _comparison(model, inputs, labels, outputs)
    if comparison.causal is None or comparison.differs or getattr(model, "loss_type", None) == "ForCausalLM":
        return comparison
    first = torch.full_like(labels, IGNORE_INDEX)
    first[:, 0] = labels[:, 0].clamp(min=0)
    of_first = own_loss_of(model(**inputs, labels=first))
    # Without a target it is zero, or no number.
    counts_first = of_first is not None and math.isfinite(of_first) and abs(float(of_first)) > TOLERANCE
    return comparison._replace(counts_first=counts_first)


def _varied(model: nn.Module) -> dict[str, Tensor]:
    """Other values for parameters that have the same value everywhere, such as heads that begin with zeros."""
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
        # Some models save the memory of logits when they have labels. Nothing may be dropped in two forward passes.
        with set_train(model, False):
            own = own_loss_of(model(**inputs, labels=labels))
            logits = logits_of(model(**inputs))
    # What a loss in few bits cannot show is no difference.
    tolerance = max(TOLERANCE, torch.finfo(own.dtype).eps) if own is not None and own.is_floating_point() else TOLERANCE
    return Comparison(None if own is None else float(own), _causal_loss(logits, labels), tolerance)


def _causal_loss(logits: Tensor | None, labels: object) -> float | None:
    if logits is None or logits.ndim != 3 or not isinstance(labels, Tensor):
        return None
    if labels.is_floating_point() or labels.is_complex() or logits.shape[:-1] != labels.shape:
        return None
    if int(labels.max()) >= logits.shape[-1] or bool(((labels < 0) & (labels != IGNORE_INDEX)).any()):
        # On a device cross entropy would end the process.
        return None
    return float(CausalLoss()(logits, labels))


def takes_labels(model: nn.Module) -> bool:
    """Whether a forward pass may be given labels."""
    parameters = parameters_of(model.forward)
    return "labels" in parameters or any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())


def reason_for_own_loss(model: nn.Module) -> str | None:
    """Why the causal loss would be wrong for a model, though its logits may look like those of a causal one."""
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
    """Whether a model's own loss is one over next tokens; encoder-decoder models shift what they read instead."""
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(model, "loss_type", None) in _SHIFTED_LOSS_TYPES and not is_encoder_decoder
