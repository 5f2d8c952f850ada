"""Weight files of a model: sharing of parameters, shards and their index, saving and loading by name.

The files are those of Hugging Face: `model.safetensors`, or shards with `model.safetensors.index.json`
(`pytorch_model*.bin` without safetensors), with parameters that share memory stored once.
"""

import contextlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.encoding import strict_json
from forgather.ml.checkpoint.encoding.codec import encode_state
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointError, CheckpointLoadError
from forgather.ml.checkpoint.files.durable import fsync_directory, replace_file
from forgather.ml.checkpoint.files.hashed_io import HashingWriter
from forgather.ml.checkpoint.files.regular_files import read_small_file
from forgather.ml.checkpoint.files.state_files import write_state
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, FileRecord, check_relative_path
from forgather.ml.checkpoint.weights.export import ModelExport
from forgather.ml.checkpoint.weights.index import (
    DEFAULT_MAX_SHARD_SIZE,
    ShardIndex,
    create_sharing_metadata,
    get_all_fqns,
    id_to_fqn,
    index_bytes,
    index_name,
    make_shard_index,
    retie_parameters,
    shard_name,
    sharing_of,
    stored_names,
)
from forgather.ml.checkpoint.weights.location import (
    WeightLocation,
    abbreviate,
    locate_weights,
    location_of_index,
    read_tensors,
    read_weights,
)
from forgather.ml.checkpoint.weights.safetensors_io import SHARING_KEY, SharingMetadataT, write_safetensors

__all__ = [
    "DEFAULT_MAX_SHARD_SIZE",
    "EVAL_METRICS_NAME",
    "ShardIndex",
    "SharingMetadataT",
    "WeightLocation",
    "create_sharing_metadata",
    "find_latest_checkpoint",
    "get_all_fqns",
    "id_to_fqn",
    "index_bytes",
    "index_name",
    "load_checkpoint",
    "load_checkpoint_metrics",
    "load_into_modules",
    "load_sharded_checkpoint",
    "locate_weights",
    "make_shard_index",
    "maybe_delete_oldest_checkpoint",
    "metrics_bytes",
    "next_checkpoint_path",
    "read_tensors",
    "read_weights",
    "retie_parameters",
    "save_checkpoint",
    "save_checkpoint_metrics",
    "save_sharded_checkpoint",
    "shard_name",
    "sharing_of",
    "stored_names",
    "validate_checkpoint",
    "write_weights",
]

logger = logging.getLogger(__name__)

EVAL_METRICS_NAME = "eval_metrics.json"


def write_weights(writer: HashingWriter, tensors: Mapping[str, Tensor], sharing: SharingMetadataT) -> dict[str, str]:
    """Write one weight file, in the format of its name; returns the names in it, with checksums where the format has any."""
    if writer.path.endswith(".safetensors"):
        # A value of the header must be a string, and readers that do not know the key pass over it.
        return write_safetensors(writer, tensors, {SHARING_KEY: json.dumps(sharing)} if sharing else None)
    # Encoded, because the memory behind a view is written whole, however little of it the view shows.
    write_state(writer, encode_state({name: tensor.detach() for name, tensor in tensors.items()}, "model"))
    return dict.fromkeys(tensors, "")


def save_sharded_checkpoint(output_dir: str, shard_index: ShardIndex, module: nn.Module) -> list[str]:
    """Write those files of the index whose tensors the module has; returns their names."""
    state = module.state_dict()
    sharing = shard_index["metadata"].get(SHARING_KEY, [])
    files: dict[str, dict[str, Tensor]] = {}
    for name, file in shard_index["weight_map"].items():
        if name in state:
            files.setdefault(file, {})[name] = state[name]
    for file, tensors in files.items():
        check_relative_path(file)
        directory, name = os.path.split(os.path.join(output_dir, file))
        temporary = os.path.join(directory, f".{store.new_attempt()}-{name}")
        try:
            with HashingWriter(temporary) as writer:
                write_weights(writer, tensors, sharing)
            os.replace(temporary, os.path.join(directory, name))
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.remove(temporary)
            raise
        fsync_directory(directory or os.curdir)
    return sorted(files)


def save_checkpoint(
    output_dir: str,
    module: nn.Module,
    metadata: Mapping[str, Any] | None = None,
    safetensors: bool = True,
    max_shard_size: int = DEFAULT_MAX_SHARD_SIZE,
) -> ShardIndex:
    """Write a whole model's weight files into a directory, in place of those that are there."""
    sharing = create_sharing_metadata(module)
    index = make_shard_index([module.state_dict()], metadata, safetensors, max_shard_size, sharing)
    export = ModelExport(os.path.abspath(output_dir), store.new_attempt())
    try:
        export.begin(overwrite=True)
        files = save_sharded_checkpoint(export.temporary_path, index, module)
        if len(files) > 1:
            replace_file(os.path.join(export.temporary_path, index_name(safetensors)), index_bytes(index))
        export.install()
    finally:
        export.clean_up()
    return index


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
    names = [name for module in modules for name in get_all_fqns(module)]
    expected = [name for name in names if keys is None or name in keys]
    _check_names(location, expected, names if all_names is None else all_names, strict and keys is None)
    states = [_tensors_to_load(module, location, keys) for module in modules]
    if not assign:
        _refuse_meta([name for tensors in states for name, tensor in tensors.items() if tensor.is_meta])
    for module, tensors in zip(modules, states, strict=True):
        sharing = create_sharing_metadata(module)
        if assign:
            tensors = {
                name: torch.empty_like(tensor, device=device or "cpu", requires_grad=False)
                for name, tensor in tensors.items()
            }
        read_weights(location, tensors)
        if assign or not _is_live(module, tensors):
            module.load_state_dict(tensors, strict=False, assign=assign)
            retie_parameters(module, sharing)


def _tensors_to_load(module: nn.Module, location: WeightLocation, keys: Collection[str] | None) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and (keys is None or name in keys) and location.stored_name(name) is not None
    }


def _refuse_meta(names: Sequence[str]) -> None:
    if names:
        raise CheckpointLoadError(
            f"{len(names)} tensors of the model are on the meta device, which has no memory to load into: "
            f"{abbreviate(names)}. Load with assign=True to give the model new tensors, or call "
            "model.to_empty(device=...) first."
        )


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
        problems.append(f"{len(missing)} tensors of the model are not in the checkpoint: {abbreviate(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} tensors of the checkpoint are not in the model: {abbreviate(unexpected)}")
    if not problems:
        return
    message = f"The weights in {location.directory} do not fit the model: " + "; ".join(problems)
    if strict:
        raise CheckpointLoadError(f"{message}. Build the model that was trained, or load with strict=False.")
    logger.warning("%s.", message)


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


def load_sharded_checkpoint(
    model_dir: str,
    shard_index: ShardIndex,
    module: nn.Module,
    device: torch.device | str = "cpu",
    strict: bool = True,
    assign: bool = False,
) -> None:
    """Load a module, whole or a stage, from the files of a given index."""
    location = location_of_index(model_dir, shard_index)
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
    return strict_json.dumps(plain, EVAL_METRICS_NAME)


def load_checkpoint_metrics(checkpoint_path: str) -> dict[str, Any] | None:
    """The evaluation metrics of a checkpoint, None when no evaluation ran for it."""
    path = os.path.join(checkpoint_path, EVAL_METRICS_NAME)
    try:
        loaded = strict_json.loads(read_small_file(path), path)
    except FileNotFoundError:
        return None
    if type(loaded) is not dict:
        raise CheckpointCorruptError(f"{path} is damaged: it should hold metrics by name")
    metrics: dict[str, Any] = loaded
    return metrics


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
