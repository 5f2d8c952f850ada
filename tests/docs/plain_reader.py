"""Reader of checkpoints that was written from docs/reference/checkpoint-format.md alone: no torch, no Forgather."""

import json
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from safetensors.numpy import load as load_tensors

MANIFEST = "checkpoint_manifest.json"
EDITABLE = ("eval_metrics.json", "trainer_state.json")
# Elements of the storage classes. NumPy has no bfloat16.
STORAGES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ByteStorage": "|u1",
    "BoolStorage": "|b1",
}


class Checkpoint(NamedTuple):
    """Content of a checkpoint: the manifest, weights by FQN with tied names, states by component and owner."""

    manifest: dict[str, Any]
    weights: dict[str, np.ndarray]
    states: dict[str, dict[int | None, Any]]


class _Name(str):
    """Name of a class or function in a pickle. Calling it builds plain data only."""

    def __call__(self, *arguments: Any) -> Any:
        if self == "collections.OrderedDict":
            return OrderedDict()
        if self == "torch._utils._rebuild_tensor_v2":
            storage, offset, shape, strides = arguments[:4]
            steps = [step * storage.itemsize for step in strides]
            return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps).copy()
        if self == "torch.Size":
            return tuple(arguments[0])
        if self == "_codecs.encode":
            return arguments[0].encode("latin1")
        if self == "torch.device":
            return ":".join(map(str, arguments))
        raise ValueError(f"the format has no {self}")


class _Unpickler(pickle.Unpickler):
    """Unpickler that imports and runs nothing."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        super().__init__(archive.open("archive/data.pkl"))
        self._archive = archive

    def find_class(self, module: str, name: str) -> Any:
        return _Name(f"{module}.{name}")

    def persistent_load(self, identity: Any) -> Any:
        word, kind, number, place, length = identity
        assert word == "storage" and place == "cpu"
        record = self._archive.getinfo(f"archive/data/{number}")
        self._archive.fp.seek(record.header_offset + 26)
        name, extra = (int.from_bytes(self._archive.fp.read(2), "little") for _ in range(2))
        self._archive.fp.seek(name + extra, 1)
        content = self._archive.fp.read(record.file_size)
        return np.frombuffer(content, STORAGES[kind.rpartition(".")[2]])[:length]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest after the check of its checksum."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    if manifest["format_version"] > 1:
        raise ValueError("a newer format")
    seal = manifest["manifest_checksum"]
    covered = {key: manifest[key] for key in seal["covers"] if key in manifest}
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"))
    if xxhash.xxh3_128_hexdigest(text.encode()) != seal["value"]:
        raise ValueError("the manifest is damaged")
    return manifest


def read_state(path: Path) -> Any:
    """Return the content of a state file as plain containers and NumPy arrays."""
    with zipfile.ZipFile(path) as archive:
        return _Unpickler(_without_checksums(archive)).load()


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint of any number of ranks."""
    found = Checkpoint(read_manifest(folder), {}, {})
    for record in found.manifest["files"]:
        path = folder / record["path"]
        content = path.read_bytes()
        is_intact = len(content) == record["size"] and xxhash.xxh3_128_hexdigest(content) == record["checksum"]
        if not is_intact and record["path"] not in EDITABLE:
            raise ValueError(f"{path} is damaged")
        if path.suffix == ".safetensors":
            found.weights.update(load_tensors(content))
        elif path.suffix == ".pt":
            states = found.states.setdefault(record["component"], {})
            states[record.get("owner")] = read_state(path)
    for names in found.manifest["components"]["model"]["metadata"].get("param_sharing", []):
        stored = next(name for name in names if name in found.weights)
        found.weights.update(dict.fromkeys(names, found.weights[stored]))
    return found


def merged_optimizer(states: dict[int | None, Any]) -> dict[str, Any]:
    """Return the moments of all parameters by FQN, from the optimizer files of all ranks."""
    return {name: moments for state in states.values() for name, moments in state["state"].items()}


def _without_checksums(archive: zipfile.ZipFile) -> zipfile.ZipFile:
    """Leave out CRC-32, which is 0 in state files."""
    for record in archive.infolist():
        record.CRC = None  # type: ignore[assignment]
    return archive
