"""Module weights: saving and loading by FQN, in shards or in one file.

The format is Hugging Face's: `model.safetensors`, or shards with `model.safetensors.index.json` (`pytorch_model*.bin`
without safetensors). Tied parameters are stored once. Checkpoint files, trainers, `forgather.ml.finalize` and
`forgather.ml.sharded_checkpoint` use these functions.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.encoding.archive_writer import Chunks
from forgather.ml.checkpoint.encoding.codec import encode_state
from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.files.durable import fsync_directory, make_directories, replace_file
from forgather.ml.checkpoint.files.hashed_io import HashingWriter
from forgather.ml.checkpoint.files.state_files import write_state
from forgather.ml.checkpoint.manifest import check_relative_path
from forgather.ml.checkpoint.weights.export import ModelExport
from forgather.ml.checkpoint.weights.index import (
    DEFAULT_MAX_SHARD_SIZE,
    ShardIndex,
    create_sharing_metadata,
    get_all_fqns,
    index_bytes,
    index_file_name,
    make_shard_index,
    retie_parameters,
    shard_name,
    sharing_of,
    stored_names,
)
from forgather.ml.checkpoint.weights.location import (
    WeightLocation,
    abbreviate,
    load_shard_index,
    locate_weights,
    read_tensors,
    read_weights,
)
from forgather.ml.checkpoint.weights.safetensors_io import (
    SHARING_KEY,
    SharingMetadataT,
    names_in_file,
    write_safetensors,
)

__all__ = [
    "ShardIndex",
    "WeightLocation",
    "create_sharing_metadata",
    "get_all_fqns",
    "load_checkpoint",
    "load_into_modules",
    "load_shard_index",
    "load_sharded_checkpoint",
    "locate_weights",
    "make_shard_index",
    "read_tensors",
    "read_weights",
    "retie_parameters",
    "save_checkpoint",
    "save_shard_index",
    "save_sharded_checkpoint",
    "shard_name",
    "stored_names",
    "write_weights",
]

logger = logging.getLogger(__name__)


def write_weights(
    writer: HashingWriter,
    tensors: Mapping[str, Tensor],
    sharing: SharingMetadataT,
    chunks_of: Callable[[Any], Chunks] | None = None,
) -> dict[str, str]:
    """Write one weight file in the format of its name; return its tensor names with checksums (empty for `.bin`).

    `chunks_of` supplies the content of sharded tensors, in the order of `names_in_file`.
    """
    if writer.path.endswith(".safetensors"):
        # Metadata values of a safetensors header must be strings. Other readers ignore an unknown key.
        return write_safetensors(writer, tensors, {SHARING_KEY: json.dumps(sharing)} if sharing else None, chunks_of)
    # Encoded, because torch writes the full storage behind a view.
    state = {name: tensors[name].detach() for name in names_in_file(tensors)}
    write_state(writer, encode_state(state, "model"), chunks_of)
    return dict.fromkeys(tensors, "")


def save_sharded_checkpoint(
    output_dir: str,
    shard_index: ShardIndex,
    module: nn.Module | Mapping[str, Tensor],
    safetensors: bool | None = None,
) -> list[str]:
    """Write the files of the index for which the module (or state_dict) has tensors; return their names.

    The file names in the index decide the format. `safetensors` only checks them: a mismatch raises `ValueError`.
    """
    _refuse_other_format(shard_index, safetensors)
    state = _state_of(module)
    sharing = shard_index["metadata"].get(SHARING_KEY, [])
    files: dict[str, dict[str, Tensor]] = {}
    for name, file in shard_index["weight_map"].items():
        if name in state:
            files.setdefault(file, {})[name] = state[name]
    for file, tensors in files.items():
        # The index may be from a file, and its paths must not leave the directory.
        check_relative_path(file)
        _write_file(os.path.join(output_dir, file), tensors, sharing)
    return sorted(files)


def _state_of(module: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return module.state_dict() if isinstance(module, nn.Module) else module


def _refuse_other_format(index: ShardIndex, safetensors: bool | None) -> None:
    wrong = [file for file in index["weight_map"].values() if file.endswith(".safetensors") != safetensors]
    if safetensors is not None and wrong:
        raise ValueError(
            f"save_sharded_checkpoint(safetensors={safetensors}) cannot use an index with the file {wrong[0]}: readers "
            f"choose the format by name. Create the index with make_shard_index(..., safetensors={safetensors})."
        )


def _write_file(path: str, tensors: Mapping[str, Tensor], sharing: SharingMetadataT) -> None:
    """Write a weight file to a temporary name and rename it, so that a failure leaves an existing file unchanged."""
    directory, name = os.path.split(path)
    make_directories(os.path.abspath(directory))
    temporary = os.path.join(directory, f".{store.new_attempt()}-{name}")
    try:
        with HashingWriter(temporary) as writer:
            write_weights(writer, tensors, sharing)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise
    # A rename survives a crash only after the fsync of its directory.
    fsync_directory(directory or os.curdir)


def save_shard_index(shard_index: ShardIndex, output_dir: str, index_name: str | None = None) -> str:
    """Write an index file, by default under the standard name of its format; return the path."""
    if index_name is None:
        files = shard_index["weight_map"].values()
        index_name = index_file_name(all(file.endswith(".safetensors") for file in files))
    make_directories(os.path.abspath(output_dir))
    path = os.path.join(output_dir, index_name)
    replace_file(path, index_bytes(shard_index))
    return path


def save_checkpoint(
    output_dir: str,
    module: nn.Module | Mapping[str, Tensor],
    metadata: Mapping[str, Any] | None = None,
    safetensors: bool = True,
    max_shard_size: int = DEFAULT_MAX_SHARD_SIZE,
) -> ShardIndex:
    """Write the weight files of a full model (or state_dict) into a directory, replacing existing ones."""
    state = _state_of(module)
    # The tensors of a state_dict are detached, but tied tensors still share memory.
    sharing = create_sharing_metadata(module) if isinstance(module, nn.Module) else sharing_of(state)
    index = make_shard_index([state], metadata, safetensors, max_shard_size, sharing)
    export = ModelExport(os.path.abspath(output_dir), store.new_attempt())
    try:
        export.begin(overwrite=True)
        files = save_sharded_checkpoint(export.temporary_path, index, state)
        # As in Hugging Face directories, a single file has no index.
        if len(files) > 1:
            save_shard_index(index, export.temporary_path, index_file_name(safetensors))
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
    """Load weights into modules by name: the full model, or the stages of this rank.

    If the modules are a subset of the model, `all_names` are the names of the full model, and any other stored name is
    unexpected. With `assign` (for modules on the meta device) new tensors replace the tensors of the module. `keys`
    restricts loading to these names.
    """
    # Plain Hugging Face directories do not record ties, so the ties of the model itself are used too.
    tied = [group for module in modules for group in create_sharing_metadata(module)]
    location = replace(location, sharing=[*location.sharing, *tied])
    names = [name for module in modules for name in get_all_fqns(module)]
    expected = [name for name in names if keys is None or name in keys]
    # With `keys` the caller wants a subset, so other names are only worth a warning.
    _check_names(location, expected, names if all_names is None else all_names, strict and keys is None)
    states = [_tensors_to_load(module, location, keys) for module in modules]
    # Checked for all modules before the first is changed.
    if not assign:
        _refuse_meta([name for tensors in states for name, tensor in tensors.items() if tensor.is_meta])
    for module, tensors in zip(modules, states, strict=True):
        # Recorded before loading: `load_state_dict(assign=True)` sets separate tensors and breaks the ties.
        sharing = create_sharing_metadata(module)
        if assign:
            tensors = {
                name: torch.empty_like(tensor, device=device or "cpu", requires_grad=False)
                for name, tensor in tensors.items()
            }
        read_weights(location, tensors)
        if assign or not _is_live(module, tensors):
            # Not strict, because the names are already checked.
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
            f"{len(names)} tensors of the model are on the meta device and have no memory to load into: "
            f"{abbreviate(names)}. Load with assign=True to create new tensors, or call model.to_empty(device=...) first."
        )


def _is_live(module: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the tensors are the module's own; state_dict hooks of a module may return copies."""
    # A module with such hooks must load the filled copies through `load_state_dict`.
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
        # Index and header were verified, so the model differs, not the checkpoint.
        raise CheckpointLoadError.misfit(f"{message}. Build the model that was trained, or load with strict=False.")
    logger.warning("%s.", message)


def load_checkpoint(
    model_dir: str,
    module: nn.Module | None = None,
    device: torch.device | str = "cpu",
    strict: bool = True,
    assign: bool = False,
    keys: Collection[str] | None = None,
) -> dict[str, Tensor] | None:
    """Load the weights of a directory into `module`, or return them as tensors on `device` if there is no module."""
    location = locate_weights(model_dir)
    if module is not None:
        load_into_modules(location, [module], strict, device=device, assign=assign, keys=keys)
        return None
    wanted = list(location.weight_map) if keys is None else list(keys)
    return read_tensors(location, wanted, device)


def load_sharded_checkpoint(
    model_dir: str,
    module: nn.Module | None = None,
    device: torch.device | str = "cpu",
    strict: bool = True,
    assign: bool = False,
    keys: Collection[str] | None = None,
    safetensors: bool | None = None,
) -> dict[str, Tensor] | None:
    """Load a full model or one pipeline stage from a directory; return the tensors if there is no module.

    Stored tensors of other stages are not reported as unexpected. `safetensors` selects the format of a directory that
    has both.
    """
    location = locate_weights(model_dir, safetensors=safetensors)
    if module is None:
        return read_tensors(location, list(location.weight_map) if keys is None else list(keys), device)
    # The module may be a stage. All stored names count as names of the full model, so none is unexpected.
    names = location.weight_map
    load_into_modules(location, [module], strict, all_names=names, device=device, assign=assign, keys=keys)
    return None
