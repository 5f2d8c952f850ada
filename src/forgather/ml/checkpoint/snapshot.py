"""The first half of a save: this rank's state, compared with its replicas, and the files it will become."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.declaration_checks import (
    Declaration,
    WeightPlan,
    check_coverage,
    check_names,
    declaration_of,
    has_copies,
    names_digest,
    refuse_incomplete_export,
    without_misleading_files,
    written_files,
)
from forgather.ml.checkpoint.encoding.codec import encode_state
from forgather.ml.checkpoint.encoding.digest import combine_digests, compute_state_hash, state_digests
from forgather.ml.checkpoint.errors import CheckpointSaveError, ReplicationError
from forgather.ml.checkpoint.files.planned_file import PlannedFile, RawContent, StateContent, WeightsContent
from forgather.ml.checkpoint.manifest import ComponentManifest, FileRecord
from forgather.ml.checkpoint.rank_layout import RankLayout, Ranks
from forgather.ml.checkpoint.replicas import ValidationLevel, format_divergence, validate_replication
from forgather.ml.checkpoint.sharing import ComponentSharing, Owner
from forgather.ml.checkpoint.weights.hf_files import describe_model, expected_weights
from forgather.ml.checkpoint.weights.module_weights import (
    ShardIndex,
    SharingMetadataT,
    index_bytes,
    index_name,
    make_shard_index,
    shard_name,
    sharing_of,
)
from forgather.ml.distributed import Peers

logger = logging.getLogger(__name__)

MODEL_KEY = "model"
METADATA_COMPONENT = "metadata"
"""The files beside the state that belong to no component: metrics, callbacks' state."""

_Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Snapshot:
    """What this rank writes; and what the manifest will say of components beside their files."""

    files: list[PlannedFile]
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    weight_names: dict[str, list[str]] = field(default_factory=dict)
    """The tensors of each weight file in this rank's directory, whoever writes it."""

    @property
    def num_bytes(self) -> int:
        return sum(file.content.num_bytes for file in self.files)


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others about its state."""

    names: dict[Declaration, str]
    digests: dict[str, str]
    has_weights: bool
    weights: _Shapes
    sharing: SharingMetadataT


@dataclass(frozen=True)
class _WeightFiles:
    """The weight files of this rank, with the tensors of each, and the index of its directory."""

    files: list[PlannedFile]
    names: list[tuple[str, list[str]]]
    index: ShardIndex
    tied: SharingMetadataT


@dataclass(frozen=True)
class SnapshotTaker:
    """Collects state on every rank and plans who writes which file."""

    components: Sequence[StateComponent]
    model: nn.Module | None
    model_parts: Sequence[nn.Module]
    model_preprocessor: Any
    shard_index: ShardIndex | None
    safetensors: bool
    process_groups: Mapping[str, ProcessGroup]
    layout: RankLayout
    peers: Peers

    def take(self, validate: bool, extra_files: Mapping[str, bytes], is_export: bool = False) -> Snapshot:
        """Collective. Raises before anything is written when a rank cannot give its state, or it is not as declared.

        What is to be exported must be a model that `from_pretrained` loads; of a checkpoint that is not asked.
        """
        states: dict[str, Any] = {}
        raw_files: dict[str, bytes] = {}
        compared = self._compared(validate)

        def collect() -> _Report:
            for component in self.components:
                if self._sharing(component).is_held_here:
                    states[component.key] = self._state_of(component)
            if self.layout.leads_storage and self._has_weights:
                raw_files.update(describe_model(self._described, self.model_preprocessor))
            return self._report(states, compared)

        reports = self._everywhere(collect, "collecting state")
        named = [self._sharing(component) for component in self._components_with_copies]
        check_names(named, states, [report.names for report in reports], self.peers)
        notes = self._compare(compared, states, reports)
        self._relay(states)
        files = [
            file for one in self.components if not self._is_weights(one) for file in self._state_files(one, states)
        ]
        weight_names: dict[str, list[str]] = {}
        if any(report.has_weights for report in reports):
            weight_files, model_notes, weight_names = self._plan_weights(states, reports, raw_files, is_export)
            files += weight_files
            notes.setdefault(MODEL_KEY, {}).update(model_notes)
        if self.layout.leads_storage:
            files += [PlannedFile(name, METADATA_COMPONENT, RawContent(data)) for name, data in extra_files.items()]
        return Snapshot(files, notes, weight_names)

    @property
    def _described(self) -> nn.Module:
        """The model that configuration files are about."""
        return _first(self.model, *self.model_parts)

    @property
    def _components_with_copies(self) -> list[StateComponent]:
        """Copies need at least two ranks."""
        return [one for one in self.components if has_copies(one)] if self.layout.world_size > 1 else []

    @property
    def _has_weights(self) -> bool:
        return any(self._is_weights(component) for component in self.components)

    def _is_weights(self, component: StateComponent) -> bool:
        """Modules are written as weight files; anything else under the same key is state like other state."""
        return component.key == MODEL_KEY and bool(self.model_parts)

    def _sharing(self, component: StateComponent) -> ComponentSharing:
        return ComponentSharing(component, self.layout)

    def _everywhere(self, work: Callable[[], Any], during: str) -> list[Any]:
        return on_every_rank(self.peers, work, during, CheckpointSaveError)

    def _state_of(self, component: StateComponent) -> Any:
        if self._is_weights(component):
            return _weights_of(self.model_parts)
        return encode_state(component.stateful.state_dict(), component.key)

    def _report(self, states: Mapping[str, Any], compared: Sequence[StateComponent]) -> _Report:
        names = {declaration_of(one): names_digest(states[one.key]) for one in self._components_with_copies}
        digests = {one.key: _overall_digest(one, states[one.key]) for one in compared}
        weights = states.get(MODEL_KEY, {}) if self._has_weights else {}
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
        return _Report(names, digests, self._has_weights, shapes, sharing_of(weights))

    def _compared(self, validate: bool) -> list[StateComponent]:
        """The components whose copies are compared in this save."""
        return [
            component
            for component in self._components_with_copies
            if (validate or component.validate_replication) and component.validation_level != ValidationLevel.NONE.value
        ]

    def _compare(
        self, compared: Sequence[StateComponent], states: Mapping[str, Any], reports: Sequence[_Report]
    ) -> dict[str, dict[str, Any]]:
        """Raise on every rank when a required component differs between its replicas; note it for an optional one.

        Equal replicas cost the one digest per component that is in the reports already. Every rank sees all
        reports, so all of them look closer at the same components.
        """
        notes: dict[str, dict[str, Any]] = {}
        for component in compared:
            owners = self._sharing(component).owners
            if all(len({reports[rank].digests[component.key] for rank in owner.ranks}) == 1 for owner in owners):
                notes[component.key] = {"replication": "verified"}
                continue
            lines = self._divergence(component, states[component.key])
            message = format_divergence(component.key, lines)
            if component.required:
                raise ReplicationError(message)
            logger.error("%s", message)
            notes[component.key] = {"replication": "diverged"}
        return notes

    def _divergence(self, component: StateComponent, state: Any) -> list[str]:
        group = self.process_groups.get(component.process_group_name or "")
        _, lines = validate_replication(state, ValidationLevel(component.validation_level), group)
        told = self.peers.gather(lines)
        return [line for owner in self._sharing(component).owners for line in told[owner.ranks[0]]]

    def _relay(self, states: dict[str, Any]) -> None:
        """Give copies to directories none of whose ranks holds them; only where storage is not shared."""
        relayed = [
            (component, owner)
            for component in self.components
            for owner in self._sharing(component).owners
            if self._sharing(component).is_relayed(owner)
        ]
        if not relayed:
            return
        mine = {
            (component.key, owner.number): states[component.key]
            for component, owner in relayed
            if self._sharing(component).holders(owner)[0] == self.layout.rank
        }
        for parcel in self.peers.gather(mine):
            for (key, number), state in parcel.items():
                owner_here = self._sharing(next(one for one in self.components if one.key == key)).own
                if owner_here.number == number:
                    states.setdefault(key, state)

    def _written_here(self, component: StateComponent) -> list[Owner]:
        sharing, storage = self._sharing(component), self.layout.storage
        return [owner for owner in sharing.owners_in(storage) if sharing.writer(owner, storage) == self.layout.rank]

    def _state_files(self, component: StateComponent, states: Mapping[str, Any]) -> list[PlannedFile]:
        sharing = self._sharing(component)
        return [
            PlannedFile(
                sharing.file_name(owner),
                component.key,
                StateContent(states[component.key]),
                owner.number,
                [] if owner.number is None else list(owner.ranks),
            )
            for owner in self._written_here(component)
        ]

    def _plan_weights(
        self, states: Mapping[str, Any], reports: Sequence[_Report], raw_files: Mapping[str, bytes], is_export: bool
    ) -> tuple[list[PlannedFile], dict[str, Any], dict[str, list[str]]]:
        """Collective. This rank's files of the model, the notes for the manifest, and the tensors of each weight file."""
        planned: list[_WeightFiles] = []

        def plan() -> WeightPlan:
            if not self._has_weights:
                return WeightPlan(())
            planned.append(self._weight_files(states, reports))
            return self._plan_of(planned[0])

        plans = self._everywhere(plan, "planning the weight files")
        storages = self.layout.storages
        check_coverage(plans, storages, [self._names_in(storage, reports) for storage in storages])
        if is_export:
            refuse_incomplete_export(plans, storages)
        files = [file for one in planned for file in one.files]
        if self.layout.leads_storage and planned:
            raw = without_misleading_files(raw_files, plans[self.layout.rank])
            weight_files = set(planned[0].index["weight_map"].values())
            if weight_files - {shard_name(1, 1, self.safetensors)}:
                raw[index_name(self.safetensors)] = index_bytes(planned[0].index)
            files += [PlannedFile(name, MODEL_KEY, RawContent(data)) for name, data in raw.items()]
        notes = {"param_sharing": planned[0].tied} if planned and planned[0].tied else {}
        return files, notes, written_files(plans, self.layout.storage)

    def _plan_of(self, planned: _WeightFiles) -> WeightPlan:
        if not self.layout.leads_storage:
            return WeightPlan(planned.names)
        weight_map = planned.index["weight_map"]
        expected = expected_weights(self._described)
        if expected is None:
            return WeightPlan(planned.names, weight_map, planned.tied)
        missing = expected.missing_from(weight_map)
        return WeightPlan(planned.names, weight_map, planned.tied, expected.class_name, missing)

    @property
    def _model_sharing(self) -> ComponentSharing:
        return self._sharing(next(one for one in self.components if one.key == MODEL_KEY))

    def _names_in(self, storage: Ranks, reports: Sequence[_Report]) -> list[str]:
        """The tensors of the model that a directory is to have."""
        sharing = self._model_sharing
        return [name for owner in sharing.owners_in(storage) for name in reports[sharing.holders(owner)[0]].weights]

    def _weight_files(self, states: Mapping[str, Any], reports: Sequence[_Report]) -> _WeightFiles:
        sharing = self._model_sharing
        owners = sharing.owners_in(self.layout.storage)
        shapes = [reports[sharing.holders(owner)[0]].weights for owner in owners]
        tied = _union([report.sharing for report in reports])
        index = None if self.shard_index is None else _in_format(self.shard_index, self.safetensors)
        if index is not None:
            tied = index["metadata"].get("param_sharing", tied)
        if index is None or len(owners) < len(sharing.owners):
            # A directory that has only some stages must not refer to tensors which are stored in another node's.
            index = make_shard_index(
                [_on_meta(one) for one in shapes], safetensors=self.safetensors, param_sharing_metadata=tied
            )
        files: list[PlannedFile] = []
        names_of_files: list[tuple[str, list[str]]] = []
        for owner in self._written_here(sharing.component):
            number = owners.index(owner)
            for file, names in _files_of(index, shapes[number], shapes[:number]).items():
                names_of_files.append((file, names))
                tensors = {name: states[MODEL_KEY][name] for name in names}
                ranks = [] if owner.number is None else list(owner.ranks)
                files.append(PlannedFile(file, MODEL_KEY, WeightsContent(tensors, tied), owner.number, ranks))
        return _WeightFiles(files, names_of_files, index, tied)


def describe_components(
    components: Sequence[StateComponent], snapshot: Snapshot, records: Sequence[FileRecord], layout: RankLayout
) -> dict[str, ComponentManifest]:
    """The manifest's entries, from the declarations and what was written."""
    described = {}
    for component in components:
        files = [record for record in records if record.component == component.key]
        pattern = component.sharing_pattern
        described[component.key] = ComponentManifest(
            key=component.key,
            sharing_pattern=pattern.value,
            ranks=sorted({record.writer_rank for record in files}),
            replicated_across=list(layout.everyone) if pattern is SharingPattern.REPLICATED else None,
            group_name=component.process_group_name,
            size_bytes=sum(record.size for record in files),
            checksum=files[0].checksum if len(files) == 1 else None,
            metadata={**component.metadata, **snapshot.notes.get(component.key, {})},
            required=component.required,
        )
    return described


def _first(*modules: nn.Module | None) -> nn.Module:
    # By identity: a module may define its own truth value.
    return next(module for module in modules if module is not None)


def _weights_of(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.state_dict().items():
            if not isinstance(value, Tensor):
                raise CheckpointSaveError(
                    f"model.{name} is a {type(value).__name__}, but weight files hold tensors only. Declare this state as a "
                    "component of its own."
                )
            weights.setdefault(name, value)
    return weights


def _overall_digest(component: StateComponent, state: Any) -> str:
    if component.validation_level == ValidationLevel.QUICK.value:
        return compute_state_hash(state)
    return combine_digests(state_digests(state))


def _on_meta(shapes: _Shapes) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}


def _union(groups_by_rank: Sequence[SharingMetadataT]) -> SharingMetadataT:
    union: SharingMetadataT = []
    for groups in groups_by_rank:
        union += [group for group in groups if group not in union]
    return union


def _files_of(index: ShardIndex, held: _Shapes, earlier: Sequence[_Shapes]) -> dict[str, list[str]]:
    """The files of an owner, with their tensors; a name that an earlier owner has is written there."""
    files: dict[str, list[str]] = {}
    for name in held:
        if name in index["weight_map"] and not any(name in shapes for shapes in earlier):
            files.setdefault(index["weight_map"][name], []).append(name)
    return files


def _in_format(index: ShardIndex, safetensors: bool) -> ShardIndex:
    """The index with files of the format asked for, whichever it was made for: readers trust the names."""
    files = sorted(set(index["weight_map"].values()))
    if all(file.endswith(".safetensors") == safetensors for file in files):
        return index
    renamed = {file: shard_name(number, len(files), safetensors) for number, file in enumerate(files, start=1)}
    weight_map = {name: renamed[file] for name, file in index["weight_map"].items()}
    return ShardIndex(metadata=index["metadata"], weight_map=weight_map)
