"""Verification of checkpoint files without a training job: sizes, checksums, and whether each file parses.

`store` calls it for the files of a manifest and returns the problems as text. Several files are read at once.
"""

import functools
import os
from collections.abc import Callable, Sequence

from forgather.ml.checkpoint.encoding import strict_json
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointError, UnregisteredClassError
from forgather.ml.checkpoint.files.eval_metrics import EVAL_METRICS_NAME, load_checkpoint_metrics
from forgather.ml.checkpoint.files.parallel_read import run_in_threads
from forgather.ml.checkpoint.files.regular_files import path_inside, read_small_file
from forgather.ml.checkpoint.files.state_files import checked_weights, read_state, verify_file
from forgather.ml.checkpoint.manifest import CheckpointManifest, FileRecord
from forgather.ml.checkpoint.metadata import METADATA_COMPONENT, METADATA_NAME, CheckpointMetadata
from forgather.ml.checkpoint.store import EDITABLE_FILES
from forgather.ml.checkpoint.weights.location import locate_weights
from forgather.ml.checkpoint.weights.safetensors_io import HEADER_ENTRY, read_header


def problems_by_file(
    directory: str, records: Sequence[FileRecord], note_bytes: Callable[[int], None] | None = None
) -> dict[str, list[str]]:
    """Return the problems of each file, by its path; several files are read at once, the largest first."""
    found: dict[str, list[str]] = {}

    def check(record: FileRecord) -> None:
        found[record.path] = problems_with_file(directory, record, note_bytes)

    largest_first = sorted(records, key=lambda record: -record.size)
    run_in_threads([functools.partial(check, record) for record in largest_first])
    return {record.path: found[record.path] for record in records}


def problems_with_file(
    directory: str, record: FileRecord, note_bytes: Callable[[int], None] | None = None
) -> list[str]:
    """Return the problems of one file: wrong size, wrong checksum, or content that does not match its file type."""
    try:
        file_path = path_inside(directory, record.path)
        if record.path == EVAL_METRICS_NAME:
            # No checksum: users edit this file.
            load_checkpoint_metrics(directory)
        else:
            if record.path not in EDITABLE_FILES:
                verify_file(directory, record, note_bytes)
            _check_format(directory, file_path, record)
    except UnregisteredClassError:
        # Only the training program registers its classes. Verification runs without them.
        return []
    except (CheckpointError, OSError) as error:
        return [str(error)]
    return []


def _check_format(directory: str, path: str, record: FileRecord) -> None:
    # A mapped file keeps the tensors out of memory; only their names and shapes matter here.
    if record.path.endswith(".pt"):
        read_state(path, mapped=True)
    elif record.path.endswith(".bin"):
        _check_names(path, record, set(checked_weights(path, read_state(path, mapped=True))))
    elif record.path == METADATA_NAME:
        CheckpointMetadata.read(directory)
    elif record.path.endswith(".json"):
        strict_json.loads(read_small_file(path), path)
    elif record.path.endswith(".safetensors"):
        # Other programs wrote files without tensor checksums, such as adapters. The checksum of the file covers them.
        _check_names(path, record, set(read_header(path, record if record.tensors else None).tensors))


def _check_names(path: str, record: FileRecord, found: set[str]) -> None:
    listed = set(record.tensors) - {HEADER_ENTRY}
    if listed and listed != found:
        raise CheckpointCorruptError(
            f"{path} is damaged: its tensors differ from its manifest; only in one of the two: "
            f"{', '.join(sorted(listed ^ found)[:10])}"
        )


def problems_with_weights(path: str, manifest: CheckpointManifest) -> list[str]:
    """Return the problems of the weight index: it must list the same tensors as the weight files."""
    weights = [record for record in manifest.files if record.path.endswith((".safetensors", ".bin"))]
    # Adapters in PEFT's format belong to no component.
    files = [record for record in weights if record.component != METADATA_COMPONENT]
    if not files:
        return []
    try:
        location = locate_weights(path)
    except (CheckpointError, OSError) as error:
        return [str(error)]
    stored = {(name, record.path) for record in files for name in record.tensors if name != HEADER_ENTRY}
    wrong = sorted(name for name, _ in set(location.weight_map.items()) ^ stored)
    if stored and wrong:
        return [f"{os.path.abspath(path)}: the index and the weight files differ in {', '.join(wrong[:10])}"]
    return []
