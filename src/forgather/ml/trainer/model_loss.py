"""From a batch to its loss: by the user's function, by the causal loss, or by what the model computes itself."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.rng import RNGState
from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.data_collator import require_mapping
from forgather.ml.trainer.empty_batch import EmptyBatch
from forgather.ml.trainer.evaluation import samples_in
from forgather.ml.trainer.loss_weighting import (
    IGNORE_INDEX,
    StepLoss,
    logits_of,
    own_loss_of,
    parameters_of,
    zero_without_targets,
)
from forgather.ml.trainer.trainer_types import LossFunctionT

logger = logging.getLogger(__name__)

Count = int | Tensor

_SHIFTED_LOSS_TYPES = ("ForCausalLM", "ForConditionalGeneration")
"""Those names of `transformers` whose loss predicts the next token, so that the first label is no target."""


@dataclass
class Window:
    """The micro-batches of one step; its targets are counted before the first backward pass."""

    batches: list[Mapping[str, Any]]
    counts: list[Count] = field(default_factory=list)
    total: Count | None = None
    """Targets of the whole step, over all micro-batches and data-parallel ranks."""
    num_shares: int = 0
    """Micro-batches of the whole step, on all data-parallel ranks; stand-ins do not count."""

    def __post_init__(self) -> None:
        for batch in self.batches:
            require_mapping(batch)


class Forward(NamedTuple):
    """What a forward pass gave: logits (or hidden states) for a loss function, or the model's own loss."""

    logits: Tensor | None
    own_loss: Tensor | None


class ModelLoss:
    """Runs the model and computes losses.

    Without a loss function the model decides: one that is known to need another loss than the causal one is called with
    its labels, and its own loss is used. Of the others the first batch tells: logits of rank 3 get the shifted causal
    loss, everything else the model's own.
    """

    def __init__(
        self,
        loss_fn: LossFunctionT | None,
        token_weighted: bool,
        step_loss: StepLoss | None = None,
        head: nn.Module | None = None,
    ) -> None:
        """With a `head` the model gives hidden states, of which the head would make logits."""
        self._token_weighted = token_weighted
        self._given_loss = loss_fn
        self._head = head
        self._step_loss = step_loss or (None if loss_fn is None else StepLoss(loss_fn, token_weighted, head))
        self._uses_own_loss = False
        self._own_loss_shifts = False

    def unresolved(self) -> "ModelLoss":
        """Another one that has yet to see the model at work."""
        return ModelLoss(self._given_loss, self._token_weighted, head=self._head)

    def logits(self, forward: Forward) -> Tensor | None:
        """The logits of a forward pass, computed now if the loss did without them."""
        if self._step_loss is None or forward.logits is None:
            return forward.logits
        return self._step_loss.logits(forward.logits)

    @property
    def can_count(self) -> bool:
        """Whether targets can be counted before the model has been seen at work."""
        return self._uses_own_loss or (self._step_loss is not None and self._step_loss.is_resolved)

    def count(self, labels: Tensor | None, batch: Mapping[str, Any]) -> Count:
        """The number of targets among labels; the batch's samples count where there are no labels to tell."""
        if isinstance(batch, EmptyBatch):
            return 0
        if self._step_loss is not None:
            # Without labels the forward pass that follows explains what is missing.
            return 0 if labels is None else self._step_loss.count(labels)
        if labels is None or labels.is_floating_point():
            return samples_in(batch)
        targets = labels[:, 1:] if self._own_loss_shifts and labels.ndim > 1 else labels
        number = (targets != IGNORE_INDEX).sum()
        return int(number) if number.device.type == "cpu" else number

    def forward(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor | None, is_empty: bool = False
    ) -> Forward:
        """Run the model on a batch that is on its device; `is_empty` if it only stands in for one."""
        if self._step_loss is None and not self._uses_own_loss:
            return self._first_forward(model, inputs, labels, is_empty)
        if self._uses_own_loss:
            return self._own_forward(model, inputs, labels, is_empty)
        logits = logits_of(model(**inputs))
        if logits is None:
            raise _no_loss_error(model, "returned no logits for the loss function")
        if labels is None:
            raise _no_loss_error(model, "got a batch without 'labels', which the loss function needs")
        assert self._step_loss is not None
        if not self._step_loss.is_resolved:
            self._step_loss.resolve(logits, labels)
        return Forward(logits, None)

    def share(self, forward: Forward, labels: Tensor | None, count: Count, total: Count, num_shares: int) -> Tensor:
        """The part of the step's loss that this micro-batch makes; `num_shares` counts the micro-batches of the step."""
        if self._step_loss is not None:
            assert forward.logits is not None and labels is not None
            return self._step_loss.share(forward.logits, labels, count, total, num_shares)
        assert forward.own_loss is not None
        if isinstance(count, int) and count == 0:
            return _nothing(forward.own_loss, forward.logits)
        if not self._token_weighted:
            share = forward.own_loss / num_shares
        else:
            # A new tensor in any case: CUDA graphs write into those that they returned when they run again.
            share = forward.own_loss.clone() if count is total else forward.own_loss * (count / total)
        return share if isinstance(count, int) else zero_without_targets(share, count, forward.logits)

    def _first_forward(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor | None, is_empty: bool
    ) -> Forward:
        reason = reason_for_own_loss(model)
        if labels is not None and reason is None:
            generators = RNGState()
            before = generators.state_dict()
            logits = logits_of(model(**inputs))
            if logits is not None and logits.ndim == 3:
                self._step_loss = StepLoss(CausalLoss(), self._token_weighted)
                logger.info("Loss: shifted causal cross entropy, since the model returns logits of rank 3.")
                return Forward(logits, None)
            # The model runs again, with its labels: it must draw the same random numbers as if it ran once.
            generators.load_state_dict(before)
        self._uses_own_loss = True
        self._own_loss_shifts = _shifts(_unwrapped(model))
        logger.info(
            "Loss: the model's own, since %s.", reason or "there are no logits of rank 3 and labels for another"
        )
        return self._own_forward(model, inputs, labels, is_empty)

    def _own_forward(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor | None, is_empty: bool
    ) -> Forward:
        if is_empty and labels is not None and not labels.is_floating_point():
            # Some class, so that the loss is a number; it will weigh nothing.
            labels = labels.clamp(min=0)
        outputs = model(**inputs) if labels is None else model(**inputs, labels=labels)
        loss = own_loss_of(outputs)
        if loss is None:
            reason = "got a batch without 'labels'" if labels is None else "computes no loss of its own from labels"
            raise _no_loss_error(model, f"{reason}, and returned no 'loss'")
        return Forward(logits_of(outputs), loss)


def _nothing(own_loss: Tensor, logits: Tensor | None) -> Tensor:
    """Zero, with gradients of zero for all that the loss depends on: other ranks wait for those of each parameter."""
    if logits is None:
        return torch.nan_to_num(own_loss) * 0.0
    zero = logits.sum() * 0.0
    # A mean over nothing is no number, and might have gradients that are none.
    return zero + own_loss * 0.0 if bool(torch.isfinite(own_loss)) else zero


def reason_for_own_loss(model: nn.Module) -> str | None:
    """Why the causal loss would be wrong for a model, though its logits may look like those of a causal one."""
    inner = _unwrapped(model)
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


def _shifts(model: nn.Module) -> bool:
    """Whether a model's own loss is one over next tokens; encoder-decoder models shift what they read instead."""
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(model, "loss_type", None) in _SHIFTED_LOSS_TYPES and not is_encoder_decoder


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside of torch's wrappers: compiled modules, DistributedDataParallel and their kind."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        # A user's own model may have a part of that name, and is no wrapper for it.
        if inner is None and type(model).__module__.startswith("torch."):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _no_loss_error(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"There is no loss to train on: {type(model).__name__} {reason}. Put 'labels' into the batches and return logits "
        "(pass compute_loss_func unless they are those of a causal language model), or let the model return a loss."
    )
