"""failures.jsonl: one JSON line per failure of a run, with its step, rank, host, error and the resumed checkpoint.

The trainer notes Python errors, and the launcher notes workers that died without one. The file keeps the newest 1,000
lines. A note that cannot be written is a warning: the failure itself matters more. `restart_policy` reads the file.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

from forgather._run_files import append_line, last_lines, open_in_run
from forgather._terminal_text import printable
from forgather.ml.checkpoint.files.durable import replace_file

logger = logging.getLogger(__name__)

FILE_NAME = "failures.jsonl"
_MOST_LINES = 1000
_MOST_CHARACTERS = 2000
_MOST_BYTES = 8 * 2**20
"""Bytes that are read from the end of the file; more than 1,000 notes of this version need."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Failure:
    """One line of failures.jsonl."""

    time: str
    attempt: str
    """Identity of the attempt: all ranks of one start of the job share it."""
    step: int
    rank: int
    host: str
    error_type: str
    message: str
    resumed_from: str | None
    fingerprint: str
    """Equal for errors of the same type with the same first line, apart from numbers."""

    @property
    def key(self) -> tuple[str, int]:
        """Identity of the failure: same cause at the same step."""
        return self.fingerprint, self.step

    def __str__(self) -> str:
        # It is followed by a full stop.
        first_line = self.message.split("\n")[0].rstrip(".")
        return f"{self.error_type} at step {self.step} on rank {self.rank} (host {self.host}): {first_line}"


def failure_of(
    progress: Mapping[str, Any], rank: int, error_type: str, message: str, host: str | None = None
) -> Failure:
    """Return the note of a failure that happens now; `progress` has the attempt, its step and its checkpoint."""
    first_line = _NUMBERS.sub("#", message.strip().split("\n")[0])
    return Failure(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        attempt=str(progress["attempt"]),
        step=int(progress["step"]),
        rank=rank,
        host=host or socket.gethostname(),
        error_type=error_type,
        message=printable(message[:_MOST_CHARACTERS]),
        resumed_from=progress.get("resumed_from"),
        fingerprint=hashlib.sha256(f"{error_type}: {first_line}".encode()).hexdigest()[:12],
    )


def note_failure(output_dir: str, failure: Failure) -> None:
    """Append a failure to the file, unless a rank has noted the same failure of this attempt."""
    if not os.path.isdir(output_dir):
        # The directory of a run exists. Somebody has removed or renamed it, and must not find it again.
        logger.warning("The failure could not be noted, because the directory %s is gone.", output_dir)
        return
    try:
        with _locked(output_dir):
            _append(output_dir, failure)
    except OSError as error:
        logger.warning("The failure could not be noted in %s: %s", os.path.join(output_dir, FILE_NAME), error)


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Lock a directory, since several ranks note the same failure at the same time."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        # Without locks, as on some network file systems, a failure may be noted twice. The policy counts attempts.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _append(output_dir: str, failure: Failure) -> None:
    lines = _last_lines(output_dir)
    known = [one for one in map(_parsed, lines) if one is not None]
    if any(one.attempt == failure.attempt and one.key == failure.key for one in known):
        return
    if len(lines) >= _MOST_LINES:
        replace_file(os.path.join(output_dir, FILE_NAME), b"\n".join(lines[1 - _MOST_LINES :]) + b"\n")
    append_line(output_dir, FILE_NAME, json.dumps(asdict(failure)))


def read_failures(output_dir: str) -> list[Failure]:
    """Return the noted failures, oldest first; damaged lines are skipped with a warning."""
    path = os.path.join(output_dir, FILE_NAME)
    try:
        lines = _last_lines(output_dir)
    except OSError as error:
        logger.warning("%s could not be read, so earlier failures are not known: %s", path, error)
        return []
    found = [_parsed(line) for line in lines]
    num_damaged = found.count(None)
    if num_damaged:
        logger.warning("%d damaged line(s) of %s are skipped.", num_damaged, path)
    return [one for one in found if one is not None]


def _last_lines(output_dir: str) -> list[bytes]:
    """Return the newest lines; none if there is no file."""
    try:
        with open_in_run(output_dir, FILE_NAME) as file:
            lines = [line.strip() for _, line in last_lines(file, _MOST_BYTES)]
            return [line for line in lines if line][-_MOST_LINES:]
    except FileNotFoundError:
        return []


def _parsed(line: bytes) -> Failure | None:
    try:
        content: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    names = [field.name for field in fields(Failure)]
    if not isinstance(content, dict) or not set(names) <= set(content):
        return None
    values = {name: content[name] for name in names}
    numbers = [values.pop(name) for name in ("step", "rank")]
    resumed_from = values.pop("resumed_from")
    is_right = all(type(number) is int for number in numbers) and all(type(one) is str for one in values.values())
    if not is_right or not isinstance(resumed_from, str | None):
        return None
    texts = {name: printable(text[:_MOST_CHARACTERS]) for name, text in values.items()}
    return Failure(step=numbers[0], rank=numbers[1], resumed_from=resumed_from, **texts)
