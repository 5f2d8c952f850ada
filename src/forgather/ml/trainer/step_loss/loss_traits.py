"""Loss traits: which labels a loss counts as targets, and whether it is a mean over targets, labels or samples, or a sum.

`find_traits` determines them by calling the loss with modified labels. `StepLoss` and `ModelLoss` call it on the first
batch, inside `looking_only`: a trial changes no gradients, random state or buffers.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.state.rng import undisturbed_random_numbers

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100

Rows = list[int] | None
LossOf = Callable[[Rows, Tensor], Tensor | None]
"""Function of (rows, labels): the loss of these rows of a batch (None: all rows) with other labels, or None."""

UNITS = ("targets", "labels", "rows")

_CLOSE = 1e-3
_MASKABLE = (torch.int8, torch.int16, torch.int32, torch.int64)


class Traits(NamedTuple):
    """Properties of a loss that determine the weight of a micro-batch."""

    first_counts: bool = True
    """Whether the first position of a sequence is a target. It is not for causal losses, which shift the labels."""
    unit: str = "targets"
    """Unit of the mean: "targets" (labels other than -100), "labels" (all labels) or "rows" (samples)."""
    is_sum: bool = False
    """Whether the loss is a sum over its unit instead of a mean."""

    def num_targets(self, labels: Tensor) -> int | Tensor:
        """Return the number of targets among labels; a tensor only if the labels are on an accelerator."""
        # An int from an accelerator would make the host wait for the device.
        if labels.ndim == 0:
            return 1
        if self.unit == "rows" or labels.is_floating_point() or labels.is_complex():
            return len(labels)
        if self.unit == "labels":
            return labels.numel()
        number = (labels if self.first_counts or labels.ndim < 2 else labels[:, 1:]) != IGNORE_INDEX
        return int(number.sum()) if number.device.type == "cpu" else number.sum()

    @property
    def code(self) -> int:
        """All traits encoded as one integer, for messages between ranks."""
        return int(self.first_counts) + 2 * int(self.is_sum) + 4 * UNITS.index(self.unit)

    @classmethod
    def of_code(cls, code: int) -> "Traits":
        return cls(bool(code & 1), UNITS[code >> 2], bool(code & 2))


def find_traits(loss_of: LossOf, labels: Tensor, expected: Traits | None = None, normalises: bool = False) -> Traits:
    """Return the traits of a loss, determined by trials with modified labels and with single rows of a batch.

    `expected` is returned where a trial is not possible. `normalises` is for a loss that divides by a given number of
    targets: its divisor is known and not tried.
    """
    expected = expected or Traits()
    if labels.ndim == 0 or labels.numel() == 0:
        return expected
    with undisturbed_random_numbers(), torch.no_grad():
        traits = _positions(loss_of, labels, expected) if labels.dtype in _MASKABLE else Traits()
        return traits if normalises else _divisor(loss_of, labels, traits)


def _positions(loss_of: LossOf, labels: Tensor, expected: Traits) -> Traits:
    """Return which positions count, from trials with some labels set to `IGNORE_INDEX`."""
    # Every trial is compared with the loss over no targets, which is zero or NaN. Trials are not compared with each
    # other: with a head of zeros all positions have the same loss.
    # The valid class is 0, because losses that clamp negative labels turn -100 into 0. Both trials are then equal.
    valid = torch.zeros_like(labels)
    ignored = torch.full_like(labels, IGNORE_INDEX)
    has_positions = labels.ndim > 1
    of_all, of_nothing = _value(loss_of, None, valid), _value(loss_of, None, ignored)
    if of_all is None:
        return expected
    if math.isnan(of_all):
        # NaN is a mean over no targets. With sequences of one position this shows a causal loss, which shifts it away.
        return Traits(first_counts=False) if has_positions and labels.shape[1] == 1 else expected
    if of_nothing is not None and _are_same(of_all, of_nothing):
        return Traits(unit="labels")
    if not has_positions or labels.shape[1] == 1:
        return Traits()
    first, rest = ignored.clone(), valid.clone()
    first[:, 0], rest[:, 0] = valid[:, 0], IGNORE_INDEX
    of_first, of_rest = _value(loss_of, None, first), _value(loss_of, None, rest)
    if of_first is None and of_rest is None:
        logger.warning(
            "The loss cannot be computed for labels of %d, so all labels count as targets. If it ignores another value, such "
            "as -1, micro-batches and ranks get wrong weights: add a method num_targets(labels) to compute_loss_func, or use "
            "%d for ignored labels.",
            IGNORE_INDEX,
            IGNORE_INDEX,
        )
        return Traits(unit="labels")
    return Traits(_is_finite(of_first) and not (of_nothing is not None and _are_same(of_first, of_nothing)))


def _divisor(loss_of: LossOf, labels: Tensor, traits: Traits) -> Traits:
    """Return the traits with the divisor of the loss, from the loss of two samples and the loss of each sample."""
    if labels.dtype not in _MASKABLE or traits.unit == "labels":
        return _compared(loss_of, labels, traits, labels)
    masked = labels.clamp(min=0)
    if labels.ndim > 1 and labels.shape[1] > 2:
        # Different numbers of targets per sample, so that a mean over targets differs from a mean over samples.
        masked[0, :-1] = IGNORE_INDEX
        return _compared(loss_of, labels, traits, masked)
    # Short rows: mask the first sample completely. That shows only a mean over samples; a sum and a mean over targets
    # give the same value. A second trial with all labels distinguishes these two.
    masked[0] = IGNORE_INDEX
    found = _compared(loss_of, labels, traits, masked)
    return found if found.unit == "rows" else _compared(loss_of, labels, traits, labels.clamp(min=0))


def _compared(loss_of: LossOf, labels: Tensor, traits: Traits, tried: Tensor) -> Traits:
    """Compare the loss of two samples with combinations of the two single losses; `tried` holds the labels."""
    rows = [0, min(1, len(labels) - 1)]
    both = torch.stack([tried[0], labels.clamp(min=0)[rows[1]] if labels.dtype in _MASKABLE else labels[rows[1]]])
    numbers = [int(traits.num_targets(part)) for part in (both[:1], both[1:])]
    parts = [_value(loss_of, rows[:1], both[:1]), _value(loss_of, rows[1:], both[1:])]
    # A sample without targets adds nothing, even if its own loss is NaN.
    one, other = (
        0.0 if number == 0 and not _is_finite(part) else part for part, number in zip(parts, numbers, strict=True)
    )
    together = _value(loss_of, rows, both)
    if one is None or other is None or together is None or not all(map(math.isfinite, (one, other, together))):
        return traits
    scale = _CLOSE * max(abs(one), abs(other), abs(together))
    over_targets = (one * numbers[0] + other * numbers[1]) / max(sum(numbers), 1)
    if scale == 0.0 or abs(together - over_targets) <= scale:
        return traits
    if abs(together - (one + other) / 2) <= scale:
        return traits._replace(unit="rows")
    return traits._replace(is_sum=abs(together - (one + other)) <= scale)


def _value(loss_of: LossOf, rows: Rows, labels: Tensor) -> float | None:
    """Return the loss as a float; None if it cannot be computed."""
    try:
        loss = loss_of(rows, labels)
        return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None
    except Exception as error:  # noqa: BLE001 - the trial labels are made up; the real labels are computed next
        logger.debug("The loss could not be tried: %s", error)
        return None


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _are_same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


def rows_of(batch: Mapping[str, Any], rows: Rows, num_rows: int) -> Mapping[str, Any]:
    """Return a batch with these rows of all tensors that have `num_rows` rows; other values stay."""
    if rows is None:
        return batch
    return {
        name: value[rows] if isinstance(value, Tensor) and value.ndim > 0 and len(value) == num_rows else value
        for name, value in batch.items()
    }


@contextlib.contextmanager
def looking_only(model: nn.Module) -> Iterator[None]:
    """Run a model in this context without side effects on gradients, random state, buffers, compiled code or casts."""
    # Buffers such as running means change in a forward pass, also without gradients.
    buffers = list(_buffers_of(model.modules()))
    copies = [buffer.clone() for _, _, buffer in buffers]
    with undisturbed_random_numbers(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            yield
        finally:
            for (module, name, buffer), copy in zip(buffers, copies, strict=True):
                # A model may also have replaced the buffer by a new tensor.
                module._buffers[name] = buffer
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)
            # Autocast caches casts of weights. Those made under no_grad would cut the gradients of the next pass.
            torch.clear_autocast_cache()


def _buffers_of(modules: Iterator[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in modules:
        # Buffers of ScriptModules cannot be assigned.
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                yield module, name, buffer
