"""Snapshot: the first half of a save. Collects this rank's state, validates replicas and plans the files to write.

Nothing is written here. If a rank cannot supply its state, or replicas diverge, all ranks raise before any file exists.
The coordinator takes a snapshot and then writes it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeVar, cast

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.background.comparison import ComparedState, Comparison
from forgather.ml.checkpoint.background.live_reads import LiveReads
from forgather.ml.checkpoint.components import MODEL_KEY, SharingPattern, StateComponent
from forgather.ml.checkpoint.encoding.codec import encode_state
from forgather.ml.checkpoint.encoding.digest import combine_digests, compute_state_hash, state_digests
from forgather.ml.checkpoint.encoding.staging import on_host
from forgather.ml.checkpoint.errors import CheckpointSaveError, ReplicationError
from forgather.ml.checkpoint.files.planned_file import PlannedFile, RawContent, StateContent
from forgather.ml.checkpoint.manifest import ComponentManifest, FileRecord
from forgather.ml.checkpoint.metadata import METADATA_COMPONENT
from forgather.ml.checkpoint.rank_layout import RankLayout, Ranks
from forgather.ml.checkpoint.replicas import ValidationLevel, format_divergence, validate_replication
from forgather.ml.checkpoint.sharding.exchange import ShardExchange
from forgather.ml.checkpoint.sharding.sharded_state import ShardedStates
from forgather.ml.checkpoint.sharding.sharded_tensors import with_local_parts
from forgather.ml.checkpoint.sharing import (
    ComponentSharing,
    Declaration,
    check_names,
    declaration_of,
    has_copies,
    names_digest,
)
from forgather.ml.checkpoint.weights.hf_files import describe_model
from forgather.ml.checkpoint.weights.index import ShardIndex, index_bytes, index_file_name, shard_name
from forgather.ml.checkpoint.weights.plan import (
    HeldWeights,
    PlannedWeights,
    WeightPlanner,
    union_of_weights,
)
from forgather.ml.checkpoint.weights.plan_checks import (
    WeightPlan,
    check_coverage,
    refuse_incomplete_export,
    refuse_partial_declaration,
    without_misleading_files,
    written_files,
)
from forgather.ml.distributed import Peers

__all__ = ["METADATA_COMPONENT", "MODEL_KEY", "Snapshot", "SnapshotTaker", "describe_components"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHARDED_ON_NODES = (
    "save_on_each_node and save_on_all_ranks cannot be combined with sharded weights: each rank needs the files of all "
    "ranks to resume. Turn these settings off, and give all ranks one shared output_dir."
)

_States = dict[str, object]
"""Encoded state by component key. The state of the model is its tensors by name."""

_Notes = dict[str, dict[str, object]]
"""Additional manifest metadata by component key."""


@dataclass(frozen=True)
class DeclaredComponent:
    """Declaration of a component without its object, as sent to other ranks."""

    key: str
    pattern: SharingPattern
    family: str | None
    required: bool
    metadata: dict[str, object]


@dataclass(frozen=True)
class Snapshot:
    """Files that this rank will write, and metadata of the components for the manifest."""

    files: list[PlannedFile]
    notes: _Notes = field(default_factory=dict)
    weight_names: dict[str, list[str]] = field(default_factory=dict)
    """Tensor names of each weight file in this rank's directory, written by any rank."""
    components: list[DeclaredComponent] = field(default_factory=list)
    """Components of all ranks. A rank may have a component that other ranks lack."""
    exchange: ShardExchange | None = None
    """Source of sharded tensors, which other ranks hold in part."""
    comparison: Comparison | None = None
    """Replicas that the save still has to compare, in the background."""
    reads: LiveReads | None = None
    """Live tensors among staged ones; None if all tensors are live and training waits for the save."""

    @property
    def num_bytes(self) -> int:
        return sum(file.content.num_bytes for file in self.files)

    def write(self, directory: str, rank: int, begin: Callable[[], None] = lambda: None) -> list[FileRecord]:
        """Call `begin`, then write the files of this rank.

        The ranks of a shard group call this together: each sends its slices to the writers, even if `begin` or a write
        of its files fails.
        """
        with self.exchange or nullcontext():
            begin()
            return [self._write_file(number, directory, rank) for number in range(len(self.files))]

    def _write_file(self, number: int, directory: str, rank: int) -> FileRecord:
        if self.reads is None or self.reads.is_done:
            return self.files[number].write(directory, rank, self.exchange)
        record = self.files[number].write(directory, rank, self.exchange, partial(self.reads.note_bytes, number))
        self.reads.note_file(number)
        return record


@dataclass(frozen=True)
class _Report:
    """Description of one rank's state, as sent to the other ranks."""

    components: list[DeclaredComponent]
    names: dict[Declaration, str]
    digests: dict[str, str]
    has_weights: bool
    weights: HeldWeights
    shard_group: Ranks | None = None
    """Ranks with which this rank shards tensors."""


@dataclass(frozen=True)
class SnapshotTaker:
    """Collects state on every rank and plans the files that each rank writes."""

    components: Sequence[StateComponent]
    model: nn.Module | None
    model_parts: Sequence[nn.Module] | None
    """Modules of the component `model`; None if that component is not a module."""
    model_preprocessor: object
    shard_index: ShardIndex | None
    safetensors: bool
    process_groups: Mapping[str, ProcessGroup]
    layout: RankLayout
    peers: Peers

    def take(
        self,
        validate: bool,
        extra_files: Mapping[str, bytes],
        is_export: bool = False,
        compares_later: bool = False,
    ) -> Snapshot:
        """Take the snapshot. Collective. Raise if a rank cannot supply its state or contradicts its declaration.

        `is_export=True` requires a model that `from_pretrained` can load; a checkpoint does not require that.
        `compares_later=True` returns the comparison of replicas with the snapshot, for a background save.
        """
        states: _States = {}
        raw_files: dict[str, bytes] = {}
        later, sharded = self._compared_later(validate) if compares_later else [], ShardedStates()
        compared = [one for one in self._compared(validate) if one not in later]
        compared_keys = {component.key for component in compared}

        # Part of each state that this rank writes: all of it, unless tensors are sharded.
        parts: _States = {}

        # State stays on this rank, in the enclosing scope. `collect` returns only a small report to gather.
        def collect() -> _Report:
            for component in self.components:
                if self._sharing(component).is_held_here:
                    states[component.key] = self._state_of(component)
                    # The comparison reads all bytes, and so does the file. One copy serves both.
                    if component.key in compared_keys and self._sharing(component).written_here():
                        states[component.key] = on_host(states[component.key])
            # One rank per directory writes the configuration files.
            if self.layout.leads_storage and self._has_weights:
                raw_files.update(self._describe_model())
            report = self._report(states, compared)
            for component in self.components:
                if component.key in states:
                    parts[component.key] = sharded.own_part(
                        component, states[component.key], self._is_weights(component)
                    )
            return replace(report, weights=self._described_weights(parts), shard_group=sharded.ranks)

        # Every rank gets all reports, so every decision below is the same on all ranks and needs no further vote.
        reports = self._everywhere(collect, "collecting state")
        named = [self._sharing(component) for component in self._components_with_copies]
        check_names(named, states, [report.names for report in reports], self.peers)
        notes = self._compare(compared, states, reports)
        is_sharded = any(report.shard_group is not None for report in reports)
        if is_sharded and len(self.layout.storages) > 1:
            raise CheckpointSaveError(_SHARDED_ON_NODES)
        self._relay(parts)
        files, weight_names = self._plan_files(parts, reports, raw_files, is_export, notes)
        if self.layout.leads_storage:
            files += [PlannedFile(name, METADATA_COMPONENT, RawContent(data)) for name, data in extra_files.items()]
        exchange = sharded.exchange(files, self.peers) if is_sharded else None
        for component in self.components:
            if note := sharded.note(component.key):
                notes.setdefault(component.key, {}).update(note)
        comparison = Comparison([self._compared_state(one, states) for one in later]) if later else None
        declared = _union([report.components for report in reports])
        return Snapshot(files, notes, weight_names, declared, exchange, comparison)

    @property
    def _described(self) -> nn.Module | None:
        """Model that the configuration files describe."""
        # `is not None`, because a module may define its own truth value.
        return next((module for module in (self.model, *(self.model_parts or ())) if module is not None), None)

    def _describe_model(self) -> dict[str, bytes]:
        return {} if self._described is None else describe_model(self._described, self.model_preprocessor)

    @property
    def _components_with_copies(self) -> list[StateComponent]:
        """Components with copies to compare; none in a job with one rank."""
        return [one for one in self.components if has_copies(one)] if self.layout.world_size > 1 else []

    @property
    def _has_weights(self) -> bool:
        return any(self._is_weights(component) for component in self.components)

    def _is_weights(self, component: StateComponent) -> bool:
        """Return whether a component is written as weight files. "model" may also be an object with plain state."""
        return component.key == MODEL_KEY and self.model_parts is not None

    @cached_property
    def _sharings(self) -> dict[str, ComponentSharing]:
        # Cached, because each object computes its owners over all ranks of the job.
        return {component.key: ComponentSharing(component, self.layout) for component in self.components}

    def _sharing(self, component: StateComponent) -> ComponentSharing:
        return self._sharings[component.key]

    def _everywhere(self, work: Callable[[], T], during: str) -> list[T]:
        return on_every_rank(self.peers, work, during, CheckpointSaveError)

    def _state_of(self, component: StateComponent) -> object:
        if component.key == MODEL_KEY and self.model_parts is not None:
            return union_of_weights(self.model_parts)
        return encode_state(component.state_holder.state_dict(), component.key)

    def _report(self, states: _States, compared: Sequence[StateComponent]) -> _Report:
        # Name digests are cheap and taken for all copies. Content digests read every byte, so only on request.
        return _Report(
            components=[_declared(component) for component in self.components],
            names={declaration_of(one): names_digest(states[one.key]) for one in self._components_with_copies},
            digests={one.key: _overall_digest(one, with_local_parts(states[one.key])) for one in compared},
            has_weights=self._has_weights,
            weights=HeldWeights.describing({}),
        )

    def _described_weights(self, parts: _States) -> HeldWeights:
        # One holder describes the weights for all: with a description from each replica, reports would grow with the
        # number of ranks times the number of tensors.
        describes = self._has_weights and self._sharings[MODEL_KEY].is_described_here
        return HeldWeights.describing(_weights_in(parts) if describes else {})

    def _compared(self, validate: bool) -> list[StateComponent]:
        """Return the components with copies to compare in this save."""
        return [
            component
            for component in self._components_with_copies
            if (validate or component.validate_replication) and component.validation_level != ValidationLevel.NONE.value
        ]

    def _compared_later(self, validate: bool) -> list[StateComponent]:
        # Level "full" measures differences of tensors, which only the live state on all ranks has.
        return [one for one in self._compared(validate) if one.validation_level != ValidationLevel.FULL.value]

    def _compared_state(self, component: StateComponent, states: _States) -> ComparedState:
        owners = [owner.ranks for owner in self._sharing(component).owners]
        return ComparedState.of(component, owners, with_local_parts(states[component.key]))

    def _compare(self, compared: Sequence[StateComponent], states: _States, reports: Sequence[_Report]) -> _Notes:
        """Raise `ReplicationError` on every rank if replicas of a required component differ.

        For an optional component, log an error and return a note for the manifest.
        """
        notes: _Notes = {}
        # The reports already contain one digest per component, so equal replicas need no further communication.
        for component in compared:
            owners = self._sharing(component).owners
            if all(len({reports[rank].digests[component.key] for rank in owner.ranks}) == 1 for owner in owners):
                notes[component.key] = {"replication": "verified"}
                continue
            # Collective. All ranks see the same reports, so all of them get here for the same components.
            lines = self._divergence(component, states[component.key])
            message = format_divergence(component.key, lines)
            if component.required:
                raise ReplicationError(message)
            logger.error("%s", message)
            notes[component.key] = {"replication": "diverged"}
        return notes

    def _divergence(self, component: StateComponent, state: object) -> list[str]:
        # PER_GROUP copies are compared within their group; REPLICATED ones (no group name) across the world.
        group = self.process_groups.get(component.process_group_name or "")
        _, lines = validate_replication(with_local_parts(state), ValidationLevel(component.validation_level), group)
        # Each group compared its own copies. Gather, so that every rank raises with the lines of all groups.
        told = self.peers.gather(lines)
        return [line for owner in self._sharing(component).owners for line in told[owner.ranks[0]]]

    def _relay(self, states: _States) -> None:
        """Send copies to directories that need them but have no rank that holds them. Only with separate storages.

        For example, GLOBAL state lives on rank 0, but with storage per node every node needs a copy of it.
        """
        relayed = [
            (component, owner)
            for component in self.components
            for owner in self._sharing(component).owners
            if self._sharing(component).is_relayed(owner)
        ]
        # The layout is the same on all ranks, and so is this decision: the gather below is collective.
        if not relayed:
            return
        mine = {
            (component.key, owner.number): states[component.key]
            for component, owner in relayed
            if self._sharing(component).holders(owner)[0] == self.layout.rank
        }
        for parcel in self.peers.gather(mine):
            # `setdefault` below keeps this rank's own state if it has any.
            for (key, number), state in parcel.items():
                if self._sharings[key].own.number == number:
                    states.setdefault(key, state)

    def _state_files(self, component: StateComponent, states: _States) -> list[PlannedFile]:
        sharing = self._sharing(component)
        return [
            PlannedFile(
                sharing.file_name(owner),
                component.key,
                StateContent(states[component.key]),
                owner.number,
                owner.ranks_of_file,
            )
            for owner in sharing.written_here()
        ]

    def _plan_files(
        self,
        parts: _States,
        reports: Sequence[_Report],
        raw_files: Mapping[str, bytes],
        is_export: bool,
        notes: _Notes,
    ) -> tuple[list[PlannedFile], dict[str, list[str]]]:
        """Return this rank's state and model files, and the tensors per weight file; add notes on the model. Collective."""
        files = [file for one in self.components if not self._is_weights(one) for file in self._state_files(one, parts)]
        if not any(report.has_weights for report in reports):
            return files, {}
        weight_files, model_notes, weight_names = self._plan_weights(parts, reports, raw_files, is_export)
        notes.setdefault(MODEL_KEY, {}).update(model_notes)
        return files + weight_files, weight_names

    def _plan_weights(
        self, states: _States, reports: Sequence[_Report], raw_files: Mapping[str, bytes], is_export: bool
    ) -> tuple[list[PlannedFile], dict[str, object], dict[str, list[str]]]:
        """Return this rank's model files, metadata for the manifest, and the tensors per weight file. Collective."""
        refuse_partial_declaration([report.has_weights for report in reports])
        planner = WeightPlanner(
            self._sharings[MODEL_KEY],
            [report.weights for report in reports],
            self.shard_index,
            self.safetensors,
            is_sharded=any(report.shard_group is not None for report in reports),
        )
        # As in `take`: the plan holds tensors, so only its description is gathered.
        planned: list[PlannedWeights] = []

        def plan() -> WeightPlan:
            planned.append(planner.plan(_weights_in(states)))
            return planned[0].told_to_others(self._described if self.layout.leads_storage else None)

        plans = self._everywhere(plan, "planning the weight files")
        storages = self.layout.storages
        check_coverage(plans, storages, [planner.names_in(storage) for storage in storages])
        if is_export:
            refuse_incomplete_export(plans, storages)
        files = list(planned[0].files)
        if self.layout.leads_storage:
            raw = without_misleading_files(raw_files, plans[self.layout.rank])
            # As in transformers, a single weight file under its default name needs no index.
            weight_files = set(planned[0].index["weight_map"].values())
            if weight_files - {shard_name(1, 1, self.safetensors)}:
                raw[index_file_name(self.safetensors)] = index_bytes(planned[0].index)
            files += [PlannedFile(name, MODEL_KEY, RawContent(data)) for name, data in raw.items()]
        notes: dict[str, object] = {"param_sharing": planned[0].tied} if planned[0].tied else {}
        return files, notes, written_files(plans, self.layout.storage)


def _weights_in(states: _States) -> Mapping[str, Tensor]:
    """Return the model's tensors; empty on ranks that do not hold it."""
    return cast(Mapping[str, Tensor], states.get(MODEL_KEY, {}))


def _declared(component: StateComponent) -> DeclaredComponent:
    return DeclaredComponent(
        component.key,
        component.sharing_pattern,
        component.process_group_name,
        component.required,
        dict(component.metadata),
    )


def _union(by_rank: Sequence[Sequence[DeclaredComponent]]) -> list[DeclaredComponent]:
    """Return every component once, as declared by its lowest rank."""
    union: dict[str, DeclaredComponent] = {}
    for declared in by_rank:
        for component in declared:
            union.setdefault(component.key, component)
    return list(union.values())


def describe_components(
    snapshot: Snapshot, records: Sequence[FileRecord], layout: RankLayout
) -> dict[str, ComponentManifest]:
    """Return the manifest's component entries, from the declarations and the written files."""
    files_of: dict[str, list[FileRecord]] = {}
    for record in records:
        files_of.setdefault(record.component, []).append(record)
    described = {}
    for component in snapshot.components:
        files = files_of.get(component.key, [])
        # `ranks` are the writers. A component with several files has no single checksum; each file record has its own.
        pattern = component.pattern
        described[component.key] = ComponentManifest(
            key=component.key,
            sharing_pattern=pattern.value,
            ranks=sorted({record.writer_rank for record in files}),
            replicated_across=list(layout.everyone) if pattern is SharingPattern.REPLICATED else None,
            group_name=component.family,
            size_bytes=sum(record.size for record in files),
            checksum=files[0].checksum if len(files) == 1 else None,
            metadata={**component.metadata, **snapshot.notes.get(component.key, {})},
            required=component.required,
        )
    return described


def _overall_digest(component: StateComponent, state: object) -> str:
    if component.validation_level == ValidationLevel.QUICK.value:
        return compute_state_hash(state)
    return combine_digests(state_digests(state))
