"""MicroStep: the weight of one micro-batch with an overridden loss, in the loss of its step.

A loss that used `num_items_in_batch` is a share of the step already. Any other loss is the mean of its micro-batch and
is weighted by its targets, or by its samples without labels. So accumulation and ranks do not change the maths. The
engine creates one for each micro-batch, and `accelerator.backward` applies it.
"""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forgather.hf.engine.num_items import NumItems, Use, used

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


class MicroStep:
    """Weight of the current micro-batch, and the sum of the losses that were propagated backwards."""

    def __init__(self, engine: "Trainer[Any]", labels: Any, is_scaled: bool | None) -> None:
        """`is_scaled` is `loss_is_scaled_for_ga`: whether losses are shares of the step. None: found by their use."""
        self._engine = engine
        self.labels = labels
        self._is_scaled = is_scaled
        self.use = Use()
        self.reads_processes = False
        """Whether the number of processes was read, to undo the average of gradients over ranks."""
        self.computed: Tensor | None = None
        """Last result of compute_loss, to recognise a division by gradient_accumulation_steps."""
        self._gave_mean = False
        self._gave_number = False
        self.num_backwards = 0
        self.share: Tensor | None = None
        """Share of the step's loss, detached; None until a backward pass."""

    @property
    def num_items(self) -> NumItems | None:
        """Targets of the full step over all micro-batches and ranks; None without labels."""
        window = self._engine.window
        if self.labels is None or window is None:
            return None
        if window.total is None:
            self._engine.feed.count(window)
        assert window.total is not None
        self._gave_number = True
        return NumItems.of(window.total, self._engine.device, self.use)

    def note_labels(self, labels: Any) -> None:
        """Take over labels that `_prepare_inputs` has changed; raise ValueError if that makes the weights wrong."""
        window = self._engine.window
        if labels is None or labels is self.labels or window is None or window.is_stand_in:
            return
        if window.total is None:
            self._engine.feed.count(window)
        before, after = int(window.count), int(self._engine.step_loss.count(labels, {"labels": labels}))
        self.labels = labels
        if before == after:
            return
        if window.num_shares > 1 or self._gave_number:
            raise ValueError(_changed_labels(before, after))
        # The only micro-batch of the step: its targets are all targets.
        window.counts[window.number] = window.total = after

    def own_loss(self, mean: Tensor, num_items: NumItems) -> Tensor:
        """Return the result of the facade's compute_loss for an override that called it with `num_items_in_batch`.

        It is the mean, so that a penalty that the override adds is weighted with it. It is a share of the step if the
        override has said so, or has divided another loss before.
        """
        if self._is_scaled or (self._is_scaled is None and self.use.was_made):
            used(num_items)
            return self.share_of(mean)
        self._gave_mean = True
        return mean

    def share_of(self, mean: Tensor) -> Tensor:
        """Return the share of a mean over this micro-batch in the step's loss, without the factor of the ranks."""
        loss_fn = self._engine.loss_fn
        weighted: Tensor = loss_fn.rescale(mean, self.labels)
        return weighted if loss_fn.scale_factor == 1 else weighted / loss_fn.scale_factor

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the loss to propagate backwards: the share of the micro-batch times the factor of the strategy."""
        engine, loss = self._engine, self._undivided(loss)
        is_share = self.use.was_made if self._is_scaled is None else self._is_scaled
        if self._gave_mean and self._is_scaled is None and is_share:
            raise ValueError(
                "compute_loss divides one loss by num_items_in_batch and adds the result of super().compute_loss, which is the "
                "mean of the micro-batch. Set loss_is_scaled_for_ga = True in the class of the trainer. super().compute_loss "
                "then returns a share of the step too."
            )
        if not is_share:
            weighted: Tensor = engine.loss_fn.rescale(loss, self.labels)
            return weighted
        engine.loss_fn.was_used = True
        window = engine.window
        if self._is_scaled is None and window is not None and (len(window) > 1 or engine.team.size > 1):
            _log_once_of_share()
        if window is not None and window.is_stand_in:
            return torch.nan_to_num(loss) * 0.0
        factor: float = engine.loss_fn.scale_factor
        if not self.reads_processes or factor == 1:
            return loss * factor
        # An override that multiplies by accelerator.num_processes has applied the factor itself, as transformers needs.
        _log_once_of_processes(factor)
        return loss

    def propagate(self, loss: Tensor) -> None:
        """Run the backward pass of a loss, weighted, and record its share."""
        weighted = self.weighted(loss)
        self._engine._backward(weighted)
        self.num_backwards += 1
        self.share = weighted.detach() if self.share is None else self.share + weighted.detach()

    def _undivided(self, loss: Tensor) -> Tensor:
        """Return the loss before a division by gradient_accumulation_steps in an overridden training_step."""
        steps, window = self._engine.args.gradient_accumulation_steps, self._engine.window
        computed, division = self.computed, loss.grad_fn
        if steps == 1 or computed is None or computed is loss or type(division).__name__ != "DivBackward0":
            return loss
        assert division is not None
        divisor = getattr(division, "_saved_other", None)
        # Only numbers on the CPU: a divisor on an accelerator is no constant, and reading it would block.
        if not isinstance(divisor, Tensor) or divisor.device.type != "cpu" or divisor.numel() != 1:
            return loss
        # The last step of an epoch may have fewer micro-batches, and scripts may divide by their number.
        numbers = (steps, steps if window is None else len(window))
        if division.next_functions[0][0] is not computed.grad_fn or float(divisor) not in numbers:
            return loss
        _warn_once_of_division(steps)
        return computed


_has_warned: set[str] = set()


def _warn_once_of_division(steps: int) -> None:
    if "division" not in _has_warned:
        _has_warned.add("division")
        logger.warning(
            "training_step divides the loss by gradient_accumulation_steps=%d. The division is undone, because micro-batches "
            "are weighted by their targets. Remove it from training_step.",
            steps,
        )


def _log_once_of_processes(number: float) -> None:
    if "processes" not in _has_warned:
        _has_warned.add("processes")
        logger.warning(
            "The loss reads accelerator.num_processes, so it is taken as multiplied by the number of processes (%g), which "
            "transformers needs to undo the average of gradients. If the number has another purpose, read "
            "self.args.world_size instead.",
            number,
        )


def _changed_labels(before: int, after: int) -> str:
    return (
        f"_prepare_inputs changes the number of targets of a micro-batch from {before} to {after}, but micro-batches are "
        "weighted by the labels of the loader, before _prepare_inputs. Change the labels in the data_collator instead."
    )


def _log_once_of_share() -> None:
    if "share" not in _has_warned:
        _has_warned.add("share")
        logger.warning(
            "compute_loss uses num_items_in_batch, so its loss is taken as divided by that number. If it is the mean of a "
            "micro-batch, and only reads the number, set loss_is_scaled_for_ga = False in the class of the trainer. True "
            "confirms the division."
        )


def warn_once_of_direct_backward() -> None:
    """Warn that a training_step calls loss.backward() itself."""
    if "direct" not in _has_warned:
        _has_warned.add("direct")
        logger.warning(
            "training_step does not call self.accelerator.backward(loss), so micro-batches and ranks are not weighted by their "
            "targets, and the gradients of micro-batches add up. Call self.accelerator.backward(loss) instead of "
            "loss.backward()."
        )
