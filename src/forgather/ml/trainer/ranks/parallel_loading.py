"""Parallel loading: which batches each rank reads, or is sent by the rank that reads for it."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from forgather.ml.checkpoint.encoding.digest import tensor_digest
from forgather.ml.distributed import Peers
from forgather.ml.distributed.environment import get_requested_timeout
from forgather.ml.distributed.rank_links import RankLinks
from forgather.ml.trainer.dataloader_dispatcher import DataloaderDispatcher
from forgather.ml.trainer.loading.builders import is_map_style
from forgather.ml.trainer.loading.data_order import WHOLE, Part

logger = logging.getLogger(__name__)

BuildLoader = Callable[[Part], Any]
"""Builds the loader of one part of the data, for training (`ResumableLoader`) or for evaluation."""
LoaderT = TypeVar("LoaderT", bound=Iterable[Any])
Agreement = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class DataLayout:
    """How a strategy divides the batches of a step between ranks."""

    part: Part = WHOLE
    """The part of every step's batches that this rank trains on."""
    speaks: bool = True
    """Of the ranks that train on the same batches, whether this is the one that counts them."""
    readers: Sequence[Sequence[int]] | None = None
    """Groups of ranks that one rank reads for; None: every rank reads its own batches."""
    reads_whole: bool = False
    """With readers: the reader reads the batches of all parts and distributes them along `axis`."""
    mesh: DeviceMesh | None = None
    axis: int | None = None
    remedy: str = "Or set dispatch_batches=True: rank 0 then reads for all."
    """What to do when ranks read the same stream."""

    @property
    def splits_streams(self) -> bool:
        """Whether a stream reaches each rank in parts, so that ranks cannot read the same data by mistake."""
        return self.readers is not None and self.reads_whole


class ParallelLoading:
    """Builds the loader of a rank; links to a dispatcher's reader are made once and used again."""

    def __init__(self, peers: Peers, agreement: Agreement) -> None:
        self._peers = peers
        self._agreement = agreement
        self._links: dict[bool, RankLinks] = {}

    def loader(
        self, build: Callable[[Part], LoaderT], dataset: object, layout: DataLayout, for_training: bool, drop_last: bool
    ) -> LoaderT | DataloaderDispatcher:
        part = WHOLE if layout.splits_streams else self._own_part(dataset, layout.part)
        kind = "training" if for_training else "evaluation"
        with self._agreement(f"making the loader of the {kind} data"):
            loader = build(part)
        if layout.readers is None:
            return loader
        assert layout.mesh is not None
        links = self._links_of(layout.readers, for_training)
        return DataloaderDispatcher(loader, layout.mesh, "cpu", layout.axis, drop_last=drop_last, links=links)

    def close(self) -> None:
        for links in self._links.values():
            links.close()
        self._links.clear()

    def _own_part(self, dataset: object, part: Part) -> Part:
        """This rank's part of a map-style dataset; other datasets of a rank are a part of the data already."""
        with self._agreement("asking the dataset for its length"):
            length = len(dataset) if dataset is not None and is_map_style(dataset) else None
        lengths = self._peers.gather(length)
        if None not in lengths and len(set(lengths)) > 1:
            logger.info("The ranks were given datasets of %s samples, which are taken for the parts of one.", lengths)
            return WHOLE
        return part

    def _links_of(self, readers: Sequence[Sequence[int]], for_training: bool) -> RankLinks:
        """Evaluations follow one another and share their links, which would otherwise be new ones for each dataset."""
        if for_training not in self._links:
            self._links[for_training] = RankLinks.connect(self._reading_group(readers))
        return self._links[for_training]

    def _reading_group(self, readers: Sequence[Sequence[int]]) -> ProcessGroup:
        """A group of the ranks that one rank reads for. All ranks take part in making every group: torch names a group that
        is made by its members alone after the number of groups that each has made before, and ranks may differ in that.
        """
        own = None
        for ranks in readers:
            group = dist.new_group(list(ranks), backend="gloo", timeout=get_requested_timeout())
            own = group if self._peers.rank in ranks else own
        assert isinstance(own, ProcessGroup), "every rank has a reader"
        return own


def warn_of_equal_batches(batch: Mapping[str, Any], layout: DataLayout, gather: Callable[[str], list[str]]) -> None:
    """Warn if two ranks that should have batches of their own got the same first batch; collective."""
    digests = gather(_digest_of(batch) if layout.speaks else "")
    for rank, digest in enumerate(digests):
        first = digests.index(digest)
        if digest and first < rank:
            logger.warning(
                "Ranks %d and %d got the same first batch. An iterable dataset or a ready loader that every rank reads "
                "for itself is not split by the trainer: every rank must be given data of its own (Hugging Face "
                "datasets have split_dataset_by_node). %s",
                *(first, rank, layout.remedy),
            )
            return


def _digest_of(batch: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}:{tuple(value.shape)}:{tensor_digest(value)}"
        for name, value in sorted(batch.items())
        if isinstance(value, Tensor) and value.numel()
    )
