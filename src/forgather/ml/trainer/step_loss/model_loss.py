"""ModelLoss: runs the model and computes the loss, by the user's function, the causal loss or the model's own loss.

Without a loss function the choice is made on the first batch (`look`) and adopted by all ranks (`adopt`); it is saved
in the checkpoint and never changes afterwards. The trainers and the evaluator call it, and `TrainingLoss` wraps it.
"""

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
from forgather.ml.trainer.step_loss.known_masks import positions_of
from forgather.ml.trainer.step_loss.loss_traits import UNITS, Rows, Traits, find_traits, looking_only, rows_of
from forgather.ml.trainer.step_loss.model_outputs import logits_of, own_loss_of
from forgather.ml.trainer.step_loss.own_loss import (
    Comparison,
    compared,
    declares_shift,
    reason_for_own_loss,
)
from forgather.ml.trainer.step_loss.smoothing import SmoothedOwnLoss
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
    """Result of a forward pass: logits (or hidden states) for a loss function, or the model's own loss."""

    logits: Tensor | None
    own_loss: Tensor | None
    outputs: object = None
    """Outputs of the model, if they were asked for."""


class Finding(NamedTuple):
    """Result of `ModelLoss.look` on the first batch of a rank."""

    uses_own: bool | None = None
    """Whether to use the model's own loss; None if the first forward pass decides, or a loss function was passed."""
    traits: Traits | None = None
    reason: str = ""
    is_stand_in: bool = False
    """Whether the batch was an EmptyBatch. Findings of other ranks on real batches take precedence."""
    passes_labels: bool = True
    warning: str = ""


class ModelLoss:
    """Loss of a model on a batch, with the choice of the loss if no loss function was passed.

    Without a loss function the loss is chosen as follows:

    1. A model that declares another loss than the causal loss is called with labels, and its own loss is used.
    2. For other models the first batch decides. If the model's own loss differs from the causal loss, it is used.
    3. Otherwise logits of rank 3 get the shifted causal loss, and all other outputs the model's own loss.

    The choice is stored in the checkpoint and stays.
    """

    def __init__(
        self,
        loss_fn: LossFunctionT | None,
        token_weighted: bool,
        step_loss: StepLoss | None = None,
        head: nn.Module | None = None,
        is_default: bool = False,
        smoothing: float = 0.0,
    ) -> None:
        """Wrap a loss function, or None for the choice on the first batch.

        With a `head` the model returns hidden states, which the head would map to logits. `is_default` marks `loss_fn` as
        the causal loss that is the default where the model's own loss cannot be computed, in a pipeline. `smoothing` is the
        label smoothing of a loss that is chosen here.
        """
        self._smoothing = smoothing
        self._smoothed = SmoothedOwnLoss(smoothing)
        self._token_weighted = token_weighted
        self._given_loss = loss_fn
        self._head = head
        self._is_default = is_default
        self._step_loss = step_loss or (None if loss_fn is None else StepLoss(loss_fn, token_weighted, head))
        self._uses_own_loss = False
        self._own_traits = Traits()
        self._passes_labels = True
        self._keeps_old_rule = False
        self.is_on_accelerator = False
        """Whether forward passes run on an accelerator, where reading a value makes the host wait."""

    def unresolved(self) -> "ModelLoss":
        """Return a copy with the same settings on which no loss has been chosen yet."""
        other = ModelLoss(self._given_loss, self._token_weighted, None, self._head, self._is_default, self._smoothing)
        other._keeps_old_rule = self._keeps_old_rule
        other.is_on_accelerator = self.is_on_accelerator
        return other

    def logits(self, forward: Forward) -> Tensor | None:
        """Return the logits of a forward pass; compute them now if the loss used hidden states."""
        if self._step_loss is None or forward.logits is None:
            return forward.logits
        return self._step_loss.logits(forward.logits)

    @property
    def given_loss(self) -> LossFunctionT | None:
        """Loss function that was passed, or made by a factory; None if the loss is chosen on the first batch."""
        return self._given_loss

    @property
    def uses_own(self) -> bool:
        """Whether the loss is the model's own loss."""
        return self._uses_own_loss

    @property
    def token_weighted(self) -> bool:
        return self._token_weighted

    @property
    def can_count(self) -> bool:
        """Whether targets can be counted from labels only, because the loss has been resolved."""
        return self._uses_own_loss or (self._step_loss is not None and self._step_loss.is_resolved)

    def count(self, labels: Any, batch: Mapping[str, Any]) -> Count:
        """Return the number of targets among labels; without usable labels, the number of samples of the batch."""
        if isinstance(batch, EmptyBatch):
            return 0
        if self._step_loss is not None:
            # Do not raise without labels: the forward pass that follows raises a better error.
            return 0 if labels is None else self._step_loss.count(labels)
        if not isinstance(labels, Tensor) or not self._passes_labels:
            return samples_in(batch)
        return self._own_traits.num_targets(labels)

    # --- which loss it is

    def look(self, model: nn.Module, inputs: Mapping[str, Any], labels: Any, is_stand_in: bool = False) -> Finding:
        """Find the loss and its traits by trial runs on a batch, without side effects on the model.

        The loss is not chosen yet: all ranks must `adopt` the same finding.
        """
        # With several ranks, each calls `look` before the first forward pass, and all adopt the same of the gathered
        # findings. Ranks with different losses would count targets differently and reach different collectives. A
        # single process calls it from `forward`. The trials cost a few forward passes, once per process.
        inner = unwrap_model(model)
        if self._step_loss is not None:
            return self._look_at_function(model, inputs, labels, is_stand_in)
        reason = reason_for_own_loss(inner) or ("the batch has no labels" if labels is None else None)
        if reason is not None:
            return self._own_finding(inner, inputs, labels, f"since {reason}", is_stand_in)
        comparison = compared(inner, inputs, labels)
        if not comparison.takes_labels:
            return self._look_without_labels(inner, inputs, is_stand_in)
        # A run of an older version was trained with the causal loss. Continue with it, but warn.
        if self._keeps_old_rule and comparison.differs and comparison.causal is not None:
            return Finding(False, None, "as in the checkpoint", is_stand_in, warning=_kept_loss(inner, comparison))
        if comparison.differs:
            return self._own_finding(inner, inputs, labels, f"since {comparison}", is_stand_in)
        if comparison.causal is None:
            return Finding(is_stand_in=is_stand_in, warning=_unasked(inner, comparison))
        reason = "since the model returns logits of rank 3, and its own loss is the same"
        return Finding(False, None, reason, is_stand_in, warning=_unasked(inner, comparison))

    def adopt(self, finding: Finding) -> None:
        """Choose the loss by this finding, which may come from another rank."""
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

    def assume(self, traits: Traits, reason: str) -> None:
        """Count targets by these traits without a trial: the caller computes the loss itself."""
        self._use_own(traits, reason)

    def _look_at_function(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: object, is_stand_in: bool
    ) -> Finding:
        assert self._step_loss is not None
        if self._step_loss.is_resolved or not isinstance(labels, Tensor):
            return Finding(is_stand_in=is_stand_in)
        # The trials call the loss function on these logits only; the model itself runs once.
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
            # Without a tensor of labels, samples are the targets. The trial then shows only whether the loss is a sum;
            # float labels skip the trials of positions.
            tried = labels if has_labels else torch.zeros(num_rows)
            return Finding(
                True, find_traits(loss_of, tried, declared), reason, is_stand_in, passes_labels=labels is not None
            )

    def _look_without_labels(self, inner: nn.Module, inputs: Mapping[str, Any], is_stand_in: bool) -> Finding:
        """Look at a model that accepts no labels; it may still compute a loss from its inputs."""
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
        self._uses_own_loss = False
        self._step_loss = StepLoss(CausalLoss(label_smoothing=self._smoothing), self._token_weighted)
        logger.info("Loss: shifted causal cross entropy, %s.", reason)

    # --- in the checkpoint

    def state_dict(self) -> dict[str, Any] | None:
        """Return the chosen loss; None if a loss function was passed, or no loss is chosen yet."""
        if self._uses_own_loss:
            return {"own": True, **self._own_traits._asdict()}
        is_causal = self._is_default or (self._given_loss is None and self._step_loss is not None)
        return {"own": False, **Traits(first_counts=False)._asdict()} if is_causal else None

    def check_state_dict(self, state: dict[str, Any] | None) -> None:
        """Raise `CheckpointLoadError` if the run cannot continue with the loss of the checkpoint."""
        if self._is_default and state is not None and state["own"]:
            raise CheckpointLoadError.misfit(
                "The run of this checkpoint trains on the model's own loss, but a pipeline computes the loss from the logits "
                "of the last stage. Pass compute_loss_func, a function of (logits, labels), or continue with Trainer or "
                "DDPTrainer."
            )

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue with the loss of a checkpoint; a loss function that was passed now takes precedence."""
        if self._given_loss is not None or state is None:
            return
        traits = Traits(*(state[name] for name in Traits._fields))
        if state["own"]:
            self._use_own(traits, "as in the checkpoint")
        else:
            self._use_causal("as in the checkpoint")

    def keep_old_rule(self) -> None:
        """Continue from an old checkpoint without a loss entry; then all logits of rank 3 had the causal loss."""
        self._keeps_old_rule = True
        if self._given_loss is None:
            self._uses_own_loss, self._step_loss = False, None

    # --- the loss

    def forward(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: Any, is_empty: bool = False, keeps: bool = False
    ) -> Forward:
        """Run the model on a batch on its device; the first call chooses the loss.

        `is_empty` if it is an EmptyBatch. `keeps` returns the outputs too, which training would hold in memory.
        """
        if not self.is_on_accelerator:
            return self._forward(model, inputs, labels, is_empty, keeps)
        with positions_of(model, inputs):
            return self._forward(model, inputs, labels, is_empty, keeps)

    def outputs(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Run the model on a batch without labels and return its outputs, without a loss function."""
        if not self.is_on_accelerator:
            return model(**inputs)
        with positions_of(model, inputs):
            return model(**inputs)

    def _forward(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: Any, is_empty: bool, keeps: bool
    ) -> Forward:
        # Still undecided only in a single process, or if no rank found the loss on its first batch.
        if self._step_loss is None and not self._uses_own_loss and self._passes_labels:
            self.adopt(self.look(model, inputs, labels, is_empty))
        if self._uses_own_loss:
            return self._own_forward(model, inputs, labels, is_empty, keeps)
        outputs = model(**inputs) if self._head is None else model(**inputs, return_hidden_states=True)
        logits = logits_of(outputs)
        if self._step_loss is None:
            # The trial was not conclusive, for example because it raised. The rank of the logits decides.
            if logits is None or logits.ndim != 3:
                self._refuse_without_loss(model)
                return self._own_forward(model, inputs, labels, is_empty, keeps)
            self._use_causal("since the model returns logits of rank 3")
        if logits is None:
            raise _no_loss_error(model, "returned no logits for the loss function")
        if labels is None:
            raise _no_loss_error(model, "got a batch without 'labels', which the loss function needs")
        assert self._step_loss is not None
        if not self._step_loss.is_resolved:
            self.resolve(logits, labels)
        return Forward(logits, None, outputs if keeps and self._head is None else None)

    def resolve(self, logits: Tensor, labels: Tensor) -> None:
        """Find the traits of the loss function on logits and labels, unless they are known."""
        if self._step_loss is None:
            self._use_causal("since it was called with logits and labels")
        assert self._step_loss is not None
        if not self._step_loss.is_resolved:
            self._step_loss.resolve(logits, labels)

    def _with_keywords(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return inputs if self._head is None else {**inputs, "return_hidden_states": True}

    def share(self, forward: Forward, labels: Tensor | None, count: Count, total: Count, num_shares: int) -> Tensor:
        """Return the share of a micro-batch in the loss of its step; `num_shares` is the step's number of micro-batches."""
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
            # Always a new tensor: CUDA graphs overwrite the tensors they returned when they run again.
            share = forward.own_loss.clone() if count is total else forward.own_loss * (count / total)
        return share if isinstance(count, int) else zero_without_targets(share, count, forward.logits)

    def mean(self, forward: Forward, labels: Tensor | None, count: Count) -> Tensor:
        """Return the mean over the targets of a batch, as reported by evaluations."""
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

    def _own_forward(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: object, is_empty: bool, keeps: bool
    ) -> Forward:
        if not self._passes_labels:
            labels = None
        if is_empty and isinstance(labels, Tensor) and not labels.is_floating_point():
            # Class 0 instead of -100, so that the loss is finite. Its weight in the step is zero.
            labels = labels.clamp(min=0)
        outputs = model(**inputs) if labels is None else model(**inputs, labels=labels)
        loss = own_loss_of(outputs)
        if loss is None:
            reason = "got a batch without 'labels'" if labels is None else "computes no loss from labels"
            raise _no_loss_error(model, f"{reason}, and returned no 'loss'")
        if loss.numel() != 1:
            raise ValueError(
                f"The loss of {type(unwrap_model(model)).__name__} has the shape {tuple(loss.shape)}, but training needs one "
                "number. Return the mean over the samples."
            )
        logits = logits_of(outputs)
        if self._smoothing:
            loss = self._smoothed.of(unwrap_model(model), logits, labels, loss, self._own_traits)
        return Forward(logits, loss, outputs if keeps else None)


def _nothing(own_loss: Tensor, logits: Tensor | None) -> Tensor:
    """Return a zero that depends on everything the loss depends on, so that backward gives zero gradients."""
    if logits is None:
        return torch.nan_to_num(own_loss) * 0.0
    zero = logits.sum() * 0.0
    # A mean over no targets is NaN, and NaN * 0.0 would put NaN into the gradients.
    return zero + own_loss * 0.0 if bool(torch.isfinite(own_loss)) else zero


def _kept_loss(model: nn.Module, comparison: Comparison) -> str:
    return (
        f"This run continues with shifted causal cross entropy, as started by an earlier version, but it is not the own loss "
        f"of {type(model).__name__}: {comparison}. To train on the model's own loss, start a new run from these weights: load "
        "them in model_init, with another output_dir."
    )


def _unasked(model: nn.Module, comparison: Comparison) -> str:
    """Return a warning that the trial of the model's own loss failed; empty if it did not."""
    # A model that computes no loss is not a problem: there is nothing to compare.
    problem = comparison.problem
    if comparison.own is not None and comparison.causal is not None and not math.isfinite(comparison.own):
        problem = f"it is {comparison.own}"
    if not problem:
        return ""
    return (
        f"The own loss of {type(model).__name__} could not be computed on the first batch ({problem}), so it is not used if "
        "the logits have three dimensions. Pass compute_loss_func to choose the loss."
    )


def _no_loss_error(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"There is no loss to train on: {type(model).__name__} {reason}. Put 'labels' into the batches and return logits "
        "(with compute_loss_func, unless it is a causal language model), or let the model return a loss."
    )
