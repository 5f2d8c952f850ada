"""Quantised models on disk: safetensors files with torchao's tensor layout; nothing is unpickled.

transformers reads and writes the same layout, so `from_pretrained` loads the directories of transformers models. Called
by `forgather.ml.finalize`.
"""

import contextlib
import functools
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.files.hashed_io import HashingWriter
from forgather.ml.checkpoint.weights.module_weights import (
    create_sharing_metadata,
    locate_weights,
    read_tensors,
    retie_parameters,
    shard_name,
    stored_names,
)
from forgather.ml.checkpoint.weights.safetensors_io import write_safetensors
from forgather.ml.checkpoint.weights.trial_build import MODEL_CONFIG, require_plausible_model
from forgather.ml.no_init_weights import no_init_weights
from forgather.ml.utils import default_dtype

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig  # type: ignore[import-untyped]

_NAMES_KEY = "tensor_names"


def save_quantized(folder: str, model: nn.Module, config: "AOBaseConfig", full_precision: Sequence[str]) -> None:
    """Write a model that was quantised by `config`; `full_precision` names the linear layers that were skipped."""
    from transformers import PreTrainedModel, TorchAoConfig
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

    if not isinstance(model, PreTrainedModel):
        return _save_parts(folder, model)
    description = TorchAoConfig(config, modules_to_not_convert=list(full_precision))
    holder: Any = model
    holder.config.quantization_config = description
    holder.hf_quantizer = TorchAoHfQuantizer(description, pre_quantized=True)
    with _without_progress_bars():
        holder.save_pretrained(folder)
    _make_readable(folder)
    return None


def _make_readable(folder: str) -> None:
    """Give all files the mode of newly created files: safetensors makes its files readable by their owner only."""
    # config.json was written by Python with the process's umask, which cannot be read without changing it.
    mode = stat.S_IMODE(os.stat(os.path.join(folder, "config.json")).st_mode)
    for entry in os.scandir(folder):
        if entry.is_file():
            os.chmod(entry.path, mode)


def load_quantized(path: str, model_init: Callable[[], nn.Module] | None = None) -> nn.Module:
    """Load the model of a directory: a transformers model, or the model that `model_init` builds."""
    if model_init is not None:
        return _filled(path, model_init)
    if not os.path.exists(os.path.join(path, MODEL_CONFIG)):
        raise CheckpointLoadError(
            f"{path} is not a transformers directory: it has no config.json. Pass model_init, a function that builds the "
            "model."
        )
    _require_plausible(path)
    with _without_progress_bars():
        model: nn.Module = architecture_of(_config_of(path), path).from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    return model


def described_model(path: str) -> nn.Module:
    """Build the model that the config.json of a directory describes, without its weights and without a quantisation."""
    config = _config_of(path)
    with default_dtype(getattr(config, "dtype", None)):
        model: nn.Module = architecture_of(config, path)(config)
    return model


def _config_of(path: str) -> Any:
    from transformers import AutoConfig

    # Without trust_remote_code=False, transformers asks on the terminal whether to run code that the directory names.
    return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _require_plausible(path: str) -> None:
    require_plausible_model(functools.partial(described_model, path), os.path.join(path, MODEL_CONFIG), path)


def architecture_of(config: Any, path: str) -> Any:
    """Return the transformers class that a model configuration names."""
    import transformers

    names = config.architectures or []
    found = getattr(transformers, names[0], None) if names else None
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        raise CheckpointLoadError(
            f"The model in {path} is a {names[0] if names else 'model without a name'}, which is not a class of "
            "transformers. Pass model_init, a function that builds it."
        )
    return found


def _save_parts(folder: str, model: nn.Module) -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict  # type: ignore[import-untyped]

    sharing = create_sharing_metadata(model)
    state = model.state_dict()
    stored_as = stored_names(list(state), sharing)
    # Tied tensors are stored once.
    stored = {name: tensor for name, tensor in state.items() if stored_as[name] == name}
    quantized = {name: tensor for name, tensor in stored.items() if type(tensor) is not Tensor}
    parts, metadata = flatten_tensor_state_dict(quantized)
    plain = {name: tensor for name, tensor in stored.items() if name not in quantized}
    with HashingWriter(os.path.join(folder, shard_name(1, 1, True))) as writer:
        write_safetensors(writer, {**plain, **parts}, metadata)


def _filled(path: str, model_init: Callable[[], nn.Module]) -> nn.Module:
    """Build a model, replace its parameters by the stored ones, and tie weights again."""
    from transformers import PreTrainedModel

    with no_init_weights():
        model = model_init()
    if isinstance(model, PreTrainedModel) and os.path.exists(os.path.join(path, MODEL_CONFIG)):
        _require_plausible(path)
        # For some models, transformers stores parameters under names that differ from the model's.
        with _without_progress_bars():
            filled: nn.Module = type(model).from_pretrained(path, local_files_only=True)
        return filled
    sharing = create_sharing_metadata(model)
    state = _read_state(path)
    # assign=True: the stored tensors have other classes than the model's parameters. It breaks ties, hence the call of
    # `retie_parameters`.
    incompatible = model.load_state_dict(state, strict=False, assign=True)
    tied = {name for group in sharing if any(member in state for member in group) for name in group}
    missing = [name for name in incompatible.missing_keys if name not in tied]
    if missing or incompatible.unexpected_keys:
        raise CheckpointLoadError(
            f"The weights in {path} do not fit this model: missing {missing[:5]}, unexpected "
            f"{incompatible.unexpected_keys[:5]}. Build the same model that was finalised."
        )
    # The stored name comes first in each group: the other names are tied to it.
    retie_parameters(model, [sorted(group, key=lambda name: name not in state) for group in sharing])
    return model


def _read_state(path: str) -> dict[str, Tensor]:
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    location = locate_weights(path)
    tensors = read_tensors(location, list(location.weight_map), "cpu")
    metadata = _metadata_of(path, set(location.weight_map.values()))
    # Tensors that are stored under their own names are plain, and need no reassembly.
    names = [name for name in json.loads(metadata.get(_NAMES_KEY, "[]")) if name not in tensors]
    if not names:
        return tensors
    kinds = {_NAMES_KEY: json.dumps(names), **{name: metadata[name] for name in names}}
    prefixes = tuple("{}._{}_".format(*name.rsplit(".", 1)) for name in names)
    parts = {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}
    quantized, leftover = unflatten_tensor_state_dict(parts, kinds)
    plain = {name: tensor for name, tensor in tensors.items() if name not in parts}
    return {**plain, **quantized, **leftover}


def _metadata_of(path: str, files: set[str]) -> Mapping[str, str]:
    from safetensors import safe_open

    metadata: dict[str, str] = {}
    for file in sorted(one for one in files if one.endswith(".safetensors")):
        with safe_open(os.path.join(path, file), framework="pt") as opened:
            metadata |= opened.metadata() or {}
    return metadata


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers inside the context: they do not belong in the report of a command."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    enable: Callable[[], None] = logging.enable_progress_bar
    disable: Callable[[], None] = logging.disable_progress_bar
    disable()
    try:
        yield
    finally:
        if was_enabled:
            enable()
