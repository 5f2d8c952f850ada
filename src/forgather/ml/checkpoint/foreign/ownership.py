"""Ownership of checkpoint directories: Forgather, another program, or unknown.

Only Forgather's own checkpoints are ever replaced or deleted. The store checks before it replaces, deletes or cleans
up. Loading checks to choose between its own reader and an import.
"""

import enum
import os
import re
from collections.abc import Collection

from forgather.ml.checkpoint.encoding import strict_json
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError, CheckpointVersionError
from forgather.ml.checkpoint.files.regular_files import is_real_directory, read_small_file
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, read_manifest
from forgather.ml.checkpoint.metadata import METADATA_NAME
from forgather.ml.checkpoint.weights.adapters import ADAPTER_FILE
from forgather.ml.checkpoint.weights.export import WEIGHT_FILE

SET_ASIDE = re.compile(r".+\.set-aside-[0-9a-f]{12}$")
_STATE_FILE = re.compile(r"[A-Za-z0-9][\w.-]*_state(_(rank|node)_\d+|_group_[\w.-]+_\d+)?\.pt$")


class Owner(enum.Enum):
    """Program that wrote a directory; the value is its description for messages."""

    OURS = "a Forgather checkpoint"
    UNVERSIONED = "a checkpoint in Forgather's file layout, but without a format version and checksums"
    TRANSFORMERS = "a checkpoint of transformers.Trainer"
    ACCELERATE = "a checkpoint of accelerate.save_state"
    TORCH_DCP = "a checkpoint of torch.distributed.checkpoint"
    DEEPSPEED = "a checkpoint of DeepSpeed"
    HUGGING_FACE = "a directory of Hugging Face weights"
    ADAPTERS = "a directory of PEFT adapters"
    UNKNOWN = "not recognised as a Forgather checkpoint"

    @property
    def is_other_program(self) -> bool:
        return self not in (Owner.OURS, Owner.UNKNOWN)

    @property
    def has_training_state(self) -> bool:
        """Whether another program can resume training from it."""
        return self.is_other_program and self not in (Owner.HUGGING_FACE, Owner.ADAPTERS)


def owner_of(path: str) -> Owner:
    """Return the owner of a directory; a valid Forgather manifest decides first. Damaged checkpoints are UNKNOWN."""
    try:
        before = os.stat(path)
        names = sorted(os.listdir(path))
        # The list is not complete if a job has renamed the directory and deletes it.
        if not os.path.samestat(before, os.stat(path)):
            return Owner.UNKNOWN
    except OSError:
        return Owner.UNKNOWN
    if MANIFEST_NAME in names:
        return _owner_by_manifest(path)
    if _has_own_names(names):
        # Forgather's files without a manifest: a damaged checkpoint. It may hold weights too, so check this before
        # the other programs.
        return Owner.UNKNOWN
    return _other_program(set(names))


def _has_own_names(names: Collection[str]) -> bool:
    return METADATA_NAME in names or any(map(_STATE_FILE.match, names))


def has_own_files(path: str) -> bool:
    """Return whether a directory has files with the names of a Forgather checkpoint, or is empty."""
    names = os.listdir(path)
    return not names or MANIFEST_NAME in names or _has_own_names(names)


def recognise(path: str) -> Owner | None:
    """Return the owner if it is another program; None for Forgather's (intact or damaged) and unknown directories."""
    owner = owner_of(path)
    return owner if owner.is_other_program else None


def require_own(checkpoint: str) -> None:
    """Raise `CheckpointLoadError` for a checkpoint of another program."""
    owner = recognise(checkpoint)
    if owner is not None:
        raise CheckpointLoadError(
            f"{checkpoint} is {owner.value}, which has no checksums and no components. `forgather checkpoint import` turns "
            "it into a Forgather checkpoint."
        )


def is_ours(path: str) -> bool:
    """Return whether a path is a real directory with a valid Forgather manifest, which may be replaced or deleted."""
    return is_real_directory(path) and owner_of(path) is Owner.OURS


def _owner_by_manifest(path: str) -> Owner:
    try:
        read_manifest(path)
    except CheckpointVersionError:
        # Written by a newer version of Forgather.
        return Owner.OURS
    except (CheckpointError, FileNotFoundError):
        return Owner.UNVERSIONED if _is_unversioned(os.path.join(path, MANIFEST_NAME)) else Owner.UNKNOWN
    return Owner.OURS


def _is_unversioned(manifest_path: str) -> bool:
    try:
        data = strict_json.loads(read_small_file(manifest_path), manifest_path)
    except (CheckpointError, OSError):
        return False
    fields = {"checkpoint_path", "world_size", "timestamp", "components"}
    return isinstance(data, dict) and fields <= set(data) and not {"format_version", "manifest_checksum"} & set(data)


def _other_program(names: set[str]) -> Owner:
    # The most specific file names first: directories of every program may contain weight files.
    if "trainer_state.json" in names:
        return Owner.TRANSFORMERS
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        return Owner.TORCH_DCP
    if "zero_to_fp32.py" in names or any(re.match(r"global_step\d+$", name) for name in names):
        return Owner.DEEPSPEED
    if any(re.match(r"(random_states_\d+\.pkl|optimizer(_\d+)?\.bin|scheduler(_\d+)?\.bin)$", name) for name in names):
        return Owner.ACCELERATE
    if any(map(WEIGHT_FILE.match, names)):
        return Owner.HUGGING_FACE
    return Owner.ADAPTERS if any(map(ADAPTER_FILE.match, names)) else Owner.UNKNOWN
