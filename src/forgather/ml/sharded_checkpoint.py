"""Weight files of a model: sharing of parameters, shards and their index, saving and loading by name.

The files are those of Hugging Face: `model.safetensors`, or shards with `model.safetensors.index.json`
(`pytorch_model*.bin` without safetensors), with parameters that share memory stored once.
"""

import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.durable import make_directories, replace_file
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError
from forgather.ml.checkpoint.file_io import HashingWriter
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, FileRecord, read_manifest
from forgather.ml.checkpoint.state_files import read_state, refused, verify_file, write_state
from forgather.ml.checkpoint.weight_files import (
    check_shape,
    check_size,
    load_safetensors,
    read_header,
    write_safetensors,
)

logger = logging.getLogger(__name__)

SharingMetadataT = list[list[str]]
"""Groups of names that are one tensor; the first name of a group is the one it is stored under."""

DEFAULT_MAX_SHARD_SIZE = 2**32
EVAL_METRICS_NAME = "eval_metrics.json"
_SHARING_KEY = "param_sharing"


class ShardIndex(TypedDict):
    """Which file holds which tensor, as in Hugging Face's index files."""

    metadata: dict[str, Any]
    weight_map: dict[str, str]


def get_all_fqns(module: nn.Module) -> list[str]:
    """Every name in the module's state, tied names included."""
    return list(module.state_dict(keep_vars=True))


def id_to_fqn(module: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter and buffer object of the state, by `id`."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return names


def create_sharing_metadata(model: nn.Module) -> SharingMetadataT:
    """The groups of names of a model that stand for one tensor."""
    return sharing_of(model.state_dict(keep_vars=True))


def sharing_of(tensors: Mapping[str, Any]) -> SharingMetadataT:
    """The groups of names in a state that stand for one tensor, in the order of the state."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            groups.setdefault(_identity(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _identity(tensor: Tensor) -> object:
    """Equal for tensors that are the same memory seen the same way; meta tensors have only their object."""
    if tensor.device.type == "meta" or tensor.numel() == 0 or tensor.data_ptr() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def retie_parameters(module: nn.Module, sharing_metadata: SharingMetadataT) -> None:
    """Make every group of names one tensor again; names that the module does not have are passed over."""
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    for group in sharing_metadata:
        present = [name for name in group if name in tensors]
        for name in present[1:]:
            owner_name, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner_name), attribute, tensors[present[0]])


def stored_names(names: Collection[str], sharing: SharingMetadataT) -> dict[str, str]:
    """Under which name each of `names` is stored: its own, or for tied ones the first of its group."""
    present = set(names)
    aliases = {}
    for group in sharing:
        members = [name for name in group if name in present]
        aliases.update(dict.fromkeys(members, members[0]))
    return {name: aliases.get(name, name) for name in names}


def index_name(safetensors: bool) -> str:
    return "model.safetensors.index.json" if safetensors else "pytorch_model.bin.index.json"


def shard_name(number: int, count: int, safetensors: bool) -> str:
    """The name of one of `count` weight files, numbered from 1."""
    stem, ending = ("model", "safetensors") if safetensors else ("pytorch_model", "bin")
    return f"{stem}.{ending}" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.{ending}"


def make_shard_index(
    state_dicts: Sequence[Mapping[str, Tensor]] | Mapping[str, Tensor],
    metadata: Mapping[str, Any] | None = None,
    safetensors: bool = False,
    max_shard_size: int = DEFAULT_MAX_SHARD_SIZE,
    param_sharing_metadata: SharingMetadataT | None = None,
) -> ShardIndex:
    """Divide tensors (meta ones will do) into files of at most `max_shard_size` bytes.

    Each state is written by a writer of its own (a pipeline stage), so a file never mixes two of them; a name that
    several states have belongs to the first. A tensor that is larger than a shard has a file to itself.
    """
    if isinstance(state_dicts, Mapping):
        state_dicts = [state_dicts]
    all_names = [name for state in state_dicts for name in state]
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
            if size > room or room == 0:
                shards.append([])
                room = max_shard_size
            shards[-1].append(name)
            room = max(0, room - size)
            total_size += size
    file_names = [shard_name(number, len(shards), safetensors) for number in range(1, len(shards) + 1)]
    index_metadata: dict[str, Any] = {"total_size": total_size, **(metadata or {})}
    if param_sharing_metadata:
        index_metadata[_SHARING_KEY] = param_sharing_metadata
    weight_map = {name: file for file, names in zip(file_names, shards, strict=True) for name in names}
    return ShardIndex(metadata=index_metadata, weight_map=weight_map)


def write_weights(writer: HashingWriter, tensors: Mapping[str, Tensor], sharing: SharingMetadataT) -> dict[str, str]:
    """Write one weight file, in the format of its name; returns the checksum of each tensor where the format has one."""
    if writer.path.endswith(".safetensors"):
        # A value of the header must be a string, and readers that do not know the key pass over it.
        return write_safetensors(writer, tensors, {_SHARING_KEY: json.dumps(sharing)} if sharing else None)
    write_state(writer, {name: tensor.detach() for name, tensor in tensors.items()})
    return {}


def save_sharded_checkpoint(output_dir: str, shard_index: ShardIndex, module: nn.Module) -> list[str]:
    """Write those files of the index whose tensors the module has; returns their names."""
    state = module.state_dict()
    sharing = shard_index["metadata"].get(_SHARING_KEY, [])
    files: dict[str, dict[str, Tensor]] = {}
    for name, file in shard_index["weight_map"].items():
        if name in state:
            files.setdefault(file, {})[name] = state[name]
    for file, tensors in files.items():
        path = os.path.join(output_dir, file)
        temporary = os.path.join(output_dir, f".{store.new_attempt()}-{file}")
        with HashingWriter(temporary) as writer:
            write_weights(writer, tensors, sharing)
        os.replace(temporary, path)
    return sorted(files)


def save_checkpoint(
    output_dir: str,
    module: nn.Module,
    metadata: Mapping[str, Any] | None = None,
    safetensors: bool = True,
    max_shard_size: int = DEFAULT_MAX_SHARD_SIZE,
) -> ShardIndex:
    """Write a whole model's weight files into a directory."""
    make_directories(output_dir)
    sharing = create_sharing_metadata(module)
    index = make_shard_index([module.state_dict()], metadata, safetensors, max_shard_size, sharing)
    files = save_sharded_checkpoint(output_dir, index, module)
    if len(files) > 1:
        replace_file(os.path.join(output_dir, index_name(safetensors)), index_bytes(index))
    return index


def index_bytes(index: ShardIndex) -> bytes:
    """The text of an index file."""
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


@dataclass(frozen=True)
class WeightLocation:
    """Where the weights of a directory are, and how to verify them."""

    directory: str
    weight_map: dict[str, str]
    sharing: SharingMetadataT
    records: dict[str, FileRecord] = field(default_factory=dict)

    def stored_name(self, name: str) -> str | None:
        """The name under which the directory has the tensor, None when it does not have it."""
        if name in self.weight_map:
            return name
        members = (member for group in self.sharing if name in group for member in group)
        return next((member for member in members if member in self.weight_map), None)


def locate_weights(model_dir: str, sharing: SharingMetadataT | None = None) -> WeightLocation:
    """Find the weight files of a directory; those of a checkpoint come with the checksums of its manifest."""
    records = {}
    if os.path.exists(os.path.join(model_dir, MANIFEST_NAME)):
        records = {record.path: record for record in read_manifest(model_dir).files}
    for safetensors in (True, False):
        path = os.path.join(model_dir, index_name(safetensors))
        if os.path.exists(path):
            index = _read_index(path, records.get(os.path.basename(path)))
            stored = index.get("metadata", {}).get(_SHARING_KEY, [])
            return WeightLocation(model_dir, index["weight_map"], sharing or stored, records)
    single = os.path.join(model_dir, shard_name(1, 1, True))
    if os.path.exists(single):
        header = read_header(single)
        stored = json.loads(header.metadata.get(_SHARING_KEY, "[]"))
        names = dict.fromkeys(header.tensors, os.path.basename(single))
        return WeightLocation(model_dir, names, sharing or stored, records)
    single = os.path.join(model_dir, shard_name(1, 1, False))
    if os.path.exists(single):
        if os.path.basename(single) in records:
            verify_file(model_dir, records[os.path.basename(single)])
        tensors = _tensors_of_bin(single)
        return WeightLocation(model_dir, dict.fromkeys(tensors, os.path.basename(single)), sharing or [], records)
    raise CheckpointLoadError(f"There are no weight files in {model_dir} (model*.safetensors or pytorch_model*.bin).")


def _tensors_of_bin(path: str) -> dict[str, Tensor]:
    """Names and shapes, as tensors without data; this format has no directory that could be read by itself."""
    try:
        tensors: dict[str, Tensor] = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:
        raise refused(path, error) from error
    return tensors


def _read_index(path: str, record: FileRecord | None) -> dict[str, Any]:
    if record is not None:
        verify_file(os.path.dirname(path), record)
    try:
        with open(path, "rb") as file:
            index: dict[str, Any] = json.load(file)
    except ValueError as error:
        raise CheckpointLoadError(f"{path} cannot be read as JSON: {error}") from error
    return index


def read_weights(location: WeightLocation, targets: Mapping[str, Tensor]) -> None:
    """Fill `targets` in place, by name; tensors that nobody asks for are not read."""
    by_file: dict[str, dict[str, list[Tensor]]] = {}
    for name, target in targets.items():
        stored = location.stored_name(name)
        if stored is None:
            raise CheckpointLoadError(f"{location.directory} holds no tensor {name!r}.")
        by_file.setdefault(location.weight_map[stored], {}).setdefault(stored, []).append(target)
    _check_shapes(location, by_file)
    for file, wanted in sorted(by_file.items()):
        path = os.path.join(location.directory, file)
        record = location.records.get(file)
        first = {name: tensors[0] for name, tensors in wanted.items()}
        if file.endswith(".safetensors"):
            load_safetensors(path, first, record)
        else:
            _load_bin(path, first, record)
        for tensors in wanted.values():
            for other in tensors[1:]:
                # Tied tensors of the model are one memory already; separate copies get the same values.
                if _identity(other) != _identity(tensors[0]):
                    other.detach().copy_(tensors[0].detach())


def _check_shapes(location: WeightLocation, by_file: Mapping[str, Mapping[str, Sequence[Tensor]]]) -> None:
    """All of them before the first tensor is filled: a model that does not fit is left as it was."""
    for file, wanted in sorted(by_file.items()):
        if file.endswith(".safetensors"):
            path = os.path.join(location.directory, file)
            check_size(path, location.records.get(file))
            entries = read_header(path).tensors
            for name, tensors in wanted.items():
                if name not in entries:
                    raise CheckpointLoadError(f"{path} has no tensor {name!r}, although the index says so.")
                for tensor in tensors:
                    check_shape(path, name, entries[name].shape, tensor)


def _load_bin(path: str, targets: Mapping[str, Tensor], record: FileRecord | None) -> None:
    state = read_state(path, record)
    for name, target in targets.items():
        check_shape(path, name, tuple(state[name].shape), target)
        target.detach().copy_(state[name])


def load_into_modules(
    location: WeightLocation,
    modules: Sequence[nn.Module],
    strict: bool = True,
    all_names: Collection[str] | None = None,
    device: torch.device | str | None = None,
    assign: bool = False,
    keys: Collection[str] | None = None,
) -> None:
    """Load modules by name: the model, or the stages of it that this rank has.

    `all_names` are the names of the whole model when the modules are a part of it; they decide what is unexpected.
    With `assign` (for modules on the meta device) new tensors take the place of the module's own.
    """
    # A model that ties its own tensors needs no one to tell it: plain Hugging Face directories do not.
    tied = [group for module in modules for group in create_sharing_metadata(module)]
    location = replace(location, sharing=[*location.sharing, *tied])
    expected = [name for module in modules for name in get_all_fqns(module) if keys is None or name in keys]
    _check_names(location, expected, expected if all_names is None else all_names, strict and keys is None)
    for module in modules:
        sharing = create_sharing_metadata(module)
        state = module.state_dict(keep_vars=True)
        tensors = {
            name: tensor
            for name, tensor in state.items()
            if isinstance(tensor, Tensor) and (keys is None or name in keys) and location.stored_name(name) is not None
        }
        if assign:
            tensors = {
                name: torch.empty_like(tensor, device=device or "cpu", requires_grad=False)
                for name, tensor in tensors.items()
            }
        read_weights(location, tensors)
        if assign or not _is_live(module, tensors):
            module.load_state_dict(tensors, strict=False, assign=assign)
            retie_parameters(module, sharing)


def _is_live(module: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Whether filling these tensors changed the module itself; hooks of a module may hand out copies."""
    own = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    return all(id(tensor) in own for tensor in tensors.values())


def _check_names(location: WeightLocation, expected: Iterable[str], all_names: Collection[str], strict: bool) -> None:
    missing = [name for name in expected if location.stored_name(name) is None]
    known = set(all_names)
    unexpected = [name for name in location.weight_map if name not in known]
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors of the model are not in the checkpoint: {_abbreviate(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} tensors of the checkpoint are not in the model: {_abbreviate(unexpected)}")
    if not problems:
        return
    message = f"The weights in {location.directory} do not fit the model: " + "; ".join(problems)
    if strict:
        raise CheckpointLoadError(f"{message}. Build the model that was trained, or load with strict=False.")
    logger.warning("%s.", message)


def _abbreviate(names: Sequence[str], limit: int = 10) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def load_checkpoint(
    model_dir: str,
    module: nn.Module | None = None,
    device: torch.device | str = "cpu",
    strict: bool = True,
    assign: bool = False,
    keys: Collection[str] | None = None,
) -> dict[str, Tensor] | None:
    """Load the weights of a directory into a module, or without one, return them as tensors on `device`."""
    location = locate_weights(model_dir)
    if module is not None:
        load_into_modules(location, [module], strict, device=device, assign=assign, keys=keys)
        return None
    wanted = list(location.weight_map) if keys is None else list(keys)
    return read_tensors(location, wanted, device)


def read_tensors(location: WeightLocation, names: Collection[str], device: torch.device | str) -> dict[str, Tensor]:
    """New tensors on `device` with the named weights."""
    if any(location.stored_name(name) is None for name in names):
        missing = [name for name in names if location.stored_name(name) is None]
        raise CheckpointLoadError(f"{location.directory} holds no tensors named {_abbreviate(missing)}.")
    shapes: dict[str, Any] = {}
    for file in sorted({location.weight_map[location.stored_name(name) or name] for name in names}):
        path = os.path.join(location.directory, file)
        if file.endswith(".safetensors"):
            shapes.update(read_header(path).tensors)
        else:
            shapes.update(_tensors_of_bin(path))
    tensors = {}
    for name in names:
        entry = shapes[location.stored_name(name) or name]
        tensors[name] = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    read_weights(location, tensors)
    return tensors


def load_sharded_checkpoint(
    model_dir: str,
    shard_index: ShardIndex,
    module: nn.Module,
    device: torch.device | str = "cpu",
    strict: bool = True,
    assign: bool = False,
) -> None:
    """Load a module, whole or a stage, from the files of a given index."""
    location = WeightLocation(model_dir, dict(shard_index["weight_map"]), shard_index["metadata"].get(_SHARING_KEY, []))
    load_into_modules(location, [module], strict, all_names=location.weight_map, device=device, assign=assign)


def next_checkpoint_path(model_dir: str, id: str | int) -> str:
    """Where a model's checkpoint of that id goes."""
    return store.checkpoint_path(model_dir, id)


def find_latest_checkpoint(model_dir: str) -> str | None:
    """The newest complete checkpoint below `<model_dir>/checkpoints`, None when there is none."""
    found = store.find_checkpoints(os.path.join(model_dir, store.CHECKPOINTS_FOLDER))
    return found[-1].path if found else None


def validate_checkpoint(path: str) -> bool:
    """Whether a directory is a complete checkpoint; the log says what is wrong with one that is not."""
    try:
        store.open_checkpoint(path)
    except CheckpointError as error:
        logger.warning("%s", error)
        return False
    return True


def save_checkpoint_metrics(checkpoint_path: str, metrics: Mapping[str, Any]) -> str:
    """Put evaluation metrics into a checkpoint; returns the path of the file."""
    data = metrics_bytes(metrics)
    path = os.path.join(checkpoint_path, EVAL_METRICS_NAME)
    if os.path.exists(os.path.join(checkpoint_path, MANIFEST_NAME)):
        store.amend_file(checkpoint_path, FileRecord(EVAL_METRICS_NAME, 0, "", 0, "metadata"), data)
    else:
        replace_file(path, data)
    return path


def metrics_bytes(metrics: Mapping[str, Any]) -> bytes:
    """The text of a metrics file; tensors and NumPy scalars become numbers."""
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items()}
    return (json.dumps(plain, indent=2) + "\n").encode()


def load_checkpoint_metrics(checkpoint_path: str) -> dict[str, Any] | None:
    """The evaluation metrics of a checkpoint, None when no evaluation ran for it."""
    path = os.path.join(checkpoint_path, EVAL_METRICS_NAME)
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


def maybe_delete_oldest_checkpoint(
    model_dir: str, max_checkpoints: int | None, preserved: Collection[str] = ()
) -> list[str]:
    """Delete the oldest checkpoints beyond `max_checkpoints` (None or 0: no limit); returns their paths.

    `preserved` paths are kept whatever their age, and do not count.
    """
    if not max_checkpoints or max_checkpoints < 0:
        return []
    kept = {os.path.abspath(path) for path in preserved}
    found = store.find_checkpoints(os.path.join(model_dir, store.CHECKPOINTS_FOLDER))
    surplus = [one.path for one in found[:-max_checkpoints] if os.path.abspath(one.path) not in kept]
    for path in surplus:
        store.delete_checkpoint(path)
    return surplus
