"""State files (`.pt`): plain containers and tensors, written by `torch.save`, read without executing pickles."""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from forgather.ml.checkpoint.codec import decode_state
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError
from forgather.ml.checkpoint.file_io import HashingReader, HashingWriter
from forgather.ml.checkpoint.manifest import FileRecord
from forgather.ml.checkpoint.weight_files import check_checksum, check_size

_crc_lock = threading.Lock()
_ADVICE = ("Weights only load failed", "Please file an issue", "Check the documentation")


@contextlib.contextmanager
def _without_crc() -> Iterator[None]:
    """Our checksum is stronger and ten times faster than the archive's own, which loading does not check anyway."""
    with _crc_lock:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)


def write_state(writer: HashingWriter, encoded: Any) -> None:
    """Stream an encoded state out."""
    with _without_crc():
        torch.save(encoded, writer)  # type: ignore[arg-type]


def read_state(path: str, record: FileRecord | None = None) -> Any:
    """Read a state file in one pass, into memory of its own; with a record, verified before it is returned."""
    check_size(path, record)
    with HashingReader(path) as reader:
        refusal: Exception | None = None
        try:
            encoded = torch.load(reader, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - damaged bytes make torch raise anything; it is raised below
            refusal = error
        if reader.error is not None:
            # The disk failed, which says nothing about the file.
            raise reader.error
        if record is not None:
            check_checksum(path, "the file", record.checksum, reader.finish())
    if refusal is not None:
        raise refused(path, refusal) from refusal
    try:
        return decode_state(encoded)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error


def refused(path: str, refusal: Exception) -> CheckpointLoadError:
    """Why a file was not read, in torch's words but without its advice to unpickle the file all the same."""
    lines = [line.strip() for line in str(refusal).splitlines()]
    reason = next((line for line in lines if line and not line.startswith(_ADVICE)), "no message")
    return CheckpointLoadError(
        f"{path} was refused: it is not a state file, or it holds objects that could run code when unpickled "
        f"({type(refusal).__name__}: {reason})"
    )


def file_checksum(path: str) -> str:
    """The checksum of a whole file."""
    with HashingReader(path) as reader:
        return reader.finish()


def verify_file(directory: str, record: FileRecord) -> None:
    """Raise `CheckpointCorruptError` unless the file holds the bytes that were written."""
    path = os.path.join(directory, record.path)
    check_size(path, record)
    check_checksum(path, "the file", record.checksum, file_checksum(path))
