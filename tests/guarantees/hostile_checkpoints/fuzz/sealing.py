"""Sealing: makes a manifest match changed files, as an attacker with write access could."""

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
    """Make a checkpoint consistent after a change to one file; a manifest that is not text stays unchanged."""
    if name != MANIFEST:
        _seal_files(checkpoint)
    elif (checkpoint / name).is_file() and not (checkpoint / name).is_symlink():
        with contextlib.suppress(UnicodeDecodeError):
            (checkpoint / name).write_bytes(sealed_text((checkpoint / name).read_bytes().decode()))


def _seal_files(checkpoint: Path) -> None:
    """Write current sizes and checksums into the manifest, which must be valid."""
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
        # Some system files, such as /proc/self/mem, look regular but cannot be read.
        return
    record["checksum"] = checksum(content)
    if path.suffix == ".safetensors":
        record["tensors"] = _tensor_checksums(content)


def _tensor_checksums(content: bytes) -> dict[str, str]:
    """Return checksums of the header and of each tensor, as far as the header can be parsed."""
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
    """Return the manifest text with its checksum; text that is not a JSON object stays unchanged."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            return text.encode()
        data.pop("manifest_checksum", None)
        content = json.dumps(data, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text.encode("utf-8", "surrogatepass")
    seal = {"covers": sorted(data), "value": checksum(content.encode())}
    # Edit the text itself: values such as 1e400 and duplicate keys must survive.
    body = _without_seal(text).rstrip().removesuffix("}").rstrip()
    separator = "" if body.endswith(("{", ",")) else ","
    return f'{body}{separator} "manifest_checksum": {json.dumps(seal)}}}\n'.encode("utf-8", "surrogatepass")


def _without_seal(text: str) -> str:
    """Remove the seal, which is the last entry of a manifest written by Forgather."""
    position = text.rfind('"manifest_checksum"')
    if position < 0:
        return text
    return text[:position].rstrip().removesuffix(",") + "}"
