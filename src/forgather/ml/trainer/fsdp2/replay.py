"""Replay of recorded tensor operations: computes the value of a tensor that was never allocated.

A storage's content is a chain of `Step`s, each with the generator state it drew from, so a replay gives bit-identical
values and leaves the global generator unchanged. `deferred_init` and its recorder build the chains.
"""

import contextlib
import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from forgather.ml.utils import default_dtype

# Tensors for which it is worth while to return freed memory first.
LARGE = 1 << 20


class Geometry(NamedTuple):
    """Position of a tensor in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        return cls(tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def view(self, storage: UntypedStorage) -> Tensor:
        # The explicit device overrides a `torch.device` context of the caller.
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        with torch.no_grad():
            return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Tensor as it was at one moment: `last` is the latest step on its storage, None if nothing was written."""

    geometry: Geometry
    nbytes: int
    last: "Step | None"


@dataclass(frozen=True)
class OwnView:
    """Argument that is a view of the storage that the step writes to."""

    geometry: Geometry


@dataclass(frozen=True)
class GeneratorState:
    """Argument that was a generator, with its state before the step."""

    state: Tensor

    def generator(self) -> torch.Generator:
        generator = torch.Generator()
        generator.set_state(self.state)
        return generator


@dataclass(frozen=True, eq=False)
class Step:
    """One operation: it changes the content after `previous`, or creates new content as its output number `output`."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    nbytes: int
    dtype: torch.dtype
    previous: "Step | None" = None
    output: int | None = None
    # State of the global generator before a random operation.
    rng: Tensor | None = None

    def sources(self) -> list["Step"]:
        """Return the steps that this step reads results of, once for each use."""
        read = [leaf.last for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Snapshot)]
        return [step for step in (*read, self.previous) if step is not None]

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.rng is not None:
            torch.default_generator.set_state(self.rng)
        with torch.no_grad(), default_dtype(self.dtype):
            return self.func(*args, **kwargs)


def replay(snapshot: Snapshot) -> Tensor:
    """Return the values of a snapshot in new memory."""
    return replay_for_reading(snapshot, {})[0]


def replay_for_reading(
    snapshot: Snapshot, known: Mapping[Step, UntypedStorage]
) -> tuple[Tensor, dict[Step, UntypedStorage]]:
    """Return the values of a snapshot, and results to pass as `known` next time; none of them may be changed."""
    if snapshot.last is None:
        return snapshot.geometry.view(_uninitialised(snapshot.nbytes)), {}
    with _kept_rng():
        run = _Replay(snapshot.last, known)
        return snapshot.geometry.view(run.storage()), run.results_to_keep()


def release_freed_memory(next_bytes: int = LARGE) -> None:
    """Return freed memory to the system, unless the next allocation is small."""
    # The C library (glibc) keeps a freed block in its heap. Once a small block lies in it, the next large tensor does
    # not fit, and the heap grows to the size of the full model.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if next_bytes >= LARGE and trim is not None:
        trim(0)


@contextlib.contextmanager
def _kept_rng() -> Iterator[None]:
    """Restore the global CPU generator afterwards."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


class _Replay:
    """Run of the steps that one storage depends on; each result is freed after its last use."""

    def __init__(self, target: Step, known: Mapping[Step, UntypedStorage]) -> None:
        self._target = target
        self._values = dict(known)
        self._order = _ordered(target, known)
        # The extra use keeps a result alive: results in `known` belong to the caller.
        self._uses = Counter([target, *known])
        self._uses.update(source for step in self._order for source in step.sources())
        # A loop such as rejection sampling computes its next round from a result that it has read twice.
        shared = [step for step in self._order if self._uses[step] > 1 and step is not target]
        self._kept = shared[-1:]
        self._uses.update(self._kept)

    def results_to_keep(self) -> dict[Step, UntypedStorage]:
        return {step: self._values[step] for step in (*self._kept, self._target)}

    def storage(self) -> UntypedStorage:
        for step in self._order:
            release_freed_memory(step.nbytes)
            self._values[step] = self._result(step)
        return self._values[self._target]

    def _result(self, step: Step) -> UntypedStorage:
        if step.output is None:
            own = self._own_storage(step)
            self._run(step, own)
            return own
        created: Tensor = tree_leaves(self._run(step, None))[step.output]
        return created.untyped_storage()

    def _run(self, step: Step, own: UntypedStorage | None) -> Any:
        args, kwargs = tree_map(lambda leaf: self._argument(leaf, own), (step.args, dict(step.kwargs)))
        return step.run(args, kwargs)

    def _own_storage(self, step: Step) -> UntypedStorage:
        """Return the storage to write to: a copy if another step still reads the content before."""
        if step.previous is None:
            return _uninitialised(step.nbytes)
        storage = self._take(step.previous)
        return storage.clone() if step.previous in self._values else storage

    def _take(self, step: Step) -> UntypedStorage:
        self._uses[step] -= 1
        return self._values[step] if self._uses[step] else self._values.pop(step)

    def _argument(self, leaf: Any, own: UntypedStorage | None) -> Any:
        if isinstance(leaf, GeneratorState):
            return leaf.generator()
        if isinstance(leaf, OwnView):
            assert own is not None, "a step that creates a tensor has no view of its storage"
            return leaf.geometry.view(own)
        if not isinstance(leaf, Snapshot):
            return leaf
        storage = _uninitialised(leaf.nbytes) if leaf.last is None else self._take(leaf.last)
        return leaf.geometry.view(storage)


def _ordered(target: Step, known: Iterable[Step]) -> list[Step]:
    """Return the steps to run, sources first."""
    # A loop with its own stack: a long initialisation exceeds Python's recursion limit.
    order: list[Step] = []
    seen = set(known)
    stack = [(target, False)]
    while stack:
        step, has_sources = stack.pop()
        if has_sources:
            order.append(step)
        elif step not in seen:
            seen.add(step)
            stack.append((step, True))
            stack.extend((source, False) for source in step.sources())
    return order


def _uninitialised(nbytes: int) -> UntypedStorage:
    return UntypedStorage(nbytes, device="cpu")
