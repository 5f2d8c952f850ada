"""PEFT adapters: trained parameters as the component "model", adapter files in PEFT's format, and the base model.

A checkpoint of a `PeftModel` contains its trained parameters, all adapters and the buffers. Frozen weights are not
stored: a resume compares their digests, so that a different base model raises an error. Trainers call this module; PEFT is
never imported unless the model is a `PeftModel`.
"""

import os
import re
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.encoding.digest import state_digests
from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.files.regular_files import is_real_directory, open_regular
from forgather.ml.checkpoint.sharding.sharded_tensors import is_sharded, local_part, rows_of
from forgather.ml.checkpoint.state.rng import undisturbed_random_numbers
from forgather.ml.checkpoint.state.state_schema import Schema, anything, mapping_of, text
from forgather.ml.checkpoint.weights.hf_files import read_files
from forgather.ml.checkpoint.weights.index import tensor_identity
from forgather.ml.checkpoint.weights.safetensors_io import check_fit, read_header

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = re.compile(r"adapter_config\.json$|adapter_model\.(safetensors|bin)$")
_WEIGHTS = "adapter_model.safetensors"
_STATE = Schema({"trained": mapping_of(text, anything), "frozen": mapping_of(text, text)})
_Key = tuple[tuple[str, int, int], ...]
# Digests of frozen weights by model, since reading all base weights takes seconds and they do not change.
_frozen_digests: "weakref.WeakKeyDictionary[nn.Module, tuple[_Key, dict[str, str]]]" = weakref.WeakKeyDictionary()
_embedding_choices: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()


def is_peft_model(model: object) -> bool:
    """Return whether a model is a `peft.PeftModel`; does not import PEFT."""
    known = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    return known is not None and isinstance(model, known)


def uses_prompts(model: Any) -> bool:
    """Return whether a `PeftModel` adds virtual tokens to the input, so that logits and labels differ in length."""
    return any(config.is_prompt_learning for config in model.peft_config.values())


def adapters_only(path: str) -> str | None:
    """Return a message for a directory that has adapters but no weights of a full model; None for other directories."""
    found = _adapter_files_in(path)
    if not found:
        return None
    return (
        f"{path} has only PEFT adapters ({', '.join(found)}), not the weights of a full model, so a plain model would keep "
        "its present weights. Build the base model that was trained, and continue with the adapters: "
        f"model = PeftModel.from_pretrained(base, {path!r}, is_trainable=True). To resume a Forgather checkpoint, pass the "
        "PeftModel of the run (get_peft_model) as the model. For the weights of a full model, call "
        "PeftModel.from_pretrained(...).merge_and_unload()."
    )


def _adapter_files_in(path: str) -> list[str]:
    """Return adapter files by relative path. PEFT stores adapters with other names than "default" in subfolders."""
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    folders = [name for name in names if is_real_directory(os.path.join(path, name))]
    nested = [
        os.path.join(folder, name) for folder in folders for name in sorted(os.listdir(os.path.join(path, folder)))
    ]
    return [name for name in (*names, *nested) if ADAPTER_FILE.match(os.path.basename(name))]


class AdapterState:
    """Stateful of the component "model" for a `PeftModel`: everything but the frozen weights of the base model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        trained, frozen = self._parts()
        return {"trained": trained, "frozen": _digests(self.model, frozen)}

    def check_state_dict(self, state: Any) -> None:
        """Raise `CheckpointLoadError` unless names, shapes and the base model match the checkpoint."""
        _STATE.check(state, "model")
        trained, frozen = self._parts()
        differing = sorted(set(trained) ^ set(state["trained"]))
        if differing:
            raise CheckpointLoadError.misfit(
                f"The adapters do not fit: {len(differing)} trained tensors are only in the model or only in the "
                f"checkpoint, such as {differing[0]}. Build the PeftModel with the same configuration (rank, "
                "target_modules, modules_to_save, adapter names) and the same frozen parameters."
            )
        for name, tensor in state["trained"].items():
            if not isinstance(tensor, Tensor):
                raise CheckpointLoadError(f"model.trained: {name[:200]!r} is a {type(tensor).__name__}, not a tensor.")
            check_fit("The adapters", name, tuple(tensor.shape), tensor.dtype, trained[name])
        self._require_base(state["frozen"], _digests(self.model, frozen))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trained, _ = self._parts()
        with torch.no_grad():
            for name, tensor in state["trained"].items():
                own = trained[name]
                local_part(own).copy_(rows_of(tensor, own) if is_sharded(own) else tensor)

    def load_adapter_directory(self, path: str) -> int:
        """Load the adapter from files of PEFT into the active adapter, and return the number of tensors."""
        from peft import set_peft_model_state_dict

        from forgather.ml.checkpoint.weights.location import WeightLocation, read_tensors

        model: Any = self.model
        file = os.path.join(path, _WEIGHTS)
        if not os.path.isfile(file):
            raise CheckpointLoadError.misfit(
                f"{path} has no {_WEIGHTS}, so the adapters of the {type(model).__name__} cannot be loaded from it. Load "
                "weights of a full model into the base model, before get_peft_model."
            )
        # A symbolic link or a FIFO leads out of the directory.
        os.close(open_regular(file))
        stored = read_header(file).tensors
        name = model.active_adapter
        targets = _adapter_tensors(model, name)
        differing = sorted(set(targets) ^ set(stored))
        if differing:
            raise CheckpointLoadError.misfit(
                f"The adapter in {file} does not fit the model: {len(differing)} tensors are only in one of them, such as "
                f"{differing[0]}. Build the PeftModel with the configuration in {ADAPTER_CONFIG} beside it."
            )
        for key, target in targets.items():
            check_fit(file, key, stored[key].shape, stored[key].dtype, target)
        tensors = read_tensors(WeightLocation(path, dict.fromkeys(stored, _WEIGHTS), []), list(stored), "cpu")
        set_peft_model_state_dict(model, tensors, adapter_name=name)
        return len(tensors)

    def _parts(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors that checkpoints store, and the frozen ones, by name."""
        model: Any = self.model
        # Adapters that are not active are frozen, but no base model contains them.
        adapters = {
            tensor_identity(tensor) for name in model.peft_config for tensor in _adapter_tensors(model, name).values()
        }
        trained: dict[str, Tensor] = {}
        frozen: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            is_stored = parameter.requires_grad or tensor_identity(parameter) in adapters
            (trained if is_stored else frozen)[name] = parameter.detach()
        persistent = self.model.state_dict(keep_vars=True)
        buffers = {name: one for name, one in self.model.named_buffers() if name in persistent}
        return {**trained, **buffers}, frozen

    def _require_base(self, saved: Mapping[str, str], present: Mapping[str, str]) -> None:
        differing = sorted(name for name in {**saved, **present} if saved.get(name) != present.get(name))
        if differing:
            first = differing[0]
            raise CheckpointLoadError.misfit(
                f"The base model differs from the base model of the checkpoint: {len(differing)} of {len(present)} frozen "
                f"tensors differ, such as {first} (checkpoint: {saved.get(first)}; now: {present.get(first)}). "
                "A checkpoint of a PeftModel does not contain frozen weights. Build the same base model, from the same files "
                "and in the same dtype."
            )


def _adapter_tensors(model: Any, adapter_name: str, with_embeddings: bool = False) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    # By default without the embedding layers: PEFT may ask the hub whether they were resized.
    found: dict[str, Tensor] = get_peft_model_state_dict(
        model, adapter_name=adapter_name, save_embedding_layers=with_embeddings
    )
    return found


def note_sharded_base(model: nn.Module) -> None:
    """Compute the digests of sharded frozen weights, for the checkpoints of this model. Collective.

    One tensor at a time is gathered. Must be called once after `fully_shard`.
    """
    if not is_peft_model(model) or model in _frozen_digests:
        return
    _, frozen = AdapterState(model)._parts()
    found = {name: state_digests([_whole(tensor)]).popitem()[1] for name, tensor in frozen.items()}
    _frozen_digests[model] = (), found


def whole_adapters(model: Any) -> dict[str, Tensor]:
    """Return the tensors that PEFT saves, gathered from shards, with their names in the model. Collective."""
    saves_embeddings = _saves_embeddings(model)
    saved = {
        tensor_identity(tensor)
        for name in model.peft_config
        for tensor in _adapter_tensors(model, name, saves_embeddings).values()
    }
    return {
        name: _whole(tensor).cpu() for name, tensor in model.state_dict().items() if tensor_identity(tensor) in saved
    }


def _whole(tensor: Any) -> Tensor:
    with torch.no_grad():
        whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def _digests(model: nn.Module, frozen: Mapping[str, Tensor]) -> dict[str, str]:
    if any(map(is_sharded, frozen.values())):
        # Noted when the model was sharded. Shards are not gathered here, because only one rank may ask.
        return _frozen_digests[model][1]
    key = tuple((name, tensor.data_ptr(), tensor._version) for name, tensor in frozen.items())
    known = _frozen_digests.get(model)
    if known is None or known[0] != key:
        # By position, because names contain dots, which `state_digests` uses for nested paths.
        by_place = state_digests(list(frozen.values()))
        known = _frozen_digests[model] = key, dict(zip(frozen, by_place.values(), strict=True))
    return known[1]


def adapter_files(
    model: Any, preprocessor: object = None, whole: Mapping[str, Tensor] | None = None
) -> dict[str, bytes]:
    """Return name and content of each file that `PeftModel.from_pretrained` reads, and of the tokenizer.

    `whole`: the result of `whole_adapters`, for a sharded model.
    """
    given = {} if whole is None else {"state_dict": dict(whole)}
    with tempfile.TemporaryDirectory() as folder, undisturbed_random_numbers():
        model.save_pretrained(folder, save_embedding_layers=_saves_embeddings(model), **given)
        if hasattr(preprocessor, "save_pretrained"):
            preprocessor.save_pretrained(folder)
        return read_files(folder)


def _saves_embeddings(model: Any) -> bool:
    """Return PEFT's choice whether to store embedding layers, made once: it may ask the hub for the base model."""
    from peft import get_peft_model_state_dict

    if model not in _embedding_choices:
        names: Sequence[str] = list(model.peft_config)
        chosen = [get_peft_model_state_dict(model, adapter_name=name) for name in names]
        plain = [_adapter_tensors(model, name) for name in names]
        _embedding_choices[model] = [set(one) for one in chosen] != [set(one) for one in plain]
    return _embedding_choices[model]
