"""Import of weights from a foreign checkpoint: from weight files, or from shards of torch DCP.

Names and shapes of all tensors are checked before the first tensor changes. `importing` calls `load_foreign_weights`
on every rank.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.files.regular_files import is_real_directory, open_regular
from forgather.ml.checkpoint.foreign.dcp_metadata import METADATA_FILE
from forgather.ml.checkpoint.foreign.ownership import Owner
from forgather.ml.checkpoint.weights.export import WEIGHT_FILE
from forgather.ml.checkpoint.weights.module_weights import load_into_modules, locate_weights
from forgather.ml.checkpoint.weights.safetensors_io import SharingMetadataT

# Folder where accelerate, and transformers through it, write the sharded weights of an FSDP model.
_FSDP_FOLDER = "pytorch_model_fsdp_0"


def load_foreign_weights(
    path: str,
    owner: Owner,
    modules: Sequence[nn.Module],
    all_names: Collection[str],
    sharing: SharingMetadataT,
    strict: bool,
) -> None:
    """Load the weights of this rank's modules, after a check of all names and shapes."""
    folder = _dcp_folder(path, owner)
    if folder is not None:
        # Import on demand: torch.distributed.checkpoint is slow to import, and few runs need it.
        from forgather.ml.checkpoint.foreign.dcp_weights import load_dcp_weights

        load_dcp_weights(folder, modules, all_names, sharing)
        return
    if owner is Owner.DEEPSPEED and not any(map(WEIGHT_FILE.match, os.listdir(path))):
        raise CheckpointLoadError(
            f"The weights in {path} are in DeepSpeed's own files, which are pickles. Run zero_to_fp32.py from that "
            "directory with --safe_serialization, and import its output."
        )
    location = locate_weights(path, is_foreign=True)
    location = replace(location, sharing=[*location.sharing, *sharing])
    if owner is not Owner.HUGGING_FACE:
        # Only the cache of Hugging Face consists of symlinks. Elsewhere a symlink leads out of the checkpoint.
        for file in sorted(set(location.weight_map.values())):
            os.close(open_regular(location.path_and_record(file)[0]))
    load_into_modules(location, modules, strict, all_names)


def _dcp_folder(path: str, owner: Owner) -> str | None:
    if owner is Owner.TORCH_DCP:
        return path
    folder = os.path.join(path, _FSDP_FOLDER)
    has_weight_files = any(map(WEIGHT_FILE.match, os.listdir(path)))
    is_sharded = is_real_directory(folder) and os.path.lexists(os.path.join(folder, METADATA_FILE))
    return folder if is_sharded and not has_weight_files else None
