"""Verification of checkpoint files without a training job: sizes, checksums, and whether each file parses.

`store` calls it for every file of a manifest and returns the problems as text.
"""

import os

from forgather.ml.checkpoint.encoding import strict_json
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointError, UnregisteredClassError
from forgather.ml.checkpoint.files.eval_metrics import EVAL_METRICS_NAME, load_checkpoint_metrics
from forgather.ml.checkpoint.files.regular_files import path_inside, read_small_file
from forgather.ml.checkpoint.files.state_files import checked_weights, read_state, verify_file
from forgather.ml.checkpoint.manifest import CheckpointManifest, FileRecord
from forgather.ml.checkpoint.metadata import METADATA_NAME, CheckpointMetadata
from forgather.ml.checkpoint.weights.location import locate_weights
from forgather.ml.checkpoint.weights.safetensors_io import HEADER_ENTRY, read_header


def problems_with_file(directory: str, record: FileRecord) -> list[str]:
    """Return the problems of one file: wrong size, wrong checksum, or content that does not match its file type."""
    try:
        file_path = path_inside(directory, record.path)
        if record.path.endswith(".pt"):
            read_state(file_path, record)
        elif record.path == EVAL_METRICS_NAME:
            # No checksum: users edit this file.
            load_checkpoint_metrics(directory)
        elif record.path.endswith(".bin"):
            _check_names(file_path, record, set(checked_weights(file_path, read_state(file_path, record))))
        else:
            verify_file(directory, record)
            _check_format(directory, file_path, record)
    except UnregisteredClassError:
        # Only the training program registers its classes. Verification runs without them.
        return []
    except (CheckpointError, OSError) as error:
        return [str(error)]
    return []


def _check_format(directory: str, path: str, record: FileRecord) -> None:
    if record.path == METADATA_NAME:
        CheckpointMetadata.read(directory)
    elif record.path.endswith(".json"):
        strict_json.loads(read_small_file(path), path)
    elif record.path.endswith(".safetensors"):
        _check_names(path, record, set(read_header(path, record).tensors))


def _check_names(path: str, record: FileRecord, found: set[str]) -> None:
    listed = set(record.tensors) - {HEADER_ENTRY}
    if listed and listed != found:
        raise CheckpointCorruptError(
            f"{path} is damaged: its tensors differ from its manifest; only in one of the two: "
            f"{', '.join(sorted(listed ^ found)[:10])}"
        )


def problems_with_weights(path: str, manifest: CheckpointManifest) -> list[str]:
    """Return the problems of the weight index: it must list the same tensors as the weight files."""
    files = [record for record in manifest.files if record.path.endswith((".safetensors", ".bin"))]
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
