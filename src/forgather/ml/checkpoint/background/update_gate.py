"""UpdateGate: holds the optimizer step until a background save has read the tensors that the step would change.

Forward and backward passes change no trainable parameter and no moment, so training continues while a save still reads
them. Invariant: a tensor stays live only if its owner has declared it here, and if only the optimizer step changed it
in an observed step. A change before the save has read the tensor fails the save. `BackgroundSaves` owns the gate; the
trainer declares its tensors and calls `wait` before it changes them.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from forgather.ml.checkpoint.background.live_reads import LiveReads
from forgather.ml.checkpoint.background.staged_snapshot import is_special
from forgather.ml.checkpoint.errors import CheckpointSaveError
from forgather.ml.checkpoint.sharding.sharded_tensors import local_part
from forgather.ml.distributed.watch import SAVING, in_phase


class _Versions:
    """Version counters of tensors at one moment. Every in-place operation increments them."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        local = [local_part(one) for one in tensors]
        # Special tensors are always copied. Tensors of the inference mode have no counter.
        self._tensors = [one for one in local if not is_special(one) and not one.is_inference()]
        self._versions = [one._version for one in self._tensors]

    def storages(self) -> set[int]:
        return {_storage_of(one) for one in self._tensors}

    def changed(self) -> set[int]:
        """Return the storages of the tensors that have changed since."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return {_storage_of(one) for one, version in pairs if one._version != version}


class UpdateGate:
    """Gate in front of the optimizer step. Without declared tensors it is open, and saves make training wait instead."""

    def __init__(self) -> None:
        self._tensors: Callable[[], Iterable[Tensor]] | None = None
        self._observed: _Versions | None = None
        self._stable: set[int] = set()
        self._reads: LiveReads | None = None
        self._handle: RemovableHandle | None = None

    def declare(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Set the function that returns the tensors that only an optimizer step changes."""
        self._tensors = tensors

    def observe(self) -> None:
        """Observe the declared tensors until the next optimizer step, to find tensors that change earlier."""
        # A forward pass may change a parameter: `nn.Embedding(max_norm=...)` does.
        if self._tensors is not None:
            self._observed = _Versions(self._tensors())
            self._listen()

    def storages(self) -> set[int]:
        """Return the storages that only an optimizer step changes; none before a step was observed."""
        if self._tensors is None:
            return set()
        return _Versions(self._tensors()).storages() & self._stable

    def checker(self) -> Callable[[], None]:
        """Return a function that raises if a declared tensor has changed since this call."""
        versions = _Versions(self._tensors()) if self._tensors is not None else None

        def check() -> None:
            if versions is not None and versions.changed() & self._stable:
                raise CheckpointSaveError(
                    "Weights or optimizer state changed before the background save had read them, so the checkpoint would mix "
                    "two steps: they may change only in optimizer.step() and in callbacks. Change them there, or raise "
                    "async_save_memory, so that all state is copied."
                )

        return check

    def hold(self, reads: LiveReads) -> None:
        """Close the gate until these reads are done."""
        self._reads = reads
        self._listen()

    def wait(self) -> None:
        """Wait until the state may change."""
        reads = self._reads
        if reads is not None and not reads.is_done:
            # As a save: the limit for a step would end the job if the disk is slow.
            with in_phase(SAVING):
                reads.wait()

    def release(self) -> None:
        """Open the gate: the save has ended."""
        self._reads = None
        if self._observed is None:
            self._stop_listening()

    def close(self) -> None:
        """Hold no optimizer any more, and forget the tensors."""
        self._tensors = self._observed = None
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _listen(self) -> None:
        # For all optimizers: trainers wrap them, and an override of a training step may call any of them.
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, *_: object) -> None:
        if self._observed is not None:
            self._stable = self._observed.storages() - self._observed.changed()
            self._observed = None
        self.wait()


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
