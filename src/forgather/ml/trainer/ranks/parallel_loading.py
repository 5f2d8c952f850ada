"""Parallel loading: per-rank shards of the batches, read by each rank or sent by a dispatcher rank.

All ranks build their loaders together: an error on one rank is raised on all. `RankTeam` calls this module.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from forgather.ml.checkpoint.encoding.codec import encode_state
from forgather.ml.checkpoint.encoding.digest import combine_digests, leaves_by_path, state_digests
from forgather.ml.checkpoint.errors import StateEncodingError
from forgather.ml.distributed import Peers
from forgather.ml.distributed.groups import new_partition
from forgather.ml.distributed.rank_links import RankLinks
from forgather.ml.trainer.dataloader_dispatcher import DataloaderDispatcher
from forgather.ml.trainer.loading.builders import kind_of, read_apart
from forgather.ml.trainer.loading.data_order import WHOLE, Part, stable_seed
from forgather.ml.trainer.loading.data_types import MapDataset
from forgather.ml.trainer.loading.random_numbers import generators_apart
from forgather.ml.trainer.setup.rank_settings import ranks_text
from forgather.ml.trainer.setup.seeding import seed_host_generators

logger = logging.getLogger(__name__)

BuildLoader = Callable[[Part], Any]
"""Builds the loader for one shard of the data, for training (`ResumableLoader`) or for evaluation."""
LoaderT = TypeVar("LoaderT", bound=Iterable[Any])
Agreement = Callable[[str], AbstractContextManager[None]]

_MOST_COMPARED = 4
"""Samples of a map-style dataset that ranks compare: the first, the last, and some between them."""
_INCOMPARABLE = ""


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
    is_sharded: bool | None = None
    """Without a dispatcher: whether each rank passed its own shard (`data_is_sharded`); None if the samples decide."""
    num_workers: int = 0
    """Workers of a loader. With any, this process reads no samples, not even to compare them."""

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
        self._logged: set[str] = set()

    def loader(
        self,
        build: Callable[[Part], LoaderT],
        dataset: object,
        layout: DataLayout,
        for_training: bool,
        drop_last: bool,
        pins_memory: bool,
    ) -> LoaderT | DataloaderDispatcher:
        kind = "training" if for_training else "evaluation"
        # A dispatcher that distributes the batches of all shards has to read all of them.
        part = WHOLE if layout.splits_streams else self._own_part(dataset, layout, kind)
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

    def _own_part(self, dataset: object, layout: DataLayout, kind: str) -> Part:
        """Return this rank's shard of a map-style dataset; `WHOLE` if each rank got its own dataset; collective."""
        if layout.part.num_parts == 1:
            return layout.part
        with self._agreement(f"reading samples of the {kind} data"):
            excerpt = _Excerpt.of(dataset, layout) if layout.speaks and dataset is not None else None
        try:
            decision = _decide(self._peers.gather(excerpt), layout.is_sharded, kind)
        except ValueError:
            # A rank that exits closes its connections, so none may leave before all have the excerpts.
            self._peers.gather(None)
            raise
        if decision is None:
            return layout.part
        is_sharded, reason = decision
        # Named datasets are evaluated again and again.
        if self._peers.rank == 0 and reason not in self._logged:
            self._logged.add(reason)
            logger.info("%s", reason)
        return WHOLE if is_sharded else layout.part

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
    tensors = {name: one for name, one in batch.items() if isinstance(one, Tensor) and one.numel()}
    # Digests of the contents, because gathering the batches would send all their bytes. An empty digest does not count.
    digests = gather(_digest_of(tensors) if layout.speaks and tensors else _INCOMPARABLE)
    readers: dict[str, int] = {}
    for rank, digest in enumerate(digests):
        first = readers.setdefault(digest, rank)
        if digest and first < rank:
            logger.warning(
                "Ranks %d and %d got the same first batch. The trainer does not shard an iterable dataset or a loader that "
                "every rank reads separately, nor any dataset with data_is_sharded=True. Pass different data on every rank "
                "(Hugging Face datasets have split_dataset_by_node). %s",
                *(first, rank, layout.remedy),
            )
            return


@dataclass(frozen=True)
class _Excerpt:
    """Kind and length of the dataset of one rank, and the digests of some samples."""

    kind: str
    length: int = 0
    digests: Sequence[str] = ()

    @classmethod
    def of(cls, dataset: object, layout: DataLayout) -> "_Excerpt":
        kind = kind_of(dataset)
        if kind != "map":
            return cls(kind)
        samples: Any = dataset
        excerpt = cls(kind, len(samples))
        if layout.is_sharded or not excerpt.length:
            return excerpt
        return cls(kind, excerpt.length, _sample_digests(samples, excerpt.places, layout.num_workers))

    @property
    def places(self) -> list[int]:
        last = self.length - 1
        return (
            sorted({last * number // (_MOST_COMPARED - 1) for number in range(_MOST_COMPARED)}) if self.length else []
        )


def _decide(excerpts: Sequence[_Excerpt | None], is_sharded: bool | None, kind: str) -> tuple[bool, str] | None:
    """Return whether map-style datasets are shards already, and the reason; None for streams and loaders.

    The argument is the setting `data_is_sharded`. Raise ValueError if it contradicts the data, or if it is None and the
    data leave a doubt: a wrong guess would leave out samples, or train on them twice.
    """
    found = {rank: excerpt for rank, excerpt in enumerate(excerpts) if excerpt is not None}
    others = sorted({excerpt.kind for excerpt in found.values()} - {"map"})
    if others and is_sharded is False:
        name = "an iterable dataset" if others[0] == "iterable" else "a loader of batches"
        raise ValueError(
            f"data_is_sharded=False cannot be used with {name} as {kind} data: the trainer shards only map-style datasets, "
            "with __len__ and __getitem__. Pass different data on every rank, and remove data_is_sharded."
        )
    if others or not found:
        return None
    lengths: dict[int, list[int]] = {}
    for rank, excerpt in found.items():
        lengths.setdefault(excerpt.length, []).append(rank)
    sizes = "; ".join(f"{length} samples on {ranks_text(ranks)}" for length, ranks in lengths.items())
    if is_sharded:
        return True, f"The {kind} datasets are used as shards, because data_is_sharded=True: {sizes}."
    remedy = "If these are shards, set data_is_sharded=True. Otherwise pass the same complete dataset on every rank."
    if len(lengths) > 1:
        raise ValueError(
            f"The {kind} datasets of the ranks have different lengths: {sizes}. They may be shards, or incomplete copies of "
            f"one dataset{_against(is_sharded)}. {remedy}"
        )
    (length,) = lengths
    places, columns = (
        next(iter(found.values())).places,
        list(zip(*(one.digests for one in found.values()), strict=True)),
    )
    known = [(place, column) for place, column in zip(places, columns, strict=True) if _INCOMPARABLE not in column]
    if not known and length and is_sharded is None:
        raise ValueError(
            f"The {kind} datasets of the ranks have {length} samples each, but their samples cannot be compared: reading one "
            "twice gives different values, raises an error, or gives objects other than numbers, text, arrays and tensors. If "
            "every rank has the same dataset, set data_is_sharded=False. If every rank has its own shard, set it to True."
        )
    unlike = [(place, column) for place, column in known if len(set(column)) > 1]
    compared = f"{len(known)} of {sizes}"
    if not unlike:
        why = f"the samples are equal on all ranks (compared: {compared})" if known else "data_is_sharded=False"
        return False, f"The {kind} dataset is sharded by the trainer: {why}."
    if is_sharded is None and all(len(set(column)) == len(column) for _, column in known):
        return True, f"The {kind} datasets are used as shards: every rank has different samples (compared: {compared})."
    (place, column), ranks = unlike[0], list(found)
    other = next(rank for rank, digest in zip(ranks, column, strict=True) if digest != column[0])
    raise ValueError(
        f"The {kind} datasets of the ranks have {length} samples each, but sample {place} differs between ranks {ranks[0]} and "
        f"{other}{_against(is_sharded) or ', while others are equal'}. {remedy}"
    )


def _against(is_sharded: bool | None) -> str:
    return "" if is_sharded is None else ", and data_is_sharded=False says that all ranks have the same dataset"


def _sample_digests(dataset: MapDataset, places: Sequence[int], num_workers: int) -> list[str]:
    """Return digests of samples that are equal on all ranks for equal content, without a draw from the generators."""
    with generators_apart():
        digests = read_apart(_Digests(dataset), [*places, *places], num_workers)
    # A sample with random numbers of its own differs in the second reading.
    pairs = zip(digests[: len(places)], digests[len(places) :], strict=True)
    return [first if first == second else _INCOMPARABLE for first, second in pairs]


class _Digests:
    """Dataset of the digests of another one. Random augmentation draws the same numbers on all ranks."""

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> str:
        seed_host_generators(stable_seed(index))
        try:
            sample = self._dataset[index]
        except Exception:  # noqa: BLE001 - training names the sample, unless skip_samples leaves it out
            return _INCOMPARABLE
        return _digest_of(sample)


def _digest_of(content: object) -> str:
    """Return a digest of tensors, arrays, numbers and text; empty for content with other objects."""
    # PIL images are arrays too.
    leaves = {
        path: np.asarray(leaf) if hasattr(leaf, "__array_interface__") else leaf
        for path, leaf in leaves_by_path(content).items()
    }
    try:
        encode_state(leaves)
    except StateEncodingError:
        return _INCOMPARABLE
    return combine_digests(state_digests(leaves))
