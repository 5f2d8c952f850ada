"""Making a manifest agree with files that were changed, as somebody could who may write to the directory."""

import contextlib
import json
import stat
from pathlib import Path
from typing import Any

import xxhash

from tests.guarantees.hostile_checkpoints.fuzz.place import MANIFEST


def checksum(content: bytes) -> str:
    return str(xxhash.xxh3_128_hexdigest(content))


def seal(checkpoint: Path, name: str) -> None:
    """Make a checkpoint consistent again after a change to one of its files; a manifest that is no text stays as it is."""
    if name != MANIFEST:
        _seal_files(checkpoint)
    elif (checkpoint / name).is_file() and not (checkpoint / name).is_symlink():
        with contextlib.suppress(UnicodeDecodeError):
            (checkpoint / name).write_bytes(sealed_text((checkpoint / name).read_bytes().decode()))


def _seal_files(checkpoint: Path) -> None:
    """Enter sizes and checksums of the files as they are now; the manifest must be sound."""
    manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    for record in manifest["files"]:
        _seal_record(record, checkpoint / record["path"])
    (checkpoint / MANIFEST).write_bytes(sealed_text(json.dumps(manifest)))


def _seal_record(record: dict[str, Any], path: Path) -> None:
    try:
        status = path.stat()
    except OSError:
        return
    record["size"] = status.st_size
    if not stat.S_ISREG(status.st_mode):
        return
    try:
        content = path.read_bytes()
    except OSError:
        # A file of the system that looks like any other.
        return
    record["checksum"] = checksum(content)
    if path.suffix == ".safetensors":
        record["tensors"] = _tensor_checksums(content)


def _tensor_checksums(content: bytes) -> dict[str, str]:
    """Of the header and of each tensor, as far as the header can be made sense of."""
    base = 8 + int.from_bytes(content[:8], "little")
    found = {"__header__": checksum(content[:base])}
    try:
        header = json.loads(content[8:base])
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                found[name] = checksum(content[base + start : base + end])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return found


def sealed_text(text: str) -> bytes:
    """The text of a manifest with the checksum of its content; what is no JSON object stays as it is."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            return text.encode()
        data.pop("manifest_checksum", None)
        content = json.dumps(data, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text.encode("utf-8", "surrogatepass")
    seal = {"covers": sorted(data), "value": checksum(content.encode())}
    # As text: values such as 1e400 and keys that stand there twice must stay what they are.
    body = _without_seal(text).rstrip().removesuffix("}").rstrip()
    separator = "" if body.endswith(("{", ",")) else ","
    return f'{body}{separator} "manifest_checksum": {json.dumps(seal)}}}\n'.encode("utf-8", "surrogatepass")


def _without_seal(text: str) -> str:
    """The seal is the last entry of a manifest that was written by us."""
    position = text.rfind('"manifest_checksum"')
    if position < 0:
        return text
    return text[:position].rstrip().removesuffix(",") + "}"
