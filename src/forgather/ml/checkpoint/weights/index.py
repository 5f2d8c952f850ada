"""Shard index of a model: tied tensors, and the weight file of each tensor, by FQN.

The format is the index file of Hugging Face. Tied tensors are stored once, under the first name of their group. Saving,
loading and exporting of weights share these functions.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.encoding import strict_json
from forgather.ml.checkpoint.sharding.sharded_tensors import is_dtensor
from forgather.ml.checkpoint.weights.safetensors_io import SHARING_KEY, SharingMetadataT

__all__ = [
    "DEFAULT_MAX_SHARD_SIZE",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "ShardIndex",
    "SharingMetadataT",
    "create_sharing_metadata",
    "get_all_fqns",
    "id_to_fqn",
    "index_bytes",
    "index_file_name",
    "make_shard_index",
    "retie_parameters",
    "shard_name",
    "sharing_of",
    "stored_names",
]

# 4 GiB.
DEFAULT_MAX_SHARD_SIZE = 2**32
WEIGHTS_NAME = "pytorch_model.bin"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"


class ShardIndex(TypedDict):
    """Index of sharded weights in the format of Hugging Face: the file of each tensor, and metadata."""

    metadata: dict[str, Any]
    weight_map: dict[str, str]


def get_all_fqns(module: nn.Module) -> list[str]:
    """Return all names in the module's state_dict, including tied names."""
    return list(module.state_dict(keep_vars=True))


def id_to_fqn(module: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter and buffer in the state_dict, by the `id` of the tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return names


def create_sharing_metadata(model: nn.Module) -> SharingMetadataT:
    """Return the groups of tied names of a model; each group refers to the same tensor."""
    # Without `keep_vars` the state_dict has new tensor objects, and tied tensors on the meta device would go
    # undetected.
    return sharing_of(model.state_dict(keep_vars=True))


def sharing_of(tensors: Mapping[str, Any]) -> SharingMetadataT:
    """Return the groups of tied names in a state_dict, in its order."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            groups.setdefault(tensor_identity(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def tensor_identity(tensor: Tensor) -> object:
    """Return a key that is equal for tensors with the same memory, shape, strides and dtype."""
    if is_dtensor(tensor):
        # An empty shard has no data pointer, but tied parameters share its storage.
        local = tensor.to_local()  # type: ignore[attr-defined]
        return (local.untyped_storage()._cdata, local.storage_offset(), tuple(tensor.shape), tensor.dtype)
    # Tensors without a data pointer (meta, sparse, nested, empty) are identified by the object.
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
        return id(tensor)
    if tensor.numel() == 0 or tensor.data_ptr() == 0:
        return id(tensor)
    # A conjugated or negated view has the same memory, but different values.
    seen_as = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), seen_as)


def retie_parameters(module: nn.Module, sharing_metadata: SharingMetadataT) -> None:
    """Tie each group of names to the same tensor again; names that the module does not have are skipped."""
    # By default `named_parameters` returns a tied parameter under its first name only.
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    for group in sharing_metadata:
        present = [name for name in group if name in tensors]
        for name in present[1:]:
            owner_name, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner_name), attribute, tensors[present[0]])


def stored_names(names: Collection[str], sharing: SharingMetadataT) -> dict[str, str]:
    """Return the stored name of each name: itself, or the first present name of its tied group."""
    present = set(names)
    aliases = {}
    for group in sharing:
        members = [name for name in group if name in present]
        aliases.update(dict.fromkeys(members, members[0]))
    return {name: aliases.get(name, name) for name in names}


def index_file_name(safetensors: bool) -> str:
    """Return the name of the index file of sharded weights."""
    return SAFE_WEIGHTS_INDEX_NAME if safetensors else WEIGHTS_INDEX_NAME


def shard_name(number: int, count: int, safetensors: bool) -> str:
    """Return the name of shard `number` of `count` weight files, counted from 1."""
    single = SAFE_WEIGHTS_NAME if safetensors else WEIGHTS_NAME
    stem, ending = os.path.splitext(single)
    return single if count == 1 else f"{stem}-{number:05d}-of-{count:05d}{ending}"


def in_format(index: ShardIndex, safetensors: bool) -> ShardIndex:
    """Return the index with file names of the requested format."""
    # Readers choose the format by the file name, so an index made for the other format must be renamed.
    files = sorted(set(index["weight_map"].values()))
    if all(file.endswith(".safetensors") == safetensors for file in files):
        return index
    renamed = {file: shard_name(number, len(files), safetensors) for number, file in enumerate(files, start=1)}
    weight_map = {name: renamed[file] for name, file in index["weight_map"].items()}
    return ShardIndex(metadata=index["metadata"], weight_map=weight_map)


def make_shard_index(
    state_dicts: Sequence[Mapping[str, Tensor]] | Mapping[str, Tensor],
    metadata: Mapping[str, Any] | None = None,
    safetensors: bool = False,
    max_shard_size: int = DEFAULT_MAX_SHARD_SIZE,
    param_sharing_metadata: SharingMetadataT | None = None,
) -> ShardIndex:
    """Return an index that divides tensors (meta tensors suffice) into shards of at most `max_shard_size` bytes.

    Each state_dict has a separate writer (a pipeline stage), so a file never contains tensors of two state_dicts. A
    name in several state_dicts belongs to the first. A tensor larger than `max_shard_size` gets its own file.
    """
    if isinstance(state_dicts, Mapping):
        state_dicts = [state_dicts]
    all_names = [name for state in state_dicts for name in state]
    # Over all states, because tied names may be in different stages (input and output embeddings).
    canonical = stored_names(all_names, param_sharing_metadata or [])
    shards: list[list[str]] = []
    seen: set[str] = set()
    total_size = 0
    for state in state_dicts:
        room = 0
        for name, tensor in state.items():
            if name in seen or canonical[name] != name:
                continue
            seen.add(name)
            size = tensor.numel() * tensor.element_size()
            # `room` is 0 at the start of each state_dict, which opens a new file for each writer.
            if size > room or room == 0:
                shards.append([])
                room = max_shard_size
            shards[-1].append(name)
            room = max(0, room - size)
            total_size += size
    file_names = [shard_name(number, len(shards), safetensors) for number in range(1, len(shards) + 1)]
    index_metadata: dict[str, Any] = {"total_size": total_size, **(metadata or {})}
    if param_sharing_metadata:
        index_metadata[SHARING_KEY] = param_sharing_metadata
    weight_map = {name: file for file, names in zip(file_names, shards, strict=True) for name in names}
    return ShardIndex(metadata=index_metadata, weight_map=weight_map)


def index_bytes(index: ShardIndex) -> bytes:
    """Return the content of an index file."""
    return strict_json.dumps(index, "The index of the weights", sort_keys=True)
