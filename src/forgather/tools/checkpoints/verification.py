"""Verification of checkpoints: every file against its checksum, several files at once.

Files that users may edit need only the right format. Files of optional components may be missing, as in a resume.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.checkpoint.foreign.ownership import require_own
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.tools.checkpoints.listing import (
    INCOMPLETE,
    list_checkpoints,
    looks_like_checkpoint,
    own_checkpoints_of,
    without_path,
)
from forgather.tools.checkpoints.paths import find_checkpoint


@dataclass(frozen=True)
class CheckpointVerdict:
    """Result for one checkpoint: its problems, one line each; none if it is intact."""

    path: str
    num_files: int
    size_bytes: int
    problems: Sequence[str]
    missing_optional: Sequence[str] = ()
    """Missing files that a resume does not need: these parts start fresh."""


@dataclass(frozen=True)
class Verification:
    """Verdicts on the checkpoints, with the bytes that were read and the time that it took."""

    checkpoints: Sequence[CheckpointVerdict]
    num_bytes: int
    seconds: float
    gone: Sequence[str] = ()
    """Paths of checkpoints that their run deleted during the verification."""

    @property
    def is_intact(self) -> bool:
        # Without a checkpoint, nothing was verified.
        return bool(self.checkpoints) and not any(one.problems for one in self.checkpoints)


def checkpoints_to_verify(path: str, everything: bool = False) -> list[str]:
    """Return one checkpoint, or with `everything` all checkpoints of its run, damaged ones too.

    For a run, one checkpoint is the newest complete one. Damaged ones of later steps follow it, so that they are no success.
    """
    if not everything:
        checkpoint = find_checkpoint(path)
        require_own(checkpoint)
        return [checkpoint, *_damaged_later(path)]
    found = own_checkpoints_of(path)
    # A run without checkpoints has nothing to verify, which is more likely a wrong path than a success.
    return found or [find_checkpoint(path)]


def _damaged_later(path: str) -> list[str]:
    """Return the damaged checkpoints of a run with later steps than its newest complete one; none for one checkpoint."""
    if looks_like_checkpoint(path):
        return []
    found = list_checkpoints(path).checkpoints
    newest = max((one.step or 0 for one in found if one.is_newest), default=0)
    return [one.path for one in found if one.status == INCOMPLETE and (one.step or 0) > newest]


def bytes_to_verify(checkpoints: Sequence[str]) -> int:
    """Return the total size of the files that the manifests list, for a progress bar."""
    total = 0
    for path in checkpoints:
        try:
            total += sum(record.size for record in read_manifest(path).files)
        except (CheckpointError, OSError):
            # The verification reports it.
            continue
    return total


def verify_checkpoints(checkpoints: Sequence[str], note_bytes: Callable[[int], None] | None = None) -> Verification:
    """Read every file of the checkpoints and compare it with its checksum and format.

    Checkpoints that their run deletes meanwhile are no damage: `gone` lists them.
    `note_bytes` gets the number of bytes of each part that was read, from several threads.
    """
    counts: list[int] = []

    def note(count: int) -> None:
        # `append` is atomic, a sum would need a lock.
        counts.append(count)
        if note_bytes is not None:
            note_bytes(count)

    begun = time.perf_counter()
    verdicts = {path: _verdict(path, note) for path in checkpoints}
    found = [verdict for verdict in verdicts.values() if verdict is not None]
    gone = [path for path, verdict in verdicts.items() if verdict is None]
    return Verification(found, sum(counts), time.perf_counter() - begun, gone)


def _verdict(path: str, note_bytes: Callable[[int], None]) -> CheckpointVerdict | None:
    """Return the verdict on a checkpoint; None if it is gone."""
    found = store.verify_unless_gone(path, note_bytes)
    if found is None:
        return None
    problems = [without_path(one, path) for one in found]
    try:
        records, missing = read_manifest(path).files, []
        if not problems:
            missing = store.open_checkpoint(path).missing_optional
    except (CheckpointError, OSError):
        return CheckpointVerdict(path, 0, 0, problems) if os.path.isdir(path) else None
    return CheckpointVerdict(path, len(records), sum(record.size for record in records), problems, missing)
