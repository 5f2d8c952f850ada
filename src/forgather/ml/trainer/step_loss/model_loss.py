"""From a batch to its loss: by the user's function, by the causal loss, or by what the model computes itself."""

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.state_schema import Schema, flag, optional, that
from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.loop.window import samples_in
from forgather.ml.trainer.setup.model_modes import set_train
from forgather.ml.trainer.step_loss.loss_traits import UNITS, Rows, Traits, find_traits, looking_only, rows_of
from forgather.ml.trainer.step_loss.model_outputs import logits_of, own_loss_of
from forgather.ml.trainer.step_loss.own_loss import (
    Comparison,
    compared,
    declares_shift,
    reason_for_own_loss,
)
from forgather.ml.trainer.step_loss.token_weighting import StepLoss, zero_without_targets
from forgather.ml.trainer.trainer_types import LossFunctionT
from forgather.ml.utils import unwrap_model

__all__ = ["Finding", "Forward", "ModelLoss", "reason_for_own_loss"]

logger = logging.getLogger(__name__)

Count = int | Tensor

LOSS_STATE = optional(
    Schema(
        {
            "own": flag,
            "first_counts": flag,
            "unit": that(f"one of {', '.join(UNITS)}", lambda value: type(value) is str and value in UNITS),
            "is_sum": flag,
        }
    )
)


class Forward(NamedTuple):
    """What a forward pass gave: logits (or hidden states) for a loss function, or the model's own loss."""

    logits: Tensor | None
    own_loss: Tensor | None


class Finding(NamedTuple):
    """What a rank learned of the loss from its first batch."""

    uses_own: bool | None = None
    """None if the first forward pass will tell, or the loss was given."""
    traits: Traits | None = None
    reason: str = ""
    is_stand_in: bool = False
    """Whether the batch was none, so that any other rank knows better."""
    passes_labels: bool = True
    warning: str = ""


class ModelLoss:
    """Runs the model and computes losses.

    Without a loss function the model decides: one that is known to need another loss than the causal one is called with
    its labels, and its own loss is used. Of the others the first batch tells: a loss that the model computes from the
    labels, and that differs from the causal one, is kept; else logits of rank 3 get the shifted causal loss, everything
    else the model's own. The choice is in the checkpoint, and stays.
    """

    def __init__(
        self,
        loss_fn: LossFunctionT | None,
        token_weighted: bool,
        step_loss: StepLoss | None = None,
        head: nn.Module | None = None,
        is_default: bool = False,
    ) -> None:
        """With a `head` the model gives hidden states, of which the head would make logits.

        `is_default` says that `loss_fn` is the causal loss, for want of another, where the model's own cannot be computed.
        """
        self._token_weighted = token_weighted
        self._given_loss = loss_fn
        self._head = head
        self._is_default = is_default
        self._step_loss = step_loss or (None if loss_fn is None else StepLoss(loss_fn, token_weighted, head))
        self._uses_own_loss = False
        self._own_traits = Traits()
        self._passes_labels = True
        self._keeps_old_rule = False

    def unresolved(self) -> "ModelLoss":
        """Another one that has yet to see the model at work."""
        other = ModelLoss(self._given_loss, self._token_weighted, head=self._head, is_default=self._is_default)
        other._keeps_old_rule = self._keeps_old_rule
        return other

    def logits(self, forward: Forward) -> Tensor | None:
        """The logits of a forward pass, computed now if the loss did without them."""
        if self._step_loss is None or forward.logits is None:
            return forward.logits
        return self._step_loss.logits(forward.logits)

    @property
    def given_loss(self) -> LossFunctionT | None:
        """The loss function that was given, or made by a factory; None if the model decides."""
        return self._given_loss

    @property
    def uses_own(self) -> bool:
        """Whether the loss is the one that the model computes from its labels."""
        return self._uses_own_loss

    @property
    def token_weighted(self) -> bool:
        return self._token_weighted

    @property
    def can_count(self) -> bool:
        """Whether targets can be counted before the model has been seen at work."""
        return self._uses_own_loss or (self._step_loss is not None and self._step_loss.is_resolved)

    def count(self, labels: Any, batch: Mapping[str, Any]) -> Count:
        """The number of targets among labels; the batch's samples count where there are no labels to tell."""
        if isinstance(batch, EmptyBatch):
            return 0
        if self._step_loss is not None:
            # Without labels the forward pass that follows explains what is missing.
            return 0 if labels is None else self._step_loss.count(labels)
        if not isinstance(labels, Tensor) or not self._passes_labels:
            return samples_in(batch)
        return self._own_traits.num_targets(labels)

    # --- which loss it is

    def look(self, model: nn.Module, inputs: Mapping[str, Any], labels: Any, is_stand_in: bool = False) -> Finding:
        """Find out from a batch which loss it is and what it counts, without a trace in the model.

        Nothing is decided by it: ranks must `adopt` the same.
        """
        inner = unwrap_model(model)
        if self._step_loss is not None:
            return self._look_at_function(model, inputs, labels, is_stand_in)
        reason = reason_for_own_loss(inner) or ("there are no labels for another" if labels is None else None)
        if reason is not None:
            return self._own_finding(inner, inputs, labels, f"since {reason}", is_stand_in)
        comparison = compared(inner, inputs, labels)
        if not comparison.takes_labels:
            return self._look_without_labels(inner, inputs, is_stand_in)
        if self._keeps_old_rule and comparison.differs and comparison.causal is not None:
            return Finding(False, None, "as in the checkpoint", is_stand_in, warning=_kept_loss(inner, comparison))
        if comparison.differs:
            return self._own_finding(inner, inputs, labels, f"since {comparison}", is_stand_in)
        if comparison.causal is None:
            return Finding(is_stand_in=is_stand_in, warning=_unasked(inner, comparison))
        reason = "since the model returns logits of rank 3, and its own loss is the same"
        return Finding(False, None, reason, is_stand_in, warning=_unasked(inner, comparison))

    def adopt(self, finding: Finding) -> None:
        """Decide by what was found, on this rank or another."""
        if finding.warning:
            logger.warning("%s", finding.warning)
        self._passes_labels = finding.passes_labels
        if self._step_loss is not None:
            if finding.traits is not None and not self._step_loss.is_resolved:
                self._step_loss.adopt(finding.traits)
        elif finding.uses_own:
            self._use_own(finding.traits or Traits(), finding.reason)
        elif finding.uses_own is False:
            self._use_causal(finding.reason)

    def _look_at_function(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: object, is_stand_in: bool
    ) -> Finding:
        assert self._step_loss is not None
        if self._step_loss.is_resolved or not isinstance(labels, Tensor):
            return Finding(is_stand_in=is_stand_in)
        with looking_only(model), set_train(model, False):
            logits = logits_of(model(**self._with_keywords(inputs)))
        if logits is None:
            return Finding(is_stand_in=is_stand_in)
        return Finding(None, self._step_loss.found(logits, labels), is_stand_in=is_stand_in)

    def _own_finding(
        self, inner: nn.Module, inputs: Mapping[str, Any], labels: Any, reason: str, is_stand_in: bool
    ) -> Finding:
        declared = Traits(first_counts=not declares_shift(inner))
        if self._keeps_old_rule:
            return Finding(True, declared, reason, is_stand_in)
        has_labels = isinstance(labels, Tensor)
        num_rows = len(labels) if has_labels and labels.ndim else samples_in(inputs)

        def loss_of(rows: Rows, target: Tensor) -> Tensor | None:
            part = rows_of(inputs, rows, num_rows)
            return own_loss_of(inner(**part, labels=target) if has_labels else inner(**part))

        with looking_only(inner), set_train(inner, False):
            # Where labels say nothing of targets, samples do, and of those it is found out whether the loss is a sum.
            tried = labels if has_labels else torch.zeros(num_rows)
            return Finding(
                True, find_traits(loss_of, tried, declared), reason, is_stand_in, passes_labels=labels is not None
            )

    def _look_without_labels(self, inner: nn.Module, inputs: Mapping[str, Any], is_stand_in: bool) -> Finding:
        """At a model that takes no labels; it may still compute a loss of something else."""
        with looking_only(inner), set_train(inner, False):
            outputs = inner(**inputs)
        logits = logits_of(outputs)
        if logits is not None and logits.ndim == 3:
            return Finding(False, None, "since the model returns logits of rank 3", is_stand_in)
        if own_loss_of(outputs) is None:
            return Finding(is_stand_in=is_stand_in, passes_labels=False)
        reason = "since it takes no labels, and there are no logits of rank 3"
        return self._own_finding(inner, inputs, None, reason, is_stand_in)

    def _use_own(self, traits: Traits, reason: str) -> None:
        self._uses_own_loss, self._own_traits, self._step_loss = True, traits, None
        logger.info("Loss: the model's own, %s.", reason)

    def _use_causal(self, reason: str) -> None:
        self._uses_own_loss, self._step_loss = False, StepLoss(CausalLoss(), self._token_weighted)
        logger.info("Loss: shifted causal cross entropy, %s.", reason)

    # --- in the checkpoint

    def state_dict(self) -> dict[str, Any] | None:
        """Which loss was chosen; None if it was given, or is not chosen yet."""
        if self._uses_own_loss:
            return {"own": True, **self._own_traits._asdict()}
        is_causal = self._is_default or (self._given_loss is None and self._step_loss is not None)
        return {"own": False, **Traits(first_counts=False)._asdict()} if is_causal else None

    def check_state_dict(self, state: dict[str, Any] | None) -> None:
        """Raise a `CheckpointLoadError` where a run cannot go on with the loss that it had."""
        if self._is_default and state is not None and state["own"]:
            raise CheckpointLoadError.misfit(
                "The run of this checkpoint trains on the loss that the model computes itself, but in a pipeline the loss is "
                "computed from the logits of the last stage. Pass compute_loss_func, a function of (logits, labels), or go on "
                "with Trainer or DDPTrainer."
            )

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on with the loss of a checkpoint; one that was given now is used in any case."""
        if self._given_loss is not None or state is None:
            return
        traits = Traits(*(state[name] for name in Traits._fields))
        if state["own"]:
            self._use_own(traits, "as in the checkpoint")
        else:
            self._use_causal("as in the checkpoint")

    def keep_old_rule(self) -> None:
        """Go on from a checkpoint that does not tell the loss: all logits of rank 3 had the causal one."""
        self._keeps_old_rule = True
        if self._given_loss is None:
            self._uses_own_loss, self._step_loss = False, None

    # --- the loss

    def forward(self, model: nn.Module, inputs: Mapping[str, Any], labels: Any, is_empty: bool = False) -> Forward:
        """Run the model on a batch that is on its device; `is_empty` if it only stands in for one."""
        if self._step_loss is None and not self._uses_own_loss and self._passes_labels:
            self.adopt(self.look(model, inputs, labels, is_empty))
        if self._uses_own_loss:
            return self._own_forward(model, inputs, labels, is_empty)
        outputs = model(**inputs) if self._head is None else model(**inputs, return_hidden_states=True)
        logits = logits_of(outputs)
        if self._step_loss is None:
            if logits is None or logits.ndim != 3:
                self._refuse_without_loss(model)
                return self._own_forward(model, inputs, labels, is_empty)
            self._use_causal("since the model returns logits of rank 3")
        if logits is None:
            raise _no_loss_error(model, "returned no logits for the loss function")
        if labels is None:
            raise _no_loss_error(model, "got a batch without 'labels', which the loss function needs")
        assert self._step_loss is not None
        if not self._step_loss.is_resolved:
            self.resolve(logits, labels)
        return Forward(logits, None)

    def resolve(self, logits: Tensor, labels: Tensor) -> None:
        """Find out from logits and labels what the loss function counts, unless that is known."""
        if self._step_loss is None:
            self._use_causal("since it was called with logits and labels")
        assert self._step_loss is not None
        if not self._step_loss.is_resolved:
            self._step_loss.resolve(logits, labels)

    def _with_keywords(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return inputs if self._head is None else {**inputs, "return_hidden_states": True}

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
        elif self._own_traits.is_sum:
            share = forward.own_loss.clone()
        else:
            # A new tensor in any case: CUDA graphs write into those that they returned when they run again.
            share = forward.own_loss.clone() if count is total else forward.own_loss * (count / total)
        return share if isinstance(count, int) else zero_without_targets(share, count, forward.logits)

    def mean(self, forward: Forward, labels: Tensor | None, count: Count) -> Tensor:
        """The mean over the targets of a batch, as evaluations report it."""
        total = self.share(forward, labels, count, count, 1)
        if self._step_loss is not None:
            return self._step_loss.mean(total, count)
        is_sum = self._own_traits.is_sum
        return total / (max(count, 1) if isinstance(count, int) else count.clamp(min=1)) if is_sum else total

    def _refuse_without_loss(self, model: nn.Module) -> None:
        if not self._passes_labels:
            raise _no_loss_error(model, "takes no labels, and returned neither logits of rank 3 nor a 'loss'")
        self._use_own(
            Traits(first_counts=not declares_shift(unwrap_model(model))), "since there are no logits of rank 3"
        )

    def _own_forward(self, model: nn.Module, inputs: Mapping[str, Any], labels: object, is_empty: bool) -> Forward:
        if not self._passes_labels:
            labels = None
        if is_empty and isinstance(labels, Tensor) and not labels.is_floating_point():
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


def _kept_loss(model: nn.Module, comparison: Comparison) -> str:
    return (
        f"This run goes on with shifted causal cross entropy, with which an earlier version began it, but it is not the loss "
        f"that {type(model).__name__} computes itself: {comparison}. To train on the model's own, begin a new run from these "
        "weights: load them in model_init, with another output_dir."
    )


def _unasked(model: nn.Module, comparison: Comparison) -> str:
    """Nothing, if the model computes no loss: that is no problem."""
    problem = comparison.problem
    if comparison.own is not None and comparison.causal is not None and not math.isfinite(comparison.own):
        problem = f"it is {comparison.own}"
    if not problem:
        return ""
    return (
        f"Whether {type(model).__name__} has a loss of its own could not be found out on the first batch ({problem}), so that "
        "it is not used where its logits have three dimensions. Pass compute_loss_func to choose the loss."
    )


def _no_loss_error(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"There is no loss to train on: {type(model).__name__} {reason}. Put 'labels' into the batches and return logits "
        "(pass compute_loss_func unless they are those of a causal language model), or let the model return a loss."
    )
