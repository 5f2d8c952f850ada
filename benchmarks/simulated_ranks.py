"""Simulated ranks of a large job: torch's fake process group, and the values that other ranks would send to rank 0.

The fake group carries no messages. `SimulatedRanks` answers each gather of Python objects with the declarations of such
a job. The clock stops meanwhile. All other code is the code of a real job.
"""

import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from forgather.ml.checkpoint.all_ranks import _Outcome
from forgather.ml.checkpoint.components import MODEL_KEY, StateComponent
from forgather.ml.checkpoint.manifest import FileRecord
from forgather.ml.checkpoint.rank_layout import Membership, RankLayout, _Place
from forgather.ml.checkpoint.sharing import ComponentSharing
from forgather.ml.checkpoint.snapshot import _Report
from forgather.ml.checkpoint.weights.plan import HeldWeights
from forgather.ml.checkpoint.weights.plan_checks import WeightPlan
from forgather.ml.distributed import Peers, rank_links
from forgather.ml.trainer.pipeline.pipeline_model import PipelineModel

RANKS_PER_NODE = 8
_CHECKSUM = "0123456789abcdef" * 2
_FILE_BYTES = 2**20
_NO_WEIGHTS = HeldWeights({}, [])


class PausingClock:
    """Clock that does not count the sections inside `paused`. It counts CPU time, because rank 0 waits for no rank."""

    def __init__(self) -> None:
        self._paused = 0.0
        self._depth = 0

    def now(self) -> float:
        return time.process_time() - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        started = time.process_time()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._paused += time.process_time() - started


class SimulatedRanks:
    """Ranks of a job besides rank 0, in pipelines of `pipeline_size` ranks (1: each rank has the full model)."""

    def __init__(self, num_ranks: int, pipeline_size: int, clock: PausingClock) -> None:
        self.num_ranks = num_ranks
        self._size = pipeline_size
        self._clock = clock
        self._groups: Mapping[str, Callable[[int], range]] = {
            "ddp_group": lambda rank: range(num_ranks),
            "pp_group": lambda rank: range(rank - rank % pipeline_size, rank - rank % pipeline_size + pipeline_size),
            "dp_group": lambda rank: range(rank % pipeline_size, num_ranks, pipeline_size),
        }
        self._held: list[HeldWeights] = []
        """Weights at each position of a pipeline; none if every rank has the full model."""
        self._files: list[dict[str, list[str]]] = []
        self.num_gathers = 0
        self.num_bytes = 0
        """Bytes that rank 0 has received in gathers, if every rank sent its value."""

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Run the body as rank 0 of the job."""
        new_group = dist.new_group

        def fake_group(*args: Any, **options: Any) -> Any:
            return new_group(*args, **{**options, "backend": "fake"})

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.num_ranks)
        try:
            with (
                mock.patch.object(dist, "new_group", fake_group),
                mock.patch.object(sys.modules[Peers.__module__], "gather_payloads", self._gather),
                # Sockets would be connected to processes that do not exist.
                mock.patch.object(rank_links, "_MOST_RANKS", 0),
            ):
                yield
        finally:
            dist.destroy_process_group()

    def hold(self, pipeline: PipelineModel) -> None:
        """Give every rank the stages of its position."""
        stored = pipeline.whole.state_dict(keep_vars=True)
        seen: set[str] = set()
        for names in pipeline.names_of_ranks:
            own = {name: stored[name] for name in names if name in stored}
            self._held.append(HeldWeights.describing(own))
            files: dict[str, list[str]] = {}
            for name in own:
                if name in pipeline.shard_index["weight_map"] and name not in seen:
                    files.setdefault(pipeline.shard_index["weight_map"][name], []).append(name)
            self._files.append(files)
            seen.update(own)

    def records(
        self, components: Sequence[StateComponent], layout: RankLayout, weight_names: Mapping[str, list[str]]
    ) -> list[FileRecord]:
        """Return the records of all files of a save, as the ranks would report them after writing."""
        position_of = {file: place for place, files in enumerate(self._files) for file in files}
        records = []
        for component in components:
            sharing = ComponentSharing(component, layout)
            owners = sharing.owners
            if component.key != MODEL_KEY:
                files = [(sharing.file_name(owner), owner, []) for owner in owners]
            else:
                # The first pipeline writes the weights, and the copies are numbered by position.
                files = [(file, owners[position_of.get(file, 0)], names) for file, names in weight_names.items()]
            for name, owner, tensors in files:
                sums = dict.fromkeys(tensors, _CHECKSUM)
                about = (owner.ranks[0], component.key, sums, owner.number, owner.ranks_of_file)
                records.append(FileRecord(name, _FILE_BYTES, _CHECKSUM, *about))
        return records

    def _gather(self, payload: bytes, group: ProcessGroup, device: torch.device) -> list[bytes]:
        """Return what all ranks of the group would send; replaces `gather_payloads`."""
        with self._clock.paused():
            own = pickle.loads(pickle.loads(payload))
            known = {payload: payload}
            payloads = [payload]
            for rank in dist.get_process_group_ranks(group)[1:]:
                sent = pickle.dumps(pickle.dumps(self._value_of(own, rank)))
                payloads.append(known.setdefault(sent, sent))
            self.num_gathers += 1
            self.num_bytes += sum(map(len, payloads))
            return payloads

    def _value_of(self, own: Any, rank: int) -> Any:
        if isinstance(own, _Outcome):
            return replace(own, value=self._value_of(own.value, rank))
        if isinstance(own, _Place):
            groups = {name: Membership.of(tuple(self._groups[name](rank)), rank) for name in own.groups}
            return _Place(rank % RANKS_PER_NODE, f"node-{rank // RANKS_PER_NODE}", groups)
        if isinstance(own, _Report):
            return self._report_of(own, rank)
        if isinstance(own, WeightPlan):
            return WeightPlan(list(self._files[rank].items()) if self._writes_weights(rank) else [])
        return own

    def _report_of(self, own: _Report, rank: int) -> _Report:
        # Stages have different tensors and so different digests. Replicas have the same.
        mark = f"{rank % self._size}-" if rank % self._size else ""
        in_groups = {component.key for component in own.components if component.family is not None}
        names = {one: f"{mark}{digest}" if one[0] in in_groups else digest for one, digest in own.names.items()}
        digests = {key: f"{mark}{digest}" if key in in_groups else digest for key, digest in own.digests.items()}
        weights = self._held[rank] if self._writes_weights(rank) else _NO_WEIGHTS
        return replace(own, names=names, digests=digests, weights=weights)

    def _writes_weights(self, rank: int) -> bool:
        return rank < len(self._held)
