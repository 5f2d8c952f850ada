"""Comparison of two checkpoints by name, also across trainers and topologies: weights, optimizer state, plain values.

Tensors are read one pair at a time, so memory stays bounded. Measured times and speeds in the log are not compared.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.foreign.ownership import require_own
from forgather.tools.checkpoints.configuration import stored_settings
from forgather.tools.checkpoints.paths import find_checkpoint
from forgather.tools.checkpoints.stored_state import StoredState, StoredTensor, read_stored_state
from forgather.tools.checkpoints.tensor_comparison import TensorChange, compare_tensors

CONFIGURATION = "config"
"""Key for the settings in config.yaml, beside the components of a checkpoint."""
ONLY_IN_A, ONLY_IN_B = "only in A", "only in B"
# The clock and the machine decide these values, so two equal runs differ in them.
_MEASURED = re.compile(r"(^|[._])(runtime|seconds|(samples|steps|tokens)_per_second|tok_per_sec|mfu|peak_memory\w*)$")


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one tensor of a checkpoint."""

    component: str
    name: str
    kind: str
    """"values", "bits" (equal values), "dtype", "shape", "only in A" or "only in B"."""
    detail: str = ""
    """Both shapes or dtypes, where they differ."""
    num_elements: int = 0
    change: TensorChange | None = None
    """None if the values cannot be compared, or are equal in another dtype."""

    @property
    def sort_key(self) -> tuple[bool, float, float, str]:
        """Largest relative change first, different shapes before all others; names of one checkpoint come last."""
        change = math.inf if self.change is None else self.change.change
        return self.is_missing, -change, -(0.0 if self.change is None else self.change.max_abs), self.name

    @property
    def is_missing(self) -> bool:
        """Whether only one of the checkpoints has the tensor."""
        return self.kind in (ONLY_IN_A, ONLY_IN_B)


@dataclass(frozen=True)
class ValueDifference:
    """Plain value that differs; None where it is missing is told apart by `kind`."""

    component: str
    name: str
    kind: str
    """"values", "only in A" or "only in B"."""
    a: object = None
    b: object = None
    relative: float | None = None
    """Relative difference of two numbers; None for other values."""

    @property
    def sort_key(self) -> tuple[bool, float, str, str]:
        """Largest relative change of numbers first, then other values, then names of one checkpoint."""
        return self.is_missing, 0.0 if self.relative is None else -self.relative, self.component, self.name

    @property
    def is_missing(self) -> bool:
        """Whether only one of the checkpoints has the value."""
        return self.kind in (ONLY_IN_A, ONLY_IN_B)


@dataclass(frozen=True)
class LayerDifference:
    """Differences of the tensors of one layer in one component."""

    component: str
    layer: str
    num_tensors: int
    num_different: int
    max_abs: float
    change: float
    """Norm of the differences in the layer, relative to the norm of the tensors that differ."""


@dataclass(frozen=True)
class Differences:
    """All differences of two checkpoints; tensors, layers and values are sorted, largest relative change first."""

    a: str
    b: str
    num_tensors: int
    num_values: int
    tensors: Sequence[TensorDifference]
    layers: Sequence[LayerDifference]
    values: Sequence[ValueDifference]

    @property
    def are_equal(self) -> bool:
        return not self.tensors and not self.values


def compare_checkpoints(
    a: str,
    b: str,
    components: Collection[str] | None = None,
    note_bytes: Callable[[int], None] | None = None,
) -> Differences:
    """Compare two checkpoints, or the newest ones of two runs; `components` limits the comparison.

    Components are those of the checkpoints, and "config" for the stored configuration. Raise `CheckpointError` for a
    damaged checkpoint or one of another program.
    """
    paths = _own_checkpoints(a, b)
    found = [store.open_checkpoint(path) for path in paths]
    _require_components([one.manifest.components for one in found], components)
    states = [read_stored_state(one, components) for one in found]
    if components is None or CONFIGURATION in components:
        for path, state in zip(paths, states, strict=True):
            settings = stored_settings(path) or {}
            state.values |= {(CONFIGURATION, name): value for name, value in settings.items()}
    comparison = _Comparison(states[0], states[1], note_bytes or (lambda _: None))
    tensors = comparison.tensors()
    values = comparison.values()
    return Differences(
        a=paths[0],
        b=paths[1],
        num_tensors=len(states[0].tensors.keys() | states[1].tensors.keys()),
        num_values=len(comparison.compared_values),
        tensors=sorted(tensors, key=lambda one: one.sort_key),
        layers=comparison.layers(),
        values=sorted(values, key=lambda one: one.sort_key),
    )


def bytes_to_compare(a: str, b: str) -> int:
    """Return the size of the tensor files of two checkpoints, for a progress bar."""
    found = [store.open_checkpoint(path) for path in _own_checkpoints(a, b)]
    return sum(record.size for one in found for record in one.manifest.files)


def _own_checkpoints(a: str, b: str) -> list[str]:
    paths = [find_checkpoint(path) for path in (a, b)]
    for path in paths:
        require_own(path)
    return paths


def _require_components(present: Iterable[Collection[str]], wanted: Collection[str] | None) -> None:
    known = {CONFIGURATION}.union(*present)
    for key in wanted or ():
        if key not in known:
            raise UnknownComponentError(
                f"Neither checkpoint has a component {key!r}. Their components are {', '.join(sorted(known))}."
            )


class UnknownComponentError(ValueError):
    """Name of a component that neither checkpoint has."""


class _Comparison:
    """Comparison of two states, with the sums of each layer."""

    def __init__(self, a: StoredState, b: StoredState, note_bytes: Callable[[int], None]) -> None:
        self._a, self._b = a, b
        self._note_bytes = note_bytes
        self._layers: dict[tuple[str, str], _LayerSums] = {}

    def tensors(self) -> list[TensorDifference]:
        found = []
        for key in dict.fromkeys([*self._a.tensors, *self._b.tensors]):
            first, second = self._a.tensors.get(key), self._b.tensors.get(key)
            difference = _compare(first, second)
            either = first or second
            assert either is not None
            sums = self._layers.setdefault((either.component, layer_of(either)), _LayerSums())
            sums.add(difference)
            for one in (first, second):
                self._note_bytes(0 if one is None else one.num_bytes)
            if difference is not None:
                found.append(difference)
        return found

    @property
    def compared_values(self) -> list[tuple[str, str]]:
        keys = dict.fromkeys([*self._a.values, *self._b.values])
        return [key for key in keys if not _MEASURED.search(key[1])]

    def values(self) -> list[ValueDifference]:
        found = []
        for key in self.compared_values:
            if key not in self._b.values:
                found.append(ValueDifference(*key, ONLY_IN_A, a=self._a.values[key]))
            elif key not in self._a.values:
                found.append(ValueDifference(*key, ONLY_IN_B, b=self._b.values[key]))
            elif not _equal(self._a.values[key], self._b.values[key]):
                a, b = self._a.values[key], self._b.values[key]
                found.append(ValueDifference(*key, "values", a, b, _relative(a, b)))
        return found

    def layers(self) -> list[LayerDifference]:
        different = [(key, sums) for key, sums in self._layers.items() if sums.num_different]
        listed = [
            LayerDifference(*key, sums.num_tensors, sums.num_different, sums.max_abs, sums.change)
            for key, sums in different
        ]
        return sorted(listed, key=lambda one: (-one.change, one.component, one.layer))


class _LayerSums:
    """Differences of the tensors of one layer."""

    def __init__(self) -> None:
        self.num_tensors = self.num_different = 0
        self.max_abs = 0.0
        self._squares = self._norms = 0.0

    def add(self, difference: TensorDifference | None) -> None:
        self.num_tensors += 1
        if difference is None:
            return
        self.num_different += 1
        change = difference.change
        # The step counters of an optimizer are tensors of one element, which would hide its moments.
        if change is None or difference.num_elements == 1:
            return
        self.max_abs = max(self.max_abs, change.max_abs)
        self._squares += change.difference_norm**2
        self._norms += change.norm**2

    @property
    def change(self) -> float:
        return math.sqrt(self._squares / self._norms) if self._squares else 0.0


def _compare(a: StoredTensor | None, b: StoredTensor | None) -> TensorDifference | None:
    if a is None or b is None:
        one = a or b
        assert one is not None
        kind = ONLY_IN_B if a is None else ONLY_IN_A
        return TensorDifference(one.component, one.name, kind, str(list(one.shape)), _count(one))
    if a.shape != b.shape:
        return TensorDifference(a.component, a.name, "shape", f"{list(a.shape)} and {list(b.shape)}", _count(a))
    change = compare_tensors(a.read(), b.read())
    if change is None:
        return None
    if a.dtype != b.dtype:
        return TensorDifference(a.component, a.name, "dtype", f"{a.dtype} and {b.dtype}", _count(a), change)
    kind = "bits" if change.only_bits else "values"
    return TensorDifference(a.component, a.name, kind, "", _count(a), change)


def _count(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape)


def layer_of(tensor: StoredTensor) -> str:
    """Return the layer of a tensor: its name up to the first number, else the name of its module."""
    parts = tensor.name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    if number is not None:
        return ".".join(parts[: number + 1])
    # Names of optimizer state end with a key such as "exp_avg" behind the name of the parameter.
    behind = 2 if tensor.component == "optimizer" else 1
    return ".".join(parts[:-behind]) or parts[0]


def _equal(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    if (isinstance(a, Mapping) and isinstance(b, Mapping)) or (isinstance(a, list) and isinstance(b, list)):
        # Lists of numbers may contain NaN, which `==` finds different.
        return repr(a) == repr(b) or a == b
    return (type(a) is type(b) and a == b) or (_is_number(a) and _is_number(b) and a == b)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _relative(a: object, b: object) -> float | None:
    if not (isinstance(a, (int, float)) and isinstance(b, (int, float))) or isinstance(a, bool) or isinstance(b, bool):
        return None
    largest = max(abs(a), abs(b))
    if not math.isfinite(largest):
        return math.inf
    return abs(a - b) / largest if largest else 0.0
