"""From a batch to its loss: by the user's function, by the causal loss, or by what the model computes itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.rng import RNGState
from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.loss_weighting import IGNORE_INDEX, StepLoss, logits_of, own_loss_of
from forgather.ml.trainer.trainer_types import LossFunctionT

Count = int | Tensor


@dataclass
class Window:
    """The micro-batches of one step; its targets are counted before the first backward pass."""

    batches: list[Mapping[str, Any]]
    counts: list[Count] = field(default_factory=list)
    total: Count | None = None
    """Targets of the whole step, over all micro-batches and data-parallel ranks."""


class Forward(NamedTuple):
    """What a forward pass gave: logits for a loss function, or the model's own loss."""

    logits: Tensor | None
    own_loss: Tensor | None


class ModelLoss:
    """Runs the model and computes losses.

    Without a loss function the first batch decides: logits of rank 3 get the shifted causal loss; any other model is
    called with its labels, and its own loss is used.
    """

    def __init__(self, loss_fn: LossFunctionT | None, token_weighted: bool) -> None:
        self._token_weighted = token_weighted
        self._step_loss = None if loss_fn is None else StepLoss(loss_fn, token_weighted)
        self._uses_own_loss = False

    @property
    def can_count(self) -> bool:
        """Whether targets can be counted before the model has been seen at work."""
        return self._uses_own_loss or (self._step_loss is not None and self._step_loss.is_resolved)

    def count(self, labels: Tensor | None, num_samples: int) -> Count:
        """The number of targets among labels; samples count where there are no labels to tell."""
        if self._step_loss is not None:
            # Without labels the forward pass that follows explains what is missing.
            return 0 if labels is None else self._step_loss.count(labels)
        if labels is None or labels.is_floating_point():
            return num_samples
        number = (labels != IGNORE_INDEX).sum()
        return int(number) if number.device.type == "cpu" else number

    def forward(self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor | None) -> Forward:
        """Run the model on a batch that is on its device."""
        if self._step_loss is None and not self._uses_own_loss:
            return self._first_forward(model, inputs, labels)
        if self._uses_own_loss:
            return self._own_forward(model, inputs, labels)
        logits = logits_of(model(**inputs))
        if logits is None:
            raise _no_loss_error(model, "returned no logits for the loss function")
        if labels is None:
            raise _no_loss_error(model, "got a batch without 'labels', which the loss function needs")
        assert self._step_loss is not None
        if not self._step_loss.is_resolved:
            self._step_loss.resolve(logits, labels)
        return Forward(logits, None)

    def share(self, forward: Forward, labels: Tensor | None, count: Count, total: Count, num_micro: int) -> Tensor:
        """The part of the step's loss that this micro-batch makes."""
        if self._step_loss is not None:
            assert forward.logits is not None and labels is not None
            return self._step_loss.share(forward.logits, labels, count, total, num_micro)
        assert forward.own_loss is not None
        if isinstance(count, int) and count == 0:
            return torch.nan_to_num(forward.own_loss) * 0.0 if forward.logits is None else forward.logits.sum() * 0.0
        if not self._token_weighted:
            return forward.own_loss / num_micro
        return forward.own_loss if count is total else forward.own_loss * (count / total)

    def _first_forward(self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor | None) -> Forward:
        if labels is not None:
            generators = RNGState()
            before = generators.state_dict()
            logits = logits_of(model(**inputs))
            if logits is not None and logits.ndim == 3:
                self._step_loss = StepLoss(CausalLoss(), self._token_weighted)
                return Forward(logits, None)
            # The model runs again, with its labels: it must draw the same random numbers as if it ran once.
            generators.load_state_dict(before)
        self._uses_own_loss = True
        return self._own_forward(model, inputs, labels)

    def _own_forward(self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor | None) -> Forward:
        outputs = model(**inputs) if labels is None else model(**inputs, labels=labels)
        loss = own_loss_of(outputs)
        if loss is None:
            reason = "got a batch without 'labels'" if labels is None else "computes no loss of its own from labels"
            raise _no_loss_error(model, f"{reason}, and returned no 'loss'")
        return Forward(logits_of(outputs), loss)


def _no_loss_error(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"There is no loss to train on: {type(model).__name__} {reason}. Put 'labels' into the batches and return logits "
        "(pass compute_loss_func unless they are those of a causal language model), or let the model return a loss."
    )
