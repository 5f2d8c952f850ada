"""Length groups (`train_sampling_strategy="group_by_length"`): a shuffled order with similar lengths side by side.

The order depends on (seed, epoch) and the lengths of the samples only, so it is equal for any number of ranks and any
batch size, and a position is an index in it. `builders` creates it for map-style datasets.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forgather.ml.checkpoint.state.rng import undisturbed_random_numbers
from forgather.ml.trainer.loading.data_order import KEYED_ORDER, SKIP_REMEDY, DataOrder
from forgather.ml.trainer.loading.data_types import MapDataset
from forgather.ml.trainer.loading.permutations import Indices, KeyedPermutation

logger = logging.getLogger(__name__)

GROUPED_ORDER = 3
"""Version of this order in a position; other versions are orders of `data_order`."""
# Both numbers define the order, and are part of the checkpoint format like the permutation itself.
_LARGEST_BLOCK = 4096
_FEWEST_BLOCKS = 4
_NUM_KEPT = 8
_INPUT_IDS = "input_ids"


class SampleLengths:
    """Lengths of the samples of a dataset, read when they are first needed."""

    def __init__(self, dataset: MapDataset, column: str, may_change: bool) -> None:
        """Check the first sample; with `may_change` the lengths are read again in each epoch."""
        self._dataset = dataset
        self._column = column
        self._may_change = may_change
        self._lengths: NDArray[np.int64] | None = None
        self._epoch: int | None = None
        if len(dataset) > 0:
            with undisturbed_random_numbers():
                self._length_of(dataset[0])

    def of_epoch(self, epoch: int) -> NDArray[np.int64]:
        if self._lengths is None or (self._may_change and epoch != self._epoch):
            logger.info("Reading the lengths of %d samples, to group them by length.", len(self._dataset))
            # Datasets with augmentation draw random numbers, which belong to training.
            with undisturbed_random_numbers():
                lengths = (self._length_of(sample) for sample in self._samples())
                self._lengths = np.fromiter(lengths, np.int64, len(self._dataset))
            self._epoch = epoch
        return self._lengths

    def _samples(self) -> Iterable[Any]:
        dataset: Any = self._dataset
        present = getattr(dataset, "column_names", None) or ()
        name = next((name for name in (self._column, _INPUT_IDS) if name in present), None)
        has_transform = (getattr(dataset, "format", None) or {}).get("type") == "custom"
        if name is not None and hasattr(dataset, "select_columns") and not has_transform:
            # Decoding other columns, such as images, would take most of the time.
            dataset = dataset.select_columns([name])
        return (dataset[index] for index in range(len(dataset)))

    def _length_of(self, sample: Any) -> int:
        if isinstance(sample, Mapping):
            if self._column in sample:
                return int(sample[self._column])
            if _INPUT_IDS in sample:
                return len(sample[_INPUT_IDS])
        found = f"the keys {list(sample)}" if isinstance(sample, Mapping) else f"the type {type(sample).__name__}"
        raise ValueError(
            f"train_sampling_strategy='group_by_length' needs the length of each sample, but a sample with {found} has neither "
            f"the column {self._column!r} (length_column_name) nor {_INPUT_IDS!r}. Add a column with the length, or name it."
        )


class GroupedOrder(DataOrder):
    """Order of the samples of a map-style dataset in groups of similar length, and the position in it."""

    def __init__(self, num_samples: int, *, seed: int, lengths: SampleLengths) -> None:
        super().__init__(num_samples, seed=seed, shuffle=True)
        self.version = GROUPED_ORDER
        self._lengths = lengths

    def check_state_dict(self, state: object) -> None:
        """Raise an error for a position in another order, or an invalid one."""
        if isinstance(state, Mapping):
            require_same_order(self, state)
            state = {**state, "order_version": KEYED_ORDER}
        super().check_state_dict(state)

    def _new_permutation(self) -> "LengthGroups":
        return LengthGroups(
            KeyedPermutation(self.num_samples, self.seed, self.epoch), self._lengths.of_epoch(self.epoch)
        )


class LengthGroups:
    """Permutation that sorts each block of a shuffled order by length.

    Lengths fall in even blocks and rise in odd blocks, so that neighbours are similar across the border of two blocks.
    """

    def __init__(self, shuffled: KeyedPermutation, lengths: NDArray[np.int64]) -> None:
        self._shuffled = shuffled
        self._lengths = lengths
        self._block_size = min(_LARGEST_BLOCK, max(-(-len(lengths) // _FEWEST_BLOCKS), 1))
        self._blocks: dict[int, Indices] = {}

    def __call__(self, positions: Indices) -> Indices:
        """Return the indices at some positions."""
        blocks, places = np.divmod(positions, np.uint64(self._block_size))
        indices = np.empty_like(positions)
        for number in np.unique(blocks).tolist():
            chosen = blocks == number
            indices[chosen] = self._block(number)[places[chosen]]
        return indices

    def _block(self, number: int) -> Indices:
        if number not in self._blocks:
            if len(self._blocks) == _NUM_KEPT:
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[number] = self._sorted_block(number)
        return self._blocks[number]

    def _sorted_block(self, number: int) -> Indices:
        start = number * self._block_size
        stop = min(start + self._block_size, len(self._lengths))
        indices = self._shuffled(np.arange(start, stop, dtype=np.uint64))
        lengths = self._lengths[indices]
        # A stable sort, so that samples of equal length stay shuffled and the order is the same everywhere.
        by_length: Indices = indices[np.argsort(lengths if number % 2 else -lengths, kind="stable")]
        return by_length


def require_same_order(order: DataOrder, state: Mapping[str, Any]) -> None:
    """Raise ValueError if a position was saved with another sampling strategy, since it is meaningless in this order."""
    was_grouped, is_grouped = state.get("order_version") == GROUPED_ORDER, isinstance(order, GroupedOrder)
    if was_grouped != is_grouped:
        names = ("'random' or 'sequential'", "'group_by_length'")
        raise ValueError(
            f"The data position in the checkpoint was saved with train_sampling_strategy={names[was_grouped]}, but it is "
            f"{names[is_grouped]} now: the position is other data in this order. Use the same strategy, {SKIP_REMEDY}."
        )
