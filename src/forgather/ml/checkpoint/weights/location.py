"""Location of weight files in a directory, and loading of tensors by FQN.

In a Forgather checkpoint only files listed in the manifest are read, and their checksums are verified. Other
directories (exports, Hugging Face models) are read without checksums. Checkpoint loading, validation and imports call
this module.
"""

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forgather.ml.checkpoint.encoding import strict_json
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointLoadError
from forgather.ml.checkpoint.files.mapped_files import TensorCopies
from forgather.ml.checkpoint.files.regular_files import path_inside, read_small_file
from forgather.ml.checkpoint.files.state_files import checked_weights, read_state, read_weight_names, verify_file
from forgather.ml.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    check_relative_path,
    has_versioned_manifest,
    read_manifest,
)
from forgather.ml.checkpoint.sharding.sharded_tensors import is_sharded
from forgather.ml.checkpoint.weights.adapters import adapters_only
from forgather.ml.checkpoint.weights.index import ShardIndex, index_file_name, shard_name, tensor_identity
from forgather.ml.checkpoint.weights.safetensors_io import (
    SHARING_KEY,
    SharingMetadataT,
    check_fit,
    checked_sharing,
    expect_type,
    load_rows,
    load_safetensors,
    read_header,
)

_Records = dict[str, FileRecord]


@dataclass(frozen=True)
class WeightLocation:
    """Weight files of a directory, and the manifest records to verify them."""

    directory: str
    weight_map: dict[str, str]
    sharing: SharingMetadataT
    records: dict[str, FileRecord] = field(default_factory=dict)

    def stored_name(self, name: str) -> str | None:
        """Return the stored name of a tensor (a tied name if need be), or None if the directory lacks it."""
        if name in self.weight_map:
            return name
        members = (member for group in self.sharing if name in group for member in group)
        return next((member for member in members if member in self.weight_map), None)

    def path_and_record(self, file: str) -> tuple[str, FileRecord | None]:
        """Return the path of a weight file, and its manifest record if there is one."""
        path = path_inside(self.directory, file)
        record = self.records.get(file)
        # For a file with a record, reading reports that it is missing, together with its expected size.
        if record is None and not os.path.exists(path):
            raise CheckpointLoadError(f"{path} is missing: the index of the weights refers to it.")
        return path, record


def locate_weights(
    model_dir: str,
    sharing: SharingMetadataT | None = None,
    safetensors: bool | None = None,
    *,
    is_foreign: bool = False,
) -> WeightLocation:
    """Return the location of the weight files of a directory; in a checkpoint, only of files in the manifest.

    `safetensors` selects the format; None prefers safetensors. `is_foreign` ignores the manifest, because the manifest
    of another program has no checksums.
    """
    records = None if is_foreign else _records_of(model_dir)
    formats = (True, False) if safetensors is None else (safetensors,)
    for name in map(index_file_name, formats):
        if _is_part(model_dir, name, records):
            return _location(model_dir, _read_index(model_dir, name, records), sharing, records)
    for is_safetensors in formats:
        if _is_part(model_dir, shard_name(1, 1, is_safetensors), records):
            return _single_file(model_dir, is_safetensors, sharing, records)
    where = "" if records is None else f" among the files that its {MANIFEST_NAME} lists"
    if (message := adapters_only(model_dir)) is not None:
        raise CheckpointLoadError.misfit(message)
    kinds = {True: "model*.safetensors", False: "pytorch_model*.bin"}
    raise CheckpointLoadError(
        f"There are no weight files in {model_dir}{where} ({' or '.join(kinds[one] for one in formats)})."
    )


def _single_file(
    model_dir: str, safetensors: bool, sharing: SharingMetadataT | None, records: _Records | None
) -> WeightLocation:
    name = shard_name(1, 1, safetensors)
    if not safetensors:
        names = _names_in_bin(model_dir, name, records)
        return WeightLocation(model_dir, dict.fromkeys(names, name), sharing or [], records or {})
    header = read_header(os.path.join(model_dir, name), (records or {}).get(name))
    return WeightLocation(model_dir, dict.fromkeys(header.tensors, name), sharing or header.sharing, records or {})


def load_shard_index(model_dir: str, index_name: str | None = None) -> ShardIndex:
    """Read the index of sharded weights; `model_dir` may also be the path of the index file.

    Without a name, the safetensors index is preferred. In a Forgather checkpoint the checksum of the file is verified.
    """
    if index_name is None and os.path.isfile(model_dir):
        model_dir, index_name = os.path.split(os.path.abspath(model_dir))
    records = _records_of(model_dir)
    names = [index_file_name(True), index_file_name(False)] if index_name is None else [index_name]
    for name in names:
        if _is_part(model_dir, name, records):
            return _read_index(model_dir, name, records)
    raise CheckpointLoadError(
        f"There is no index of weights in {model_dir} ({' or '.join(names)}). A model in a single file has none."
    )


def _location(
    model_dir: str, index: ShardIndex, sharing: SharingMetadataT | None, records: _Records | None
) -> WeightLocation:
    # The caller's ties (from the manifest) take precedence over the ties in the index.
    stored = index.get("metadata", {}).get(SHARING_KEY, [])
    return WeightLocation(model_dir, dict(index["weight_map"]), sharing or stored, records or {})


def _records_of(model_dir: str) -> _Records | None:
    """Return the manifest records by path, or None for a directory without a Forgather manifest."""
    if not has_versioned_manifest(model_dir):
        return None
    return {record.path: record for record in read_manifest(model_dir).files}


def _is_part(model_dir: str, name: str, records: _Records | None) -> bool:
    """Return whether a file belongs to the directory: by the manifest, or by its existence without a manifest."""
    # A file in a checkpoint that the manifest does not list has no checksum and may have been added by anyone.
    return os.path.exists(os.path.join(model_dir, name)) if records is None else name in records


def _names_in_bin(model_dir: str, name: str, records: _Records | None) -> Collection[str]:
    """Return the tensor names in a `.bin` file."""
    # The manifest has the names too. Using them avoids reading the file twice.
    path, record = os.path.join(model_dir, name), (records or {}).get(name)
    if record is not None and record.tensors:
        return record.tensors
    if record is not None:
        verify_file(model_dir, record)
    return read_weight_names(path)


def _read_index(model_dir: str, name: str, records: _Records | None) -> ShardIndex:
    path, record = os.path.join(model_dir, name), (records or {}).get(name)
    if record is not None:
        verify_file(model_dir, record)
    text = read_small_file(path, follow=records is None)
    try:
        index: ShardIndex = strict_json.loads(text, path)
        _check_index(index, records)
    except (ValueError, CheckpointCorruptError) as error:
        # With a verified checksum an invalid index means damage. Without one it may be any file.
        failure = CheckpointLoadError if records is None else CheckpointCorruptError
        raise failure(f"{path} is not an index of weights: {error}") from error
    return index


def _check_index(index: Any, records: _Records | None) -> None:
    """Raise `ValueError` unless an index is valid and refers only to files in its directory (or checkpoint)."""
    # The file may be from an untrusted source: a path such as "../../x" must not be opened.
    metadata = expect_type(expect_type(index, dict, "the index").get("metadata", {}), dict, "metadata")
    checked_sharing(metadata.get(SHARING_KEY, []))
    weight_map = expect_type(index.get("weight_map"), dict, "weight_map")
    for name, file in weight_map.items():
        try:
            check_relative_path(file)
        except ValueError as error:
            raise ValueError(f"the file of tensor {name!r} has a path that {error}") from error
        if records is not None and file not in records:
            raise ValueError(
                f"{file} (tensor {name!r}) is not part of the checkpoint: {MANIFEST_NAME} does not list it"
            )


def read_weights(location: WeightLocation, targets: Mapping[str, Tensor]) -> None:
    """Load weights into `targets` in place, by name; other tensors are not read."""
    # Grouped by file, so that each file is opened once, and tied names by stored tensor, so that it is read once.
    by_file: dict[str, dict[str, list[Tensor]]] = {}
    for name, target in targets.items():
        stored = location.stored_name(name)
        if stored is None:
            raise CheckpointLoadError(f"{location.directory} has no tensor {name!r}.")
        by_file.setdefault(location.weight_map[stored], {}).setdefault(stored, []).append(target)
    _check_shapes(location, by_file)
    for file, wanted in sorted(by_file.items()):
        path, record = location.path_and_record(file)
        first = {name: tensors[0] for name, tensors in wanted.items()}
        sharded = {name: tensor for name, tensor in first.items() if is_sharded(tensor)}
        whole = {name: tensor for name, tensor in first.items() if name not in sharded}
        if not file.endswith(".safetensors"):
            _load_bin(path, first, record)
        else:
            load_rows(path, sharded, record)
            if whole:
                load_safetensors(path, whole, record)
        for tensors in wanted.values():
            for other in tensors[1:]:
                # Tied targets share memory and are already filled. Separate copies get the same values.
                if tensor_identity(other) != tensor_identity(tensors[0]):
                    other.detach().copy_(tensors[0].detach())


def _check_shapes(location: WeightLocation, by_file: Mapping[str, Mapping[str, Sequence[Tensor]]]) -> None:
    """Raise unless all stored shapes and dtypes fit the targets; checked before the first target is changed."""
    for file, wanted in sorted(by_file.items()):
        path, record = location.path_and_record(file)
        # The shapes in a .bin file are known only after it is read, so `_load_bin` checks them per file.
        if file.endswith(".safetensors"):
            entries = read_header(path, record).tensors
            for name, tensors in wanted.items():
                for tensor in tensors:
                    entry = _found(path, entries, name)
                    check_fit(path, name, entry.shape, entry.dtype, tensor)


def _found(path: str, content: Mapping[str, Any], name: str) -> Any:
    if name not in content:
        raise CheckpointLoadError(f"{path} has no tensor {name!r}, although the index lists it there.")
    return content[name]


def _load_bin(path: str, targets: Mapping[str, Tensor], record: FileRecord | None) -> None:
    # The file is mapped, because the process must not hold the weights twice.
    state = checked_weights(path, read_state(path, record, follow=record is None, mapped=True))
    for name, target in targets.items():
        stored = _found(path, state, name)
        check_fit(path, name, tuple(stored.shape), stored.dtype, target)
    copies = TensorCopies()
    with torch.no_grad():
        for name, target in targets.items():
            with _naming_tensor(path, name):
                if target.layout is torch.strided and state[name].layout is torch.strided:
                    copies.add(target, state[name])
                else:
                    # `target.detach().copy_` would leave the content of a sparse tensor unchanged.
                    target.copy_(state[name])
    copies.run()


@contextlib.contextmanager
def _naming_tensor(path: str, name: str) -> Iterator[None]:
    """Convert errors of torch, such as an unsupported dtype, into errors that name the file and the tensor."""
    try:
        yield
    except CheckpointLoadError:
        raise
    except RuntimeError as error:
        raise CheckpointLoadError(f"{path}: tensor {name[:100]!r} cannot be loaded: {error}") from error


def read_tensors(location: WeightLocation, names: Collection[str], device: torch.device | str) -> dict[str, Tensor]:
    """Return new tensors on `device` with the named weights."""
    missing = [name for name in names if location.stored_name(name) is None]
    if missing:
        raise CheckpointLoadError(f"{location.directory} has no tensors named {abbreviate(missing)}.")
    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault(location.weight_map[location.stored_name(name) or name], []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, wanted in sorted(by_file.items()):
        tensors.update(_tensors_of_file(location, file, wanted, device))
    return {name: tensors[name] for name in names}


def _tensors_of_file(
    location: WeightLocation, file: str, names: Sequence[str], device: torch.device | str
) -> dict[str, Tensor]:
    path, record = location.path_and_record(file)
    stored = {name: location.stored_name(name) or name for name in names}
    if not file.endswith(".safetensors"):
        state = checked_weights(path, read_state(path, record, follow=record is None))
        copies = {}
        for name in names:
            with _naming_tensor(path, name):
                copies[name] = _found(path, state, stored[name]).to(device, copy=True)
        return copies
    entries = read_header(path, record).tensors
    tensors = {}
    for name in names:
        entry = _found(path, entries, stored[name])
        tensors[name] = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    read_weights(location, tensors)
    return tensors


def abbreviate(names: Sequence[str], limit: int = 10) -> str:
    """Return the first `limit` names and the number of further names, for a message."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
