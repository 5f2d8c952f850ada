"""Sampled digests of parameters: one 64-bit number per tensor, computed on the device without a host wait.

A digest is a linear hash of the bits of a window of elements. Any change of a single element changes it, and NaN is
compared by its bits. Windows move from check to check, so that every element is read in turn. `ReplicaCheck` calls it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forgather.ml.checkpoint.encoding.digest import dense_components
from forgather.ml.checkpoint.sharding.sharded_tensors import local_part
from forgather.ml.trainer.loop.nonfinite import LateValues

MOST_ELEMENTS = {"cpu": 2**20}
"""Elements that one check reads on a rank, by type of device."""
MOST_ON_ACCELERATORS = 2**22
_FEWEST_OF_TENSOR = 64
"""Shortest window, so that small tensors such as norms are read whole."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
_MULTIPLIER = -1640531535
"""2**32 divided by the golden ratio, as a signed integer: its multiples are spread evenly."""


class _Group(NamedTuple):
    """Tensors of one device and element size, which are hashed together."""

    names: list[str]
    lengths: list[int]
    """Length of each tensor's window, equal for all checks."""
    weights: Tensor
    ends: Tensor
    """Position of the last element of each window, on the device."""


class LateDigests:
    """Digests of one check on their way to host memory."""

    def __init__(self, parts: Sequence[tuple[list[str], LateValues]]) -> None:
        self._parts = parts

    @property
    def have_arrived(self) -> bool:
        return all(values.has_arrived for _, values in self._parts)

    def by_name(self) -> dict[str, int]:
        """Return the digest of each tensor; waits for the device if they have not arrived."""
        return {
            name: number
            for names, values in self._parts
            for name, number in zip(names, values.read().tolist(), strict=True)
        }


class ParameterDigests:
    """Digests of named parameters. `most_elements` limits the elements of one check; the default depends on the device."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], most_elements: int | None = None) -> None:
        self._named = list(named)
        flat = list(self._flat())
        device_type = flat[0][1].device.type if flat else "cpu"
        limit = most_elements or MOST_ELEMENTS.get(device_type, MOST_ON_ACCELERATORS)
        total = sum(one.numel() for _, one in flat)
        self._share = min(1.0, limit / max(total, 1))
        self._groups = {key: self._group(members) for key, members in _grouped(flat).items()}

    @property
    def num_windows(self) -> int:
        """Number of consecutive checks that together read every element."""
        sizes = [(one.numel(), self._length(one)) for _, one in self._flat()]
        return max((math.ceil(size / length) for size, length in sizes), default=1)

    @torch.no_grad()
    def start(self, number: int) -> LateDigests:
        """Start computing the digests of check `number`, from the current values; does not wait for the device."""
        parts = []
        for key, members in _grouped(self._flat()).items():
            group = self._groups[key]
            windows = [_window(one, length, number) for (_, one), length in zip(members, group.lengths, strict=True)]
            bits = torch.cat(windows).to(torch.int64).mul_(group.weights)
            # Differences of one running sum are the sums of all windows, in few kernels. Overflow wraps, on all ranks alike.
            sums = torch.cumsum(bits, 0, out=bits)[group.ends]
            parts.append((group.names, LateValues(torch.diff(sums, prepend=sums.new_zeros(1)))))
        return LateDigests(parts)

    def _flat(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the memory of each parameter as integers; anew at each check, since `.data` may be replaced."""
        for name, parameter in self._named:
            for number, component in enumerate(_components(local_part(parameter.detach()))):
                if component.numel() > 0:
                    yield f"{name} (part {number + 1})" if number else name, _bits(component)

    def _length(self, flat: Tensor) -> int:
        return min(flat.numel(), max(math.ceil(flat.numel() * self._share), _FEWEST_OF_TENSOR))

    def _group(self, members: Sequence[tuple[str, Tensor]]) -> _Group:
        lengths = [self._length(one) for _, one in members]
        device = members[0][1].device
        ends = torch.tensor(lengths, dtype=torch.int64, device="cpu").cumsum(0) - 1
        # Odd weights: a product with one changes whenever a bit of the element does.
        weights = torch.arange(sum(lengths), dtype=torch.int32, device=device).mul_(_MULTIPLIER).bitwise_or_(1)
        return _Group([name for name, _ in members], lengths, weights, ends.to(device))


_Key = tuple[torch.device, torch.dtype]


def _grouped(flat: Iterator[tuple[str, Tensor]] | Sequence[tuple[str, Tensor]]) -> dict[_Key, list[tuple[str, Tensor]]]:
    groups: dict[_Key, list[tuple[str, Tensor]]] = {}
    for name, one in flat:
        groups.setdefault((one.device, one.dtype), []).append((name, one))
    return groups


def _components(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors with the content of a tensor, such as the parts of a quantised one."""
    parts = dense_components(tensor)
    if parts is None:
        yield tensor
        return
    for part in parts:
        yield from _components(part)


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        # Memory order, such as channels_last: a view, while flattening in logical order would copy the tensor.
        tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return tensor.reshape(-1).view(_INTEGERS[tensor.itemsize])


def _window(flat: Tensor, length: int, number: int) -> Tensor:
    # The last window overlaps the one before, so that all have the same length.
    start = number % math.ceil(flat.numel() / length) * length
    return flat.narrow(0, min(start, flat.numel() - length), length)
