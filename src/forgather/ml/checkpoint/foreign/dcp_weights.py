"""Import of weights from torch.distributed.checkpoint (DCP) by FQN, into the modules of this rank.

torch's load planner maps chunks to slices of each tensor, so sharded tensors are resharded exactly as in torch.
Forgather's strict reader of `torch.save` archives reads the bytes of each chunk. Nothing here is collective.
`foreign/weights.py` calls it.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from forgather.ml.checkpoint.encoding.plain_pickle import PlainUnpickler
from forgather.ml.checkpoint.encoding.state_budget import MemoryBudget
from forgather.ml.checkpoint.encoding.torch_archive import TorchArchive
from forgather.ml.checkpoint.errors import CheckpointLoadError, StateDecodingError
from forgather.ml.checkpoint.files.hashed_io import read_exactly
from forgather.ml.checkpoint.files.regular_files import open_regular, path_inside
from forgather.ml.checkpoint.foreign.dcp_metadata import DcpDirectory, DcpTensor, Shape, StoredBytes
from forgather.ml.checkpoint.weights.index import create_sharing_metadata
from forgather.ml.checkpoint.weights.location import abbreviate
from forgather.ml.checkpoint.weights.safetensors_io import SharingMetadataT, check_fit

# Preferred prefixes if the names of the model occur under several (for example with an EMA copy): no prefix, or the
# usual key of the model.
_USUAL_PREFIXES = ("", "model.")


def load_dcp_weights(
    path: str, modules: Sequence[nn.Module], all_names: Collection[str], sharing: SharingMetadataT
) -> int:
    """Load weights into the modules, and return the number of tensors in the checkpoint that the model does not have.

    `all_names` are the FQNs of the full model; the modules may be some of its stages. `sharing` lists groups of names
    of one tensor (tied weights). All tensors are checked against the metadata before the first tensor changes.
    """
    directory = DcpDirectory.open(path)
    groups = [*sharing, *(group for module in modules for group in create_sharing_metadata(module))]
    names = _Names(path, directory.entries, all_names, groups)
    states = [_targets(module, names) for module in modules]
    tensors = {stored: directory.tensor(stored) for state in states for stored in state}
    _check_targets(path, states, tensors)
    for module, state in zip(modules, states, strict=True):
        _fill(directory, {stored: next(iter(targets.values())) for stored, targets in state.items()}, tensors)
        # state_dict() hooks may return copies, and tied names may be separate tensors here. Load all of them by name.
        module.load_state_dict(
            {name: next(iter(targets.values())) for targets in state.values() for name in targets}, strict=False
        )
    return names.num_others


class _Names:
    """Mapping from names of the model to tensors of the checkpoint, below one common prefix."""

    def __init__(
        self, path: str, stored: Collection[str], all_names: Collection[str], sharing: SharingMetadataT
    ) -> None:
        self._stored = set(stored)
        self._aliases = {name: group for group in sharing for name in group}
        self._prefix = self._common_prefix(path, all_names)
        used = {self.stored_name(name) for name in all_names}
        others = [name for name in stored if name not in used]
        self.num_others = len(others)
        self._refuse_unexpected(path, others, all_names)

    def stored_name(self, name: str, prefix: str | None = None) -> str | None:
        prefix = self._prefix if prefix is None else prefix
        # A tied tensor may be stored under any of its names.
        candidates = (name, *self._aliases.get(name, ()))
        return next((prefix + one for one in candidates if prefix + one in self._stored), None)

    def _common_prefix(self, path: str, all_names: Collection[str]) -> str:
        # Every prefix that fits all names also fits the first name, so only its occurrences are candidates.
        first = next(iter(all_names))
        ends = (first, *self._aliases.get(first, ()))
        prefixes = {stored[: -len(end)] for stored in self._stored for end in ends if stored.endswith(end)}
        whole = [one for one in prefixes if one == "" or one.endswith(".")]
        fitting = [one for one in whole if all(self.stored_name(name, one) is not None for name in all_names)]
        usual = [one for one in _USUAL_PREFIXES if one in fitting]
        if usual or len(fitting) == 1:
            return (usual or fitting)[0]
        if fitting:
            raise CheckpointLoadError(
                f"{path} has the model's tensors under several prefixes ({abbreviate(sorted(fitting))}), so the choice is "
                "ambiguous. Save only the wanted model, under the key 'model', and import that checkpoint."
            )
        raise self._missing(path, all_names, min(whole, key=len, default=""))

    def _missing(self, path: str, all_names: Collection[str], prefix: str) -> CheckpointLoadError:
        missing = [name for name in all_names if self.stored_name(name, prefix) is None]
        return CheckpointLoadError.misfit(
            f"The weights in {path} do not fit the model: {len(missing)} tensors of the model are not in the checkpoint: "
            f"{abbreviate(missing)}. In the checkpoint: {abbreviate(sorted(self._stored), 3)}. Build the model that was "
            "trained."
        )

    def _refuse_unexpected(self, path: str, others: Iterable[str], all_names: Collection[str]) -> None:
        """Raise `CheckpointLoadError` for unexpected tensors below the model's prefix: they belong to another model."""
        # Without a prefix the directory may hold optimizer state beside the model, so compare top-level names only.
        below = {self._prefix} if self._prefix else {f"{name.partition('.')[0]}." for name in all_names}
        unexpected = [name for name in others if name.startswith(tuple(below))]
        if unexpected:
            raise CheckpointLoadError.misfit(
                f"The weights in {path} do not fit the model: {len(unexpected)} tensors of the checkpoint are not in the "
                f"model: {abbreviate(unexpected)}. Build the model that was trained."
            )


def _targets(module: nn.Module, names: _Names) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a module by their name in the checkpoint, then by their own name.

    Tied tensors have the same name in the checkpoint and are grouped under it.
    """
    targets: dict[str, dict[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        stored = names.stored_name(name)
        if isinstance(tensor, Tensor) and stored is not None:
            targets.setdefault(stored, {})[name] = tensor
    return targets


def _check_targets(
    path: str, states: Sequence[Mapping[str, Mapping[str, Tensor]]], tensors: Mapping[str, DcpTensor]
) -> None:
    # All modules before the first is filled: an error must not leave a model with half of its weights loaded.
    every = [(stored, name, one) for state in states for stored, group in state.items() for name, one in group.items()]
    for stored, name, target in every:
        if target.is_meta:
            raise CheckpointLoadError(
                f"Tensor {name!r} of the model is on the meta device, which has no memory to load into. Call "
                "model.to_empty(device=...) first."
            )
        check_fit(path, stored, tensors[stored].shape, tensors[stored].dtype, target)


def _fill(directory: DcpDirectory, targets: Mapping[str, Tensor], tensors: Mapping[str, DcpTensor]) -> None:
    # Only the local plan is used, which needs no collective: each pipeline rank loads its own tensors. The planner does
    # no I/O, so no file is unpickled by torch.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = Metadata({name: _as_torch_metadata(tensors[name]) for name in targets})
    planner.set_up_planner({name: target.detach() for name, target in targets.items()}, metadata, is_coordinator=True)
    stored = {(name, chunk.offsets): chunk for name in targets for chunk in tensors[name].chunks}
    for item in planner.create_local_plan().items:
        name, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
        chunk = stored[name, offset]
        content = _read_chunk(directory.path, chunk.stored, tensors[name].dtype, chunk.sizes)
        for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            content = content.narrow(axis, start, length)
        target = planner.resolve_tensor(item)
        target.detach().copy_(content)
        planner.commit_tensor(item, target)


def _as_torch_metadata(tensor: DcpTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)


@dataclass
class _Stretch:
    """Byte range of an open file, as the source of an archive."""

    descriptor: int
    start: int
    size: int
    _position: int = 0

    def seek(self, offset: int, /) -> int:
        self._position = offset
        return offset

    def readinto(self, buffer: memoryview, /) -> int:
        count = max(0, min(len(buffer), self.size - self._position))
        read_exactly(self.descriptor, buffer[:count], self.start + self._position)
        self._position += count
        return count


def _read_chunk(directory: str, stored: StoredBytes, dtype: torch.dtype, sizes: Shape) -> Tensor:
    path = path_inside(directory, stored.file)
    descriptor = open_regular(path)
    try:
        if stored.offset + stored.length > os.fstat(descriptor).st_size:
            raise StateDecodingError("it is shorter than .metadata states")
        # Each chunk is an archive and has a budget for its own size, not for the size of the file.
        budget = MemoryBudget(stored.length)
        content = PlainUnpickler(
            TorchArchive(_Stretch(descriptor, stored.offset, stored.length), budget), budget
        ).load()
        if not isinstance(content, Tensor) or content.dtype != dtype or tuple(content.shape) != sizes:
            raise StateDecodingError("it holds something other than the tensor that .metadata describes")
    except (StateDecodingError, EOFError) as error:
        raise StateDecodingError(f"{path} was rejected at byte {stored.offset:,}: {error}") from error
    finally:
        os.close(descriptor)
    return content
