"""Data order: a sampler over a seeded permutation, its position, and seeding of workers by position.

The order of an epoch depends on (seed, epoch) only, so a position is three integers: seed, epoch and sample index. It
takes O(1) memory. The version of the order is saved with the position, and a resumed run keeps it to its end.
Random draws of a dataset inside a worker depend on the position too, never on the age of the worker. The loaders of
map-style datasets and of streams use it.
"""

import copy
import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.state_schema import (
    Schema,
    Violation,
    anything,
    checked,
    count,
    flag,
    integer,
    require_mapping,
    that,
)
from forgather.ml.trainer.loading.data_errors import read_samples, stream_error
from forgather.ml.trainer.loading.data_types import HasState, MapDataset, Move
from forgather.ml.trainer.loading.permutations import DrawnPermutation, Indices, KeyedPermutation, Permutation
from forgather.ml.trainer.samples.skipped import SkippedData
from forgather.ml.trainer.setup.seeding import seed_host_generators

logger = logging.getLogger(__name__)

SKIP_REMEDY = 'or start the data from its beginning with skip_checkpoint_components=["dataset"]'


def stable_seed(*parts: int) -> int:
    """Return a 63-bit seed that is equal for equal numbers in every process and on every machine."""
    # SHA-256, because the built-in hash() may differ between versions and builds of Python.
    digest = hashlib.sha256(" ".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def agreed_seed(configured: int, stored: int) -> int:
    """Return the seed to use after loading: the seed of the checkpoint, and log a change."""
    # The saved position is meaningless in the order of another seed.
    if configured != stored:
        logger.info(
            "The data order continues with the checkpoint's seed %d, not with the configured %d.", stored, configured
        )
    return stored


def require_keys(state: object, keys: tuple[str, ...], kind: str) -> Mapping[str, Any]:
    """Return a position with these keys; raise ValueError if it was saved for another kind of training data."""
    checked(require_mapping, state, "dataset")
    assert isinstance(state, Mapping), "it was checked"
    missing = [key for key in keys if key not in state]
    if missing:
        raise ValueError(
            f"The data position in the checkpoint cannot be used for {kind}: it lacks {missing} and has "
            f"{sorted(map(str, state))}, so it was saved for another kind of dataset. Use that kind again, "
            f"{SKIP_REMEDY}."
        )
    return state


DRAWN_ORDER = 1
"""Version of the order from `torch.randperm`, also of positions that were saved without a version."""
KEYED_ORDER = 2
"""Version of the order in O(1) memory, for new runs."""
# Number of sample indices computed at once. For a single small batch, the overhead of NumPy calls would dominate.
_NUM_AHEAD = 2048

_known_order = that(
    f"{DRAWN_ORDER} or {KEYED_ORDER}, the orders that this version of forgather knows",
    lambda value: type(value) is int and value in (DRAWN_ORDER, KEYED_ORDER),
)
_ORDER = Schema(
    {"seed": integer, "epoch": count, "index": count, "num_samples": count, "order_version": _known_order},
    may_lack=["order_version"],
)
DRAWS = Schema({"num_drawn": count, "ended": flag, "iterator": anything})
"""Schema for the position of a stream; "iterator" holds the state of the user's iterator."""


class DataOrder:
    """Order of the samples of a map-style dataset, and the position in it.

    `index` is the position of the next sample in the order of the epoch. It counts samples, not batches, so it stays
    valid with another batch size. A new order has the newest `version`, and a loaded position brings its own.
    """

    def __init__(self, num_samples: int, *, seed: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.index = 0
        self.version = KEYED_ORDER
        self._permutation: Permutation | None = None

    def start_epoch(self, epoch: int, num_samples: int) -> None:
        self._move(self.seed, epoch, 0, num_samples)

    def samples(self, start: int, stop: int) -> list[int]:
        """Return the indices of the samples at positions `start` to `stop` of the epoch."""
        return self.samples_at(np.arange(start, stop, dtype=np.uint64))

    def samples_at(self, positions: Indices) -> list[int]:
        """Return the indices of the samples at some positions of the epoch."""
        if self.shuffle and self._permutation is None:
            self._permutation = self._new_permutation()
        indices: list[int] = (positions if self._permutation is None else self._permutation(positions)).tolist()
        return indices

    def _new_permutation(self) -> Permutation:
        if self.version == DRAWN_ORDER:
            return DrawnPermutation(self.num_samples, stable_seed(self.seed, self.epoch))
        return KeyedPermutation(self.num_samples, self.seed, self.epoch)

    def state_dict(self) -> dict[str, Any]:
        position = {"seed": self.seed, "epoch": self.epoch, "index": self.index, "num_samples": self.num_samples}
        return {**position, "order_version": self.version}

    def check_state_dict(self, state: object) -> None:
        """Raise `CheckpointLoadError` if the state is not a position, or the index exceeds its number of samples."""
        checked(_is_within, state, "dataset")

    def load_state_dict(self, state: Mapping[str, Any], num_samples: int) -> None:
        """Move to a saved position and adopt its seed and version; `num_samples` is the current length of the dataset."""
        self.check_state_dict(state)
        self.check_length(state, num_samples)
        self.version = state.get("order_version", DRAWN_ORDER)
        self._move(agreed_seed(self.seed, state["seed"]), state["epoch"], state["index"], num_samples)

    def check_length(self, state: Mapping[str, Any], num_samples: int) -> None:
        """Raise `CheckpointLoadError` if the dataset had another length than `num_samples` when the position was saved."""
        if num_samples != state["num_samples"]:
            raise CheckpointLoadError.misfit(
                f"The training dataset has {num_samples} samples, but had {state['num_samples']} when the checkpoint was "
                f"saved: position {state['index']} is other data now. Use the same dataset, {SKIP_REMEDY}."
            )

    def _move(self, seed: int, epoch: int, index: int, num_samples: int) -> None:
        self.seed, self.epoch, self.index, self.num_samples = seed, epoch, index, num_samples
        self._permutation = None


def _is_within(state: object) -> None:
    _ORDER(state)
    assert isinstance(state, Mapping), "the schema has checked it"
    # An index equal to the number of samples is valid: the epoch is over.
    if state["index"] > state["num_samples"]:
        raise Violation(f"at most the number of samples, {state['num_samples']}", state["index"], ["index"])


class BatchRequest(list[int]):
    """Sample indices of one batch, with the epoch and the seed for the worker that reads it."""

    __slots__ = ("epoch", "seed")

    def __init__(self, indices: list[int], epoch: int, seed: int) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchRequest, (list(self), self.epoch, self.seed)


class Part(NamedTuple):
    """Shard of one rank: batch `number` of every round of `num_parts` batches."""

    number: int = 0
    num_parts: int = 1


WHOLE = Part()


class PositionedBatches(Sampler[list[int]]):
    """Batch sampler over a `DataOrder`, from its position to the end of the epoch; yields the batches of one `part`.

    The sampler runs ahead of training by the prefetch of the loader, so it does not move the position: the consumer of a
    batch does. A part without a batch in the last round yields the first batch of that round instead (see `is_empty`).
    That batch has the right shapes to become an `EmptyBatch`. With `fills_up=False` the part ends there.
    """

    def __init__(
        self,
        order: DataOrder,
        batch_size: int,
        drop_last: bool,
        seeds_workers: bool = True,
        part: Part = WHOLE,
        fills_up: bool = True,
        skipped: SkippedData | None = None,
    ) -> None:
        self.order, self._skipped = order, skipped or SkippedData()
        self.batch_size = batch_size
        self.drop_last, self.part = drop_last, part
        self._seeds_workers = seeds_workers
        self._fills_up = fills_up

    def __iter__(self) -> Iterator[list[int]]:
        order, batches = self.order, self.moves(self.order.index)
        # One call of the permutation for many small batches. Batches of other parts lie between the batches of this
        # part, so each batch contributes its own range.
        while ahead := list(itertools.islice(batches, max(_NUM_AHEAD // self.batch_size, 1))):
            samples = iter(order.samples_at(np.concatenate([np.arange(*move[:2], dtype=np.uint64) for move in ahead])))
            for first, last, *_ in ahead:
                # By position, so that augmentation is the same in any worker and after a resume.
                seed = stable_seed(order.seed, order.epoch, first) if self._seeds_workers else 0
                indices = list(itertools.islice(samples, last - first))
                yield BatchRequest(self._skipped.kept(indices), order.epoch, seed)

    def __len__(self) -> int:
        """Return the number of batches of the full epoch, regardless of the position."""
        whole, rest = divmod(self.order.num_samples, self.round_size)
        if rest == 0 or (self.drop_last and self._fills_up):
            return whole
        has_part_of_rest = self._fills_up or not self.is_empty(whole * self.round_size)
        return whole + 1 if has_part_of_rest else whole

    @property
    def round_size(self) -> int:
        """Return the samples that an epoch needs at least with `drop_last`."""
        return self.batch_size * self.part.num_parts

    def end_of_round(self, start: int) -> int:
        """Return the end of the round that begins at `start`; `start` itself if there is no round."""
        stop = min(start + self.round_size, self.order.num_samples)
        if not self.drop_last:
            return stop
        # Training drops an incomplete round, because every rank needs a batch. Evaluation drops an incomplete batch only.
        if self._fills_up:
            return stop if stop == start + self.round_size else start
        return start + (stop - start) // self.batch_size * self.batch_size

    def is_empty(self, start: int) -> bool:
        """Return whether this part has no batch in the round that begins at `start`."""
        # With `drop_last`, a batch that is not full counts as missing.
        first = start + self.part.number * self.batch_size
        return first + (self.batch_size - 1 if self.drop_last else 0) >= self.order.num_samples

    def moves(self, start: int) -> Iterator[Move]:
        """Yield the batches of this part from the position `start` to the end of the epoch."""
        while (stop := self.end_of_round(start)) > start:
            is_empty = self.is_empty(start)
            if self._fills_up or not is_empty:
                first = start if is_empty else start + self.part.number * self.batch_size
                yield Move(first, min(first + self.batch_size, self.order.num_samples), stop, is_empty)
            start = stop


DatasetT = TypeVar("DatasetT")


class _EpochAware(Generic[DatasetT]):
    """Wrapper that calls `set_epoch` of a dataset, once per change and process."""

    def __init__(self, dataset: DatasetT, forward_epoch: bool) -> None:
        self.dataset = dataset
        self._forward_epoch = forward_epoch
        self._told_epoch: int | None = None

    @property
    def hears_epochs(self) -> bool:
        """Whether the dataset gets the epoch, so that its contents may differ in each epoch."""
        return self._forward_epoch and hasattr(self.dataset, "set_epoch")

    @property
    def told_epoch(self) -> int | None:
        return self._told_epoch

    def tell_epoch(self, epoch: int) -> None:
        if epoch != self._told_epoch and self._forward_epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._told_epoch = epoch


class SeededSamples(_EpochAware[MapDataset]):
    """Map-style dataset with reproducible random draws of samples and collation in any worker.

    Before each batch a worker sets the epoch and seeds its generators from the position of the batch. The main process
    is not seeded: its global generators belong to the training, which saves them in checkpoints.
    """

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> object:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> object:
        # A DataLoader reads a batch by one call of __getitems__, so this seeds once per batch. The collator runs next in
        # the same process and continues with the same generators.
        if isinstance(indices, BatchRequest) and get_worker_info() is not None:
            self.tell_epoch(indices.epoch)
            seed_host_generators(indices.seed)
        return read_samples(self.dataset, list(indices))


def is_stateful(item: object) -> TypeGuard[HasState]:
    return hasattr(item, "state_dict") and hasattr(item, "load_state_dict")


def check_position(loader: object, state: object) -> None:
    """Let a loader check a state without loading it; loaders of users do not have to support this."""
    if hasattr(loader, "check_state_dict"):
        loader.check_state_dict(state)


def goes_on(loader: object) -> TypeGuard[HasState]:
    """Return whether a second iterator continues where the first one stopped, as with Forgather's loaders."""
    # A dispatcher has the attribute `goes_on`, since only the reading rank has the loader itself.
    own_word: bool | None = getattr(loader, "goes_on", None)
    return hasattr(loader, "num_batches") and is_stateful(loader) if own_word is None else own_word


def kept_state(loader: HasState) -> dict[str, Any]:
    """Return a snapshot of the state of a loader that stays valid while the loader continues."""
    # Some loaders return their live state, which must be copied. A dict of integers is the cheap and common case.
    state = loader.state_dict()
    is_plain = isinstance(state, dict) and all(isinstance(value, int) for value in state.values())
    return state if is_plain else copy.deepcopy(state)


def seeded_stream(
    dataset: Iterable[Any],
    *,
    seed: int,
    batch_size: int,
    forward_epoch: bool,
    in_workers: bool,
    is_read_again: bool = False,
) -> "SeededStream":
    """Return a stream with state methods if the dataset has them; the loader uses them if they exist.

    With `is_read_again` the stream has none, because the state of the dataset would not restore the position.
    """
    kind = StatefulStream if is_stateful(dataset) and not is_read_again else SeededStream
    return kind(dataset, seed, batch_size, forward_epoch, in_workers)


class SeededStream(_EpochAware[Iterable[Any]], IterableDataset[Any]):
    """Iterable dataset with reproducible random draws of samples and collation after a resume.

    The epoch is in shared memory: a persistent worker holds a copy of the dataset that nothing else can reach.
    """

    def __init__(
        self, dataset: Iterable[Any], seed: int, batch_size: int, forward_epoch: bool, in_workers: bool
    ) -> None:
        super().__init__(dataset, forward_epoch)
        self.seed = seed
        self._batch_size = batch_size
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu")
        if in_workers:
            self._epoch.share_memory_()

    def __len__(self) -> int:
        if not isinstance(self.dataset, Sized):
            raise TypeError(f"The length of {type(self.dataset).__name__} is unknown: it has no __len__.")
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)
        self.tell_epoch(epoch)

    def __iter__(self) -> "_Draws":
        epoch = int(self._epoch)
        self.tell_epoch(epoch)
        worker = get_worker_info()
        place = None if worker is None else (self.seed, epoch, worker.id)
        # Seed before iter(): some datasets shuffle when their iterator is created.
        if place is not None:
            seed_host_generators(stable_seed(*place))
        iterator = iter(self.dataset)
        kind = _StatefulDraws if is_stateful(self) or is_stateful(iterator) else _Draws
        return kind(iterator, self._batch_size, place)


class StatefulStream(SeededStream):
    """Stream over a dataset with state methods."""

    def state_dict(self) -> dict[str, Any]:
        assert is_stateful(self.dataset), "seeded_stream has asked"
        # A dataset may return its live state, which changes while prefetched batches wait to be handed out.
        return copy.deepcopy(self.dataset.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert is_stateful(self.dataset), "seeded_stream has asked"
        self.dataset.load_state_dict(state)


class _Draws(Iterator[Any]):
    """Iterator over the samples of a stream; in a worker (`place` is not None) it seeds generators before each batch."""

    def __init__(self, iterator: Iterator[Any], batch_size: int, place: tuple[int, ...] | None) -> None:
        self._iterator = iterator
        self._batch_size = batch_size
        self._place = place
        self._num_drawn = 0
        self._batch_origin = 0
        self._ended = False

    def __next__(self) -> object:
        if self._ended:
            raise StopIteration
        # Counted from the resumed sample, because a new iterator starts a new batch there.
        if self._place is not None and (self._num_drawn - self._batch_origin) % self._batch_size == 0:
            seed_host_generators(stable_seed(*self._place, self._num_drawn))
        try:
            sample = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise
        except Exception as error:
            raise stream_error(self._iterator, self._num_drawn, error) from error
        self._num_drawn += 1
        return sample


class _StatefulDraws(_Draws):
    """Iterator over the samples of a stream, with a state."""

    def state_dict(self) -> dict[str, Any]:
        # The end is saved too: the state of some datasets restarts at the end, and a resume would repeat the epoch.
        inner = copy.deepcopy(self._iterator.state_dict()) if is_stateful(self._iterator) else None
        return {"num_drawn": self._num_drawn, "ended": self._ended, "iterator": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        DRAWS.check(state, "dataset.iterator")
        self._num_drawn = self._batch_origin = state["num_drawn"]
        self._ended = state["ended"]
        if state["iterator"] is not None:
            if not is_stateful(self._iterator):
                raise AttributeError(
                    f"The checkpoint has a state of the dataset's iterator, but {type(self._iterator).__name__} has no "
                    f"load_state_dict. Use the same dataset as before, {SKIP_REMEDY}."
                )
            self._iterator.load_state_dict(state["iterator"])
