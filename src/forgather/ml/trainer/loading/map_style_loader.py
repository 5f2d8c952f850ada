"""OrderedLoader: batches of a map-style dataset in a global, seeded order, sharded by rank.

The position counts samples of the global order. It is equal on all ranks and valid for another number of ranks.
`builders` creates it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.elastic.step_shares import GlobalBatches, StepShares
from forgather.ml.trainer.loading.data_order import (
    WHOLE,
    DataOrder,
    Part,
    PositionedBatches,
    SeededSamples,
    require_keys,
    stable_seed,
)
from forgather.ml.trainer.loading.data_types import Batch, MapDataset, Move
from forgather.ml.trainer.loading.empty_batch import emptied
from forgather.ml.trainer.loading.epoch_loader import EpochLoader, check_length
from forgather.ml.trainer.samples.length_groups import require_same_order
from forgather.ml.trainer.samples.skipped import SkippedData


class OrderedLoader(EpochLoader[DataLoader[Any]]):
    """Resumable loader of a map-style dataset in a global order; yields the batches of one `part`."""

    def __init__(
        self,
        samples: SeededSamples,
        order: DataOrder,
        batch_size: int,
        drop_last: bool,
        options: dict[str, Any],
        part: Part = WHOLE,
        shares: StepShares | None = None,
        skipped: SkippedData | None = None,
    ) -> None:
        """Create the loader; with `shares` its batches are micro-batches of steps of `global_batch_size` samples.

        Samples that are `skipped` are missing from their batches. A batch without any other becomes an `EmptyBatch`.
        """
        self._samples = samples
        self._skipped = skipped or SkippedData()
        self._collate: Callable[[object], object] = options["collate_fn"]
        self._order = order
        seeds_workers = options["num_workers"] > 0
        self._batches = (
            PositionedBatches(order, batch_size, drop_last, seeds_workers, part, skipped=self._skipped)
            if shares is None
            else GlobalBatches(order, shares, drop_last, seeds_workers, self._skipped)
        )
        self._moves: Iterator[Move] = iter(())
        super().__init__(DataLoader(as_dataset(samples), batch_sampler=self._batches, **options))
        self._start_epoch(0)

    @property
    def dataset(self) -> MapDataset:
        return self._samples.dataset

    @property
    def batch_size(self) -> int | None:
        return self._batches.batch_size

    @property
    def num_batches(self) -> int | None:
        return len(self._batches)

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def check_state_dict(self, state: object) -> None:
        position = require_keys(state, ("seed", "epoch", "index", "num_samples"), "a map-style dataset")
        require_same_order(self._order, position)
        self._order.check_state_dict(position)
        # A dataset with set_epoch may have another length in the saved epoch; `load_state_dict` checks it there.
        if not self._samples.hears_epochs:
            self._order.check_length(position, len(self._samples))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state_dict(state)
        self._check_length_in_epoch(state)
        self._pause()
        self._order.load_state_dict(state, len(self._samples))
        self._epoch, self._finished = self._order.epoch, False

    def _check_length_in_epoch(self, state: Mapping[str, Any]) -> None:
        """Set the saved epoch on the dataset and check its length; restore the epoch if the check fails."""
        present = self._samples.told_epoch
        self._samples.tell_epoch(state["epoch"])
        try:
            self._order.check_length(state, len(self._samples))
        except CheckpointLoadError:
            if present is not None:
                self._samples.tell_epoch(present)
            raise

    def _start_epoch(self, epoch: int) -> None:
        self._samples.tell_epoch(epoch)
        num_samples = len(self._samples)
        check_length(self.dataset, num_samples, self._batches.round_size, self._batches.drop_last)
        self._skipped.check_samples(num_samples)
        self._order.start_epoch(epoch, num_samples)

    def _open(self) -> Iterator[Any]:
        self._moves = self._batches.moves(self._order.index)
        if next(self._batches.moves(self._order.index), None) is None:
            return iter(())  # Do not start workers for an epoch that is over.
        if self._loader.num_workers == 0 and not self._loader.pin_memory:
            return self._read_here()
        # The DataLoader draws the base seed of workers from this generator. Seed it by epoch, so that a resumed run
        # gives workers the same seeds.
        self._loader.generator.manual_seed(stable_seed(self._order.seed, self._order.epoch))
        return iter(self._loader)

    def _read_here(self) -> Iterator[Any]:
        """Yield the batches of this process without torch's DataLoader."""
        # The bookkeeping of the DataLoader costs as much time as reading small batches.
        for request in self._batches:
            yield self._collate(self._samples.__getitems__(request))

    def _counted(self, batch: Batch) -> Batch:
        # The position moves by a full round, not by one batch: it is shared by all ranks.
        move = next(self._moves)
        self._order.index = move.position
        return emptied(batch) if move.is_empty or self._is_skipped(move) else batch

    def _is_skipped(self, move: Move) -> bool:
        """Return whether all samples of a batch are skipped."""
        skipped = self._skipped
        return bool(skipped.samples) and skipped.takes_all(self._order.samples(move.first, move.stop))


def as_dataset(samples: SeededSamples) -> Dataset[Any]:
    # A DataLoader needs the methods only. The base class of torch would add a __getitem__ that raises.
    return cast(Dataset[Any], samples)
