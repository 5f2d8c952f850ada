"""Checks of loaded tensors and numbers: shape, dtype, strides and storage, before a component uses them.

A checksum proves that a file is unchanged, not that its content is valid. Fused kernels read moments by address without
checking size or dtype, so a wrong tensor is read out of bounds. An expanded or shared tensor would be updated several
times per step. Optimizer state, RNG state, EMA weights and the gradient scaler use these checks.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.files.mapped_files import is_mapped

Kind = Literal["floating", "complex", "real", "any"]
"""Accepted dtypes of a tensor; `real` also accepts integers."""


# Keys come from a file and may have any length.
_LONGEST_KEY = 200


@dataclass(frozen=True)
class Where:
    """Location of a value in a checkpoint for error messages, and the component that a user can skip."""

    text: str
    component: str

    def at(self, key: object) -> "Where":
        """Return the location of an entry of this value."""
        name = str(key)[:_LONGEST_KEY]
        return replace(self, text=f"{self.text}: {name}" if ": " not in self.text else f"{self.text}.{name}")

    def refusal(self, found: str, expected: str, advice: str = "") -> CheckpointLoadError:
        """Return the error to raise, with the value found, the expected value, and advice."""
        return CheckpointLoadError(
            f"{self.text} {found}, expected {expected}. The checkpoint is damaged or belongs to another configuration. "
            f'{advice}Set skip_checkpoint_components=["{self.component}"] to start it fresh, or choose another checkpoint.'
        )


class OwnStorage:
    """Memory ranges of the tensors of a state, to detect overlaps: an update of one tensor would change the other."""

    def __init__(self) -> None:
        self._extents: list[tuple[str, int, int, Where]] = []

    def add(self, value: Tensor, where: Where) -> None:
        """Record a tensor that `check_tensor` has found to be dense."""
        # Empty tensors own no memory, and their addresses may be equal.
        if value.numel():
            start = value.data_ptr()
            self._extents.append((str(value.device), start, start + value.nbytes, where))

    def check(self) -> None:
        """Raise `CheckpointLoadError` if two recorded tensors overlap."""
        # After sorting by address, two overlapping ranges imply an overlap of neighbours.
        ordered = sorted(self._extents, key=lambda extent: extent[:3])
        for (device, _, end, one), (other_device, start, _, other) in itertools.pairwise(ordered):
            if device == other_device and start < end:
                raise other.refusal(f"shares its memory with {one.text}", "a tensor with separate storage")


def owned(value: Tensor) -> Tensor:
    """Return the tensor itself if it fills its memory and has no graph, else a copy or a detached tensor."""
    # A slice would keep the full storage in memory, and a mapped tensor the file.
    if value.untyped_storage().nbytes() != value.nbytes or is_mapped(value):
        return value.detach().clone()
    return value.detach() if value.requires_grad or type(value) is not Tensor else value


def check_tensor(
    value: object,
    where: Where,
    *,
    shape: Sequence[int] | None = None,
    kind: Kind = "any",
    like: Tensor | None = None,
    any_order: bool = False,
) -> Tensor:
    """Check the shape, dtype and memory layout of a loaded tensor without reading its content; return the tensor.

    The layout must be contiguous, channels_last, or equal to the layout of `like` (the parameter). `any_order` accepts
    dimensions in any order, as linear algebra functions return matrices. Gaps and repeated elements are always
    rejected.
    """
    # Exact types: a subclass could override any of the operations below.
    if type(value) is not Tensor and type(value) is not torch.nn.Parameter:
        raise where.refusal(f"is {described(value)}", "a plain tensor")
    assert isinstance(value, Tensor)
    check_is_dense(value, where)
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise where.refusal(f"has shape {tuple(value.shape)}", f"{tuple(shape)}")
    if not _has_kind(value, kind):
        raise where.refusal(f"has dtype {value.dtype}", f"a {kind} one")
    if not _has_plain_order(value, like) and not (any_order and _fills_its_extent(value)):
        raise where.refusal(
            f"has strides {value.stride()} for shape {tuple(value.shape)}",
            "each element once, in the order of a contiguous tensor or of the parameter",
        )
    return value


def check_is_dense(value: Tensor, where: Where) -> None:
    """Raise `CheckpointLoadError` for sparse, nested, quantised, lazy or meta tensors, and out-of-bounds strides."""
    if value.layout is not torch.strided or value.is_nested:
        raise where.refusal(f"is a tensor of layout {'nested' if value.is_nested else value.layout}", "a dense tensor")
    if value.is_quantized or value.is_meta or value.is_conj() or value.is_neg():
        state = (
            "quantized" if value.is_quantized else "without data" if value.is_meta else "lazily conjugated or negated"
        )
        raise where.refusal(f"is a tensor that is {state}", "a dense tensor")
    # Sizes, strides and offset come from the file. Reading beyond the storage would be an out-of-bounds access.
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    end = (value.storage_offset() + last + 1) * value.itemsize
    if value.numel() and end > value.untyped_storage().nbytes():
        raise where.refusal(f"needs {end} bytes of a storage of {value.untyped_storage().nbytes()}", "all of its data")


def _has_kind(value: Tensor, kind: Kind) -> bool:
    if kind == "any":
        return True
    if kind == "real":
        return not value.is_complex() and value.dtype is not torch.bool
    return value.is_complex() if kind == "complex" else value.is_floating_point()


def _has_plain_order(value: Tensor, like: Tensor | None) -> bool:
    if value.is_contiguous():
        return True
    # Convolution weights may be in channels_last, and their moments follow.
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.ndim)
    if channels_last is not None and value.is_contiguous(memory_format=channels_last):
        return True
    return like is not None and same_strides(value, like) and _fills_its_extent(value)


def same_strides(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape and the same order of elements in memory."""
    # The stride of a dimension of size 1 has no effect and is arbitrary.
    return one.shape == other.shape and all(
        size <= 1 or mine == theirs for size, mine, theirs in zip(one.shape, one.stride(), other.stride(), strict=True)
    )


def _fills_its_extent(value: Tensor) -> bool:
    """Return whether the elements fill a memory range without gaps or repetitions."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def one_number(value: object, where: Where, at_least: float = -math.inf) -> float:
    """Return the finite number in a plain number or a tensor with one element; raise if it is below `at_least`."""
    if isinstance(value, Tensor):
        check_tensor(value, where, kind="real", any_order=True)
        if value.numel() != 1:
            raise where.refusal(f"has shape {tuple(value.shape)}", "one number")
        value = value.item()
    if not is_number(value):
        raise where.refusal(f"is {described(value)}", "a number")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number) or number < at_least:
        limit = f" of at least {at_least:g}" if math.isfinite(at_least) else ""
        raise where.refusal(f"is {number}", f"a finite number{limit}")
    return number


def is_number(value: object) -> bool:
    """Return whether a value is a real number that fits a float; a bool is not."""
    # `float()` raises OverflowError for larger integers.
    if isinstance(value, Integral) and abs(int(value)) > 2**1000:
        return False
    return isinstance(value, Real) and not isinstance(value, bool)


def whole_number(value: object, where: Where, least: int, most: int | None = None) -> int:
    """Return a loaded value as an integer; raise unless it is an integer within the limits."""
    # In Python a bool is an Integral too.
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < least or (most is not None and number > most):
        limit = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise where.refusal(f"is {described(value)}", f"an integer {limit}")
    return number


def check_mapping(value: object, where: Where) -> Mapping[str, Any]:
    """Check that a loaded value is a dict with names as keys; return it."""
    if not isinstance(value, dict):
        raise where.refusal(f"is {described(value)}", "a dict")
    for key in value:
        if not isinstance(key, str):
            raise where.refusal(f"has the key {described(key)}", "names as keys")
    return value


def check_sharing(sharing: object, where: Where) -> Sequence[Sequence[str]]:
    """Check that a record of tied parameters is a list of groups of names; return it."""
    if not _is_list(sharing) or not all(_is_list(group) for group in _items(sharing)):
        raise where.refusal(f"have the record of tied names {described(sharing)}", "a list of lists of names")
    for name in (name for group in _items(sharing) for name in _items(group)):
        if not isinstance(name, str):
            raise where.refusal(f"have the tied name {described(name)}", "a text")
    return sharing  # type: ignore[return-value]


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _items(value: Any) -> Iterator[Any]:
    return iter(value)


def described(value: object) -> str:
    """Return a short description of a value for a message; content from a file may be long."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, bool | float | str):
        return _shortened(repr(value))
    if isinstance(value, int):
        return str(value) if abs(value) < 2**64 else "an integer of more than 64 bits"
    return f"of type {type(value).__name__}"


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
