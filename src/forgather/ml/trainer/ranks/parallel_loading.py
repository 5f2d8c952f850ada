"""Parallel loading: per-rank shards of the batches, read by each rank or sent by a dispatcher rank.

All ranks build their loaders together: an error on one rank is raised on all. `RankTeam` calls this module.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from forgather.ml.checkpoint.encoding.digest import tensor_digest
from forgather.ml.distributed import Peers
from forgather.ml.distributed.groups import new_partition
from forgather.ml.distributed.rank_links import RankLinks
from forgather.ml.trainer.dataloader_dispatcher import DataloaderDispatcher
from forgather.ml.trainer.loading.builders import is_map_style
from forgather.ml.trainer.loading.data_order import WHOLE, Part

logger = logging.getLogger(__name__)

BuildLoader = Callable[[Part], Any]
"""Builds the loader for one shard of the data, for training (`ResumableLoader`) or for evaluation."""
LoaderT = TypeVar("LoaderT", bound=Iterable[Any])
Agreement = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class DataLayout:
    """Division of the batches of a step between ranks, as defined by a parallel strategy."""

    part: Part = WHOLE
    """Shard of the batches of every step that this rank trains on."""
    speaks: bool = True
    """Whether this rank reports the counts, among the ranks that train on the same batches."""
    readers: Sequence[Sequence[int]] | None = None
    """Groups of ranks with one reading rank each; None if every rank reads its own batches."""
    reads_whole: bool = False
    """With readers: whether the reader reads the batches of all shards and distributes them along `axis`."""
    mesh: DeviceMesh | None = None
    axis: int | None = None
    remedy: str = "Or set dispatch_batches=True: rank 0 then reads for all."
    """Advice in the warning that ranks read the same stream."""

    @property
    def splits_streams(self) -> bool:
        """Whether a dispatcher shards streams, so that ranks cannot read the same data by mistake."""
        return self.readers is not None and self.reads_whole


class ParallelLoading:
    """Builder of per-rank loaders; links to the reading rank of a dispatcher are connected once and reused."""

    def __init__(self, peers: Peers, agreement: Agreement) -> None:
        self._peers = peers
        self._agreement = agreement
        self._links: dict[bool, RankLinks] = {}

    def loader(
        self,
        build: Callable[[Part], LoaderT],
        dataset: object,
        layout: DataLayout,
        for_training: bool,
        drop_last: bool,
        pins_memory: bool,
    ) -> LoaderT | DataloaderDispatcher:
        # A dispatcher that distributes the batches of all shards has to read all of them.
        part = WHOLE if layout.splits_streams else self._own_part(dataset, layout.part)
        kind = "training" if for_training else "evaluation"
        with self._agreement(f"making the loader of the {kind} data"):
            loader = build(part)
        if layout.readers is None:
            return loader
        assert layout.mesh is not None
        links = self._links_of(layout.readers, for_training)
        # The batches stay on the CPU, where their targets are counted.
        return DataloaderDispatcher(
            loader, layout.mesh, "cpu", layout.axis, drop_last=drop_last, links=links, pin_memory=pins_memory
        )

    def close(self) -> None:
        for links in self._links.values():
            links.close()
        self._links.clear()

    def _own_part(self, dataset: object, part: Part) -> Part:
        """Return this rank's shard of a map-style dataset; `WHOLE` if each rank got its own dataset."""
        with self._agreement("reading the length of the dataset"):
            length = len(dataset) if dataset is not None and is_map_style(dataset) else None
        lengths = self._peers.gather(length)
        # Different lengths mean that the caller has sharded the data already. Sharding it again would skip samples.
        if None not in lengths and len(set(lengths)) > 1:
            logger.info("The ranks have datasets of %s samples, which are used as shards of one dataset.", lengths)
            return WHOLE
        return part

    def _links_of(self, readers: Sequence[Sequence[int]], for_training: bool) -> RankLinks:
        """Return the links to the reading rank; connect them on the first call."""
        # Training and evaluation have separate links, since an evaluation runs while training has batches in flight.
        # Evaluations run one after another and share theirs instead of connecting again for each dataset.
        if for_training not in self._links:
            self._links[for_training] = RankLinks.connect(self._reading_group(readers))
        return self._links[for_training]

    def _reading_group(self, readers: Sequence[Sequence[int]]) -> ProcessGroup:
        """Return the gloo group of this rank and its reader; all ranks create all groups."""
        # With use_local_synchronization torch derives the name of a group from the number of groups that each member
        # has created before. Ranks may differ in that number, so every group is created by all ranks.
        return new_partition(readers, backend="gloo")


def warn_of_equal_batches(batch: Mapping[str, Any], layout: DataLayout, gather: Callable[[str], list[str]]) -> None:
    """Warn if two ranks that should read different batches got the same first batch; collective."""
    # Digests of the contents, because gathering the batches would send all their bytes. An empty digest does not count.
    digests = gather(_digest_of(batch) if layout.speaks else "")
    readers: dict[str, int] = {}
    for rank, digest in enumerate(digests):
        first = readers.setdefault(digest, rank)
        if digest and first < rank:
            logger.warning(
                "Ranks %d and %d got the same first batch. The trainer does not shard an iterable dataset or a loader that "
                "every rank reads separately. Pass different data on every rank (Hugging Face datasets have "
                "split_dataset_by_node). %s",
                *(first, rank, layout.remedy),
            )
            return


def _digest_of(batch: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}:{tuple(value.shape)}:{tensor_digest(value)}"
        for name, value in sorted(batch.items())
        if isinstance(value, Tensor) and value.numel()
    )
