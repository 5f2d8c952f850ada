"""NumItems: the `num_items_in_batch` of an overridden loss, a tensor that records whether it was used.

A loss that was divided by it is a share of the step. A loss that ignores it is the mean of its micro-batch. Only
arithmetic and conversions to Python numbers count as use; printing, comparing and moving do not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_MOVES = frozenset(
    {"to", "cpu", "cuda", "clone", "detach", "contiguous", "type", "int", "long", "float", "double", "half"}
)
_LOOKS = frozenset(
    {
        "__repr__",
        "__format__",
        "__str__",
        "__bool__",
        "__len__",
        "__hash__",
        "__get__",
        "dim",
        "size",
        "numel",
        "is_complex",
    }
    | {
        "is_floating_point",
        "eq",
        "ne",
        "gt",
        "ge",
        "lt",
        "le",
        "__eq__",
        "__ne__",
        "__gt__",
        "__ge__",
        "__lt__",
        "__le__",
    }
    | {"stride", "storage_offset", "element_size", "nelement", "is_contiguous", "__deepcopy__", "__reduce_ex__"}
)


class Use:
    """Whether a number was used."""

    def __init__(self) -> None:
        self.was_made = False


class NumItems(Tensor):
    """Scalar tensor that records its first use in `use`. Results of arithmetic are plain tensors."""

    use: Use

    @staticmethod
    def of(number: int | Tensor, device: torch.device, use: Use) -> "NumItems":
        """Return a number with a record of its use; `number` stays on its device if it is a tensor."""
        # Filled on the device: a copy from the host would wait for the device.
        plain = number if isinstance(number, Tensor) else torch.full((), number, dtype=torch.int64, device=device)
        counted = plain.detach().as_subclass(NumItems)
        counted.use = use
        return counted

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        counted = _first_counted((*args, *(kwargs or {}).values()))
        plain_args = [plain(value) for value in args]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*plain_args, **{key: plain(value) for key, value in (kwargs or {}).items()})
        if counted is None or name in _LOOKS:
            return result
        if name in _MOVES and isinstance(result, Tensor):
            moved = result.as_subclass(NumItems)
            moved.use = counted.use
            return moved
        counted.use.was_made = True
        return result


def plain(value: Any) -> Any:
    """Return a counted number as a plain tensor, without counting this as use; other values unchanged."""
    if isinstance(value, NumItems):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    if isinstance(value, (list, tuple)) and any(isinstance(one, NumItems) for one in value):
        return type(value)(map(plain, value))
    return value


def used(value: Any) -> Any:
    """Return a counted number as a plain tensor, and count this as use; other values unchanged."""
    if isinstance(value, NumItems):
        value.use.was_made = True
    return plain(value)


def _first_counted(values: Sequence[Any]) -> NumItems | None:
    for value in values:
        if isinstance(value, NumItems):
            return value
        if isinstance(value, (list, tuple)):
            inner = _first_counted(value)
            if inner is not None:
                return inner
    return None
