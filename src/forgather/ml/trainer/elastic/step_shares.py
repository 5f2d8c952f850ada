"""Global batch: division of `global_batch_size` samples per step into micro-batches of all data-parallel ranks.

Invariant: a step has the same samples in the same global order for every number of ranks; only the division differs.
`OrderedLoader` reads these micro-batches, and `global_batch` derives the number of them from the arguments.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from forgather.ml.trainer.loading.data_order import WHOLE, DataOrder, Part, PositionedBatches
from forgather.ml.trainer.loading.data_types import Move
from forgather.ml.trainer.samples.skipped import SkippedData


@dataclass(frozen=True)
class StepShares:
    """Division of a step: micro-batch i of a step belongs to rank i modulo `part.num_parts`."""

    global_batch_size: int
    largest: int
    """Upper bound of a micro-batch (`per_device_train_batch_size`)."""
    part: Part = WHOLE
    """Data-parallel rank of this process, and their number."""
    reads_all: bool = False
    """Whether this process reads the micro-batches of all ranks, as a dispatcher does."""

    def num_rounds(self, num_samples: int) -> int:
        """Return the micro-batches of each rank for a step of `num_samples` samples."""
        return math.ceil(num_samples / (self.part.num_parts * self.largest))

    def sizes(self, num_samples: int) -> list[int]:
        """Return the samples of all micro-batches of a step, round by round; they differ by at most one."""
        number = self.num_rounds(num_samples) * self.part.num_parts
        least, num_larger = divmod(num_samples, number)
        return [least + 1 if place < num_larger else least for place in range(number)]

    def moves(self, start: int, num_samples: int) -> Iterator[Move]:
        """Yield the micro-batches that this process reads for a step that begins at the position `start`."""
        sizes, num_parts = self.sizes(num_samples), self.part.num_parts
        for first in range(0, len(sizes), num_parts):
            in_round = sizes[first : first + num_parts]
            end = start + sum(in_round)
            for number in range(num_parts) if self.reads_all else (self.part.number,):
                own = start + sum(in_round[:number])
                size = in_round[number]
                # The reader of all ranks hands out one micro-batch after another, so its position moves with each.
                position = own + size if self.reads_all else end
                # A rank without samples reads the first micro-batch of its round, which has the right shapes.
                yield (
                    Move(own, own + size, position, False) if size else Move(start, start + in_round[0], position, True)
                )
            start = end


class GlobalBatches(PositionedBatches):
    """Batch sampler over steps of `global_batch_size` samples; the first step begins at the position of the order."""

    def __init__(
        self,
        order: DataOrder,
        shares: StepShares,
        drop_last: bool,
        seeds_workers: bool = True,
        skipped: SkippedData | None = None,
    ) -> None:
        super().__init__(order, shares.largest, drop_last, seeds_workers, shares.part, skipped=skipped)
        self._shares = shares

    def __len__(self) -> int:
        whole, rest = divmod(self.order.num_samples, self._shares.global_batch_size)
        num_rounds = whole * self._shares.num_rounds(self._shares.global_batch_size)
        if rest and not self.drop_last:
            num_rounds += self._shares.num_rounds(rest)
        return num_rounds * self.part.num_parts if self._shares.reads_all else num_rounds

    @property
    def round_size(self) -> int:
        return self._shares.global_batch_size

    def moves(self, start: int) -> Iterator[Move]:
        size, end = self._shares.global_batch_size, self.order.num_samples
        while start < end:
            num_samples = min(size, end - start)
            if num_samples < size and self.drop_last:
                return
            yield from self._shares.moves(start, num_samples)
            start += num_samples
