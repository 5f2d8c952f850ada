"""Comparison of two tensors: bit equality first, then largest absolute and relative difference, in bounded memory."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements that are compared at once: in float64 with temporaries, about 300 MB.
_CHUNK = 2**22


@dataclass(frozen=True)
class TensorChange:
    """Difference of two tensors of the same shape. Infinite where only one of the values is NaN or infinite."""

    num_different: int
    """Number of elements with different values; NaN equals NaN."""
    max_abs: float
    max_rel: float
    """Largest |a - b| / max(|a|, |b|) of one element."""
    difference_norm: float
    """L2 norm of the difference."""
    norm: float
    """L2 norm of the larger tensor."""

    @property
    def change(self) -> float:
        """Norm of the difference relative to the norm of the larger tensor."""
        return self.difference_norm / self.norm if self.difference_norm else 0.0

    @property
    def only_bits(self) -> bool:
        """Whether all values are equal and only bits differ: the sign of a zero, or the payload of a NaN."""
        return self.num_different == 0


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bytes_of(a), _bytes_of(b))


def _bytes_of(tensor: Tensor) -> Tensor:
    # Complex and lazily conjugated tensors too: `contiguous` resolves both.
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def compare_tensors(a: Tensor, b: Tensor) -> TensorChange | None:
    """Return the difference of two tensors of the same shape, or None if all bits are equal; dtypes may differ."""
    if same_bits(a, b):
        return None
    total = _Sums()
    first, second = _real(a), _real(b)
    for start in range(0, first.numel(), _CHUNK):
        total.add(first[start : start + _CHUNK], second[start : start + _CHUNK])
    return total.result()


def _real(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


class _Sums:
    """Differences of the chunks so far."""

    def __init__(self) -> None:
        self._num_different = 0
        self._max_abs = self._max_rel = 0.0
        self._squares = [0.0, 0.0, 0.0]

    def add(self, a: Tensor, b: Tensor) -> None:
        x, y = a.to(torch.float64), b.to(torch.float64)
        equal = (x == y) | (x.isnan() & y.isnan())
        if not (a.is_floating_point() or b.is_floating_point()):
            # Large integers are not exact in float64.
            equal = a == b
        self._num_different += int((~equal).sum())
        difference = torch.where(equal, 0.0, (x - y).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        size = torch.maximum(x.abs(), y.abs())
        relative = torch.where(difference == 0, 0.0, difference / size).nan_to_num(nan=math.inf, posinf=math.inf)
        self._max_abs = max(self._max_abs, float(difference.max()))
        self._max_rel = max(self._max_rel, float(relative.max()))
        for index, one in enumerate((difference, x, y)):
            finite = one if index == 0 else one.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            self._squares[index] += float(finite.square().sum())

    def result(self) -> TensorChange:
        difference, first, second = map(math.sqrt, self._squares)
        return TensorChange(
            self._num_different, self._max_abs, self._max_rel, difference, max(first, second) or difference
        )
