"""Plan of the weight files of one save: which rank writes which shard with which tensors.

Every rank computes the shard index of its directory from the gathered metadata of all ranks. Snapshots create the plan,
and `plan_checks.py` compares the plans of all ranks before anything is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.components import MODEL_KEY
from forgather.ml.checkpoint.errors import CheckpointSaveError
from forgather.ml.checkpoint.files.planned_file import PlannedFile, WeightsContent
from forgather.ml.checkpoint.rank_layout import Ranks
from forgather.ml.checkpoint.sharing import ComponentSharing, Owner
from forgather.ml.checkpoint.weights.hf_files import expected_weights
from forgather.ml.checkpoint.weights.index import (
    ShardIndex,
    SharingMetadataT,
    in_format,
    make_shard_index,
    sharing_of,
    tensor_identity,
)
from forgather.ml.checkpoint.weights.plan_checks import WeightPlan

_Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class HeldWeights:
    """Metadata of the weights of a rank: name, shape and dtype, and groups of tied names; no tensors."""

    shapes: _Shapes
    tied: SharingMetadataT

    @classmethod
    def describing(cls, weights: Mapping[str, Tensor]) -> "HeldWeights":
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
        return cls(shapes, sharing_of(weights))


@dataclass(frozen=True)
class PlannedWeights:
    """Weight files of this rank with their tensors, and the shard index of its directory."""

    files: list[PlannedFile]
    names: list[tuple[str, list[str]]]
    index: ShardIndex
    tied: SharingMetadataT

    def told_to_others(self, model: nn.Module | None) -> WeightPlan:
        """Return the plan to send to the other ranks; only the rank that leads a directory passes `model`."""
        if model is None:
            return WeightPlan(self.names)
        # The leader alone adds the index and the expected names. They are the same on all ranks of a directory, and
        # large.
        weight_map = self.index["weight_map"]
        expected = expected_weights(model)
        if expected is None:
            return WeightPlan(self.names, weight_map, self.tied)
        return WeightPlan(self.names, weight_map, self.tied, expected.class_name, expected.missing_from(weight_map))


@dataclass(frozen=True)
class WeightPlanner:
    """Planner that divides the weights of all ranks into files; every rank of a directory computes the same index."""

    sharing: ComponentSharing
    held: Sequence[HeldWeights]
    """Metadata of every rank of the job, by rank."""
    shard_index: ShardIndex | None
    safetensors: bool
    is_sharded: bool = False
    """Whether ranks divide the names of a module between them, so that `shard_index` does not know who writes what."""

    def plan(self, weights: Mapping[str, Tensor]) -> PlannedWeights:
        """Return the files that this rank writes."""
        owners = self.sharing.owners_in(self.sharing.layout.storage)
        shapes = [self._shapes_of(owner) for owner in owners]
        index, tied = self._index_and_ties(shapes, is_whole=len(owners) == len(self.sharing.owners))
        files: list[PlannedFile] = []
        names_of_files: list[tuple[str, list[str]]] = []
        # A tensor that two owners hold is written once, by the first of them.
        first_owner: dict[str, Owner] = {}
        for owner, held in zip(owners, shapes, strict=True):
            for name in held:
                first_owner.setdefault(name, owner)
        for owner in self.sharing.written_here():
            own_names = [name for name in self._shapes_of(owner) if first_owner[name] is owner]
            for file, names in _files_of(index, own_names).items():
                names_of_files.append((file, names))
                content = WeightsContent({name: weights[name] for name in names}, tied)
                files.append(PlannedFile(file, MODEL_KEY, content, owner.number, owner.ranks_of_file))
        return PlannedWeights(files, names_of_files, index, tied)

    def names_in(self, storage: Ranks) -> list[str]:
        """Return the tensor names of the model that a directory must contain."""
        return [name for owner in self.sharing.owners_in(storage) for name in self._shapes_of(owner)]

    def _shapes_of(self, owner: Owner) -> _Shapes:
        # All holders of a copy have the same tensors, so the first holder stands for all.
        return self.held[self.sharing.holders(owner)[0]].shapes

    def _index_and_ties(self, shapes: Sequence[_Shapes], is_whole: bool) -> tuple[ShardIndex, SharingMetadataT]:
        tied = _union([held.tied for held in self.held])
        # The index of the user is used only if the directory holds the full model, its ties always. Ties between stages
        # are in no other place.
        index = None if self.shard_index is None else in_format(self.shard_index, self.safetensors)
        if index is not None:
            tied = index["metadata"].get("param_sharing", tied)
        if index is None or not is_whole or self.is_sharded:
            # A directory with only some of the stages must not refer to tensors in the directory of another node.
            on_meta = [_on_meta(held) for held in shapes]
            index = make_shard_index(on_meta, safetensors=self.safetensors, param_sharing_metadata=tied)
        return index, tied


def union_of_weights(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the tensors of all modules by FQN; raise if two modules have different tensors of the same name."""
    weights: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.state_dict().items():
            if not isinstance(tensor, Tensor):
                raise CheckpointSaveError(
                    f"model.{name} is a {type(tensor).__name__}, but weight files contain only tensors. Declare this state "
                    "as a separate component."
                )
            # Two stages of one rank may both hold a tied tensor. Equal copies are stored once.
            if not _is_same(weights.setdefault(name, tensor), tensor):
                raise CheckpointSaveError(
                    f"Component 'model': two of its {len(parts)} modules have a tensor named {name}, with different "
                    "content. Weights are stored by FQN, so one of them would be lost. Use the names of the full model in "
                    "all modules."
                )
    return weights


def _is_same(first: Tensor, second: Tensor) -> bool:
    if first is second or tensor_identity(first) == tensor_identity(second):
        return True
    if (first.shape, first.dtype) != (second.shape, second.dtype) or first.is_meta != second.is_meta:
        return False
    return first.is_meta or torch.equal(first, second.to(first.device))


def _on_meta(shapes: _Shapes) -> dict[str, Tensor]:
    # Tensors of other ranks are known by shape and dtype only. The index needs no more than their sizes.
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}


def _union(groups_by_rank: Sequence[SharingMetadataT]) -> SharingMetadataT:
    union: dict[tuple[str, ...], list[str]] = {}
    for groups in groups_by_rank:
        for group in groups:
            union.setdefault(tuple(group), group)
    return list(union.values())


def _files_of(index: ShardIndex, own_names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of an owner with their tensor names."""
    files: dict[str, list[str]] = {}
    for name in own_names:
        if name in index["weight_map"]:
            files.setdefault(index["weight_map"][name], []).append(name)
    return files
