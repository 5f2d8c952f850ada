"""Stages of decoder-only Hugging Face models, run by the model's own code.

A stage is a copy of the model with some of its layers, so the model class still creates masks, positions and rotary
embeddings. The first stage gets token ids, and later stages get hidden states as `inputs_embeds`. Embedding, final norm
and head must run once, so other stages omit them. Called by the causal LM splitter.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.trainer.pipeline.splitters.stage_building import twin_of
from forgather.ml.trainer.setup.layers import layer_lists
from forgather.ml.trainer.step_loss.known_masks import positions_of
from forgather.ml.trainer.step_loss.token_weighting import parameters_of

_FIRST_STAGE_ONLY = ("token_type_ids",)
"""Keywords that transformers adds to the embedding; later stages would add them again."""


# Layer types with nothing but a KV cache. Other types keep state that generation through stages does not support.
_CACHED_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


class UnknownModel(ValueError):
    """Model with a structure that the splitter does not recognise."""


@dataclass(frozen=True)
class Anatomy:
    """Location of the layers in a model: `path` leads from the model to the module that holds the list of layers."""

    model: Any
    path: tuple[str, ...]
    layers_name: str
    num_layers: int
    output_names: frozenset[str] = frozenset()
    """Modules next to the layers that run after them, such as the final norm."""

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)


def find_anatomy(model: Any, num_layers: int | None = None) -> Anatomy:
    """Find the layers of a model; raise UnknownModel unless its code only runs them between embedding and head."""
    name = type(model).__name__
    if not (hasattr(model, "config") and hasattr(model, "base_model") and hasattr(model, "get_input_embeddings")):
        raise UnknownModel(f"{name} is not a model of transformers")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnknownModel(f"{name} has an encoder and a decoder")
    if model.base_model is model or model.get_output_embeddings() is None:
        raise UnknownModel(f"{name} has no language-model head")
    wanted: Any = num_layers or getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = layer_lists(model, wanted)
    if len(lists) != 1:
        found = ", ".join(lists) if lists else "none"
        raise UnknownModel(f"{name} should have one list of {wanted} layers, but these were found: {found}")
    *path, layers_name = lists[0].split(".")
    anatomy = Anatomy(model, tuple(path), layers_name, int(wanted))
    anatomy = replace(anatomy, output_names=_names_used_after_layers(anatomy))
    _check_by_trial(anatomy)
    return anatomy


def _names_used_after_layers(anatomy: Anatomy) -> frozenset[str]:
    """Return the names of modules that run after the layers, from a trial run with stand-ins and without layers."""
    # The order of declarations in a class does not show the order of calls.
    part = _part_of(anatomy, range(0), is_first=True, is_last=True)
    owner = part.get_submodule(".".join(anatomy.path))
    called: list[str] = []
    embedding = anatomy.model.get_input_embeddings()
    trained = {name for name, child in owner.named_children() if any(True for _ in child.parameters())}
    for name, child in list(owner.named_children()):
        if name == anatomy.layers_name:
            owner._modules[name] = _NotedList(name, called)
        else:
            stand_in = _Embedded(anatomy.hidden_size) if child is embedding else _without_input_part(child, embedding)
            assert stand_in is not None
            # Buffers are on the meta device and have no values, so a module that uses them cannot run on the CPU.
            has_buffers = any(True for _ in stand_in.buffers())
            owner._modules[name] = _Noted(name, called, _Unused() if has_buffers else stand_in)
    _run_without_values(part, torch.zeros((1, 3), dtype=torch.int64, device="cpu"))
    # A module with parameters that did not run cannot be assigned to a stage.
    unused = trained - set(called)
    if unused or anatomy.layers_name not in called:
        raise UnknownModel(
            f"{type(part).__name__} does not use its module {min(unused, default=anatomy.layers_name)!r}"
        )
    return frozenset(called[called.index(anatomy.layers_name) + 1 :])


def _run_without_values(part: Any, inputs: Tensor) -> Tensor:
    name = "inputs_embeds" if inputs.is_floating_point() else part.main_input_name
    # The model is on the meta device, but trial parts have no tensors left. They run on the CPU with real values, which
    # can be compared.
    try:
        with torch.no_grad(), torch.device("cpu"):
            result: Tensor = part.base_model(**{name: inputs}, use_cache=False)[0]
    except Exception as error:
        raise UnknownModel(f"{type(part).__name__} cannot be run in parts ({type(error).__name__}: {error})") from error
    return result


class _Noted(nn.Module):
    """Wrapper that records its calls."""

    def __init__(self, name: str, called: list[str], stand_in: nn.Module) -> None:
        super().__init__()
        self._name, self._called, self._stand_in = name, called, stand_in

    def forward(self, *args: object, **kwargs: object) -> Any:
        self._called.append(self._name)
        return self._stand_in(*args, **kwargs)


class _NotedList(nn.ModuleList):
    """Empty list of layers that records when it is iterated or sliced."""

    def __init__(self, name: str, called: list[str]) -> None:
        super().__init__()
        self._name, self._called = name, called

    def __iter__(self) -> Iterator[nn.Module]:
        self._called.append(self._name)
        return iter(())

    def __getitem__(self, index: object) -> Any:
        self._called.append(self._name)
        return nn.ModuleList()


class _Embedded(nn.Module):
    """Stand-in for the embedding: constant hidden states for any token ids."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, token_ids: Tensor) -> Tensor:
        return torch.ones((*token_ids.shape, self._width), device="cpu")


class _Nothing(nn.Module):
    """Stand-in for a position embedding after the first stage, which has already added the positions."""

    def forward(self, *_: object, **__: object) -> Tensor:
        return torch.zeros(())


class _Unused(nn.Module):
    """Stand-in for a module with unused results, such as a rotary embedding in a run without layers."""

    def forward(self, *_: object, **__: object) -> tuple[None, None]:
        return None, None


class _LayerRange(nn.ModuleList):
    """Some layers of a list under their original names; integer indices and slices count from the first layer here."""

    def __getitem__(self, index: Any) -> Any:
        # Model code slices by position, as in `self.layers[: config.num_hidden_layers]`.
        layers = list(self._modules.values())
        return nn.ModuleList(layers[index]) if isinstance(index, slice) else layers[index]


class HuggingFaceStage(nn.Module):
    """Consecutive layers of a causal language model, under the FQNs of the full model."""

    can_return_hidden_states = True
    _part: Any
    _entry: Any
    _anatomy: Anatomy

    def __init__(self, anatomy: Anatomy, layers: range, stage_index: int, num_stages: int) -> None:
        super().__init__()
        self.is_first = stage_index == 0
        self.is_last = stage_index == num_stages - 1
        self._first_layer = layers.start
        part = _part_of(anatomy, layers, self.is_first, self.is_last)
        # Share the tables of `part`, so that FQNs have no prefix for this wrapper.
        self._modules, self._parameters, self._buffers = part._modules, part._parameters, part._buffers
        self._non_persistent_buffers_set = part._non_persistent_buffers_set
        # Set through vars(): nn.Module would register these as children, and every tensor would get more FQNs.
        vars(self)["_part"] = part
        vars(self)["_entry"] = part if self.is_last else part.base_model
        kinds = getattr(anatomy.model.config, "layer_types", None) or ()
        self.can_cache = "past_key_values" in parameters_of(part.base_model.forward) and set(kinds) <= _CACHED_KINDS
        """Whether the layers keep only keys and values between passes."""
        vars(self)["_anatomy"] = anatomy
        self._main_input = part.main_input_name if self.is_first else "inputs_embeds"
        self._hidden_size = anatomy.hidden_size
        self._dtype = anatomy.model.get_input_embeddings().weight.dtype

    def forward(self, inputs: Tensor, return_hidden_states: bool = False, **keywords: Any) -> Tensor:
        """Return hidden states for the next stage; on the last stage, logits or (if requested) the input of the head."""
        if not self.is_first:
            keywords = {name: value for name, value in keywords.items() if name not in _FIRST_STAGE_ONLY}
        # Generation passes a cache of the stage. In training, a cache would only cost memory.
        keywords.setdefault("use_cache", False)
        # `_part` is not a registered child, so it would miss a mode that was set module by module.
        self._part.training = self.training
        entry = self._part.base_model if return_hidden_states else self._entry
        # On an accelerator, the model would look for packed sequences in the positions, and the host would wait.
        with nullcontext() if inputs.device.type == "cpu" else positions_of(self._part, keywords):
            outputs = entry(**{self._main_input: inputs}, **keywords)
        result: Tensor = outputs.logits if self.is_last and not return_hidden_states else outputs[0]
        return result

    def get_output_embeddings(self) -> Any:
        return self._part.get_output_embeddings() if self.is_last else None

    @property
    def layer_stack(self) -> nn.Module:
        return self._part.get_submodule(".".join((*self._anatomy.path, self._anatomy.layers_name)))  # type: ignore[no-any-return]

    @property
    def head_is_all(self) -> bool:
        """Whether the head is the only operation between hidden states and logits."""
        return _head_is_all(self._anatomy)

    def train(self, mode: bool = True) -> "HuggingFaceStage":
        self._part.train(mode)
        self.training = mode
        return self

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        self._part.gradient_checkpointing_enable(*args, **kwargs)

    def make_cache(self) -> Any:
        """Create the KV cache of this stage's layers."""
        from transformers import DynamicCache

        first_layer = self._first_layer

        class StageCache(DynamicCache):
            """KV cache that starts with the first layer of the stage; layers pass their index in the full model."""

            def update(
                self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
            ) -> tuple[Tensor, Tensor]:
                return super().update(key_states, value_states, layer_idx - first_layer, *args, **kwargs)

        return StageCache(config=self._part.base_model.config)

    def boundary(self, main_input: Tensor) -> tuple[torch.Size, torch.dtype] | None:
        """Return shape and dtype of hidden states between stages for a micro-batch of token ids; None for other inputs."""
        if main_input.ndim != 2 or main_input.is_floating_point():
            return None
        return torch.Size((*main_input.shape, self._hidden_size)), self._dtype


def _part_of(anatomy: Anatomy, layers: range, is_first: bool, is_last: bool) -> Any:
    """Return a copy of the model with these layers, and with only those other modules that the stage needs."""
    part = twin = twin_of(anatomy.model)
    config = _config_of_part(anatomy.model.config, layers)
    vars(twin)["config"] = config
    for name in anatomy.path:
        _leave_out_siblings(twin, name, is_last)
        child = twin_of(twin._modules[name])  # type: ignore[arg-type]
        vars(child)["config"] = config
        twin._modules[name] = child
        twin = child
    _prune_owner(twin, anatomy, layers, is_first, is_last)
    return part


def _config_of_part(config: Any, layers: range) -> Any:
    """Return the configuration of a stage, with number and types of its layers."""
    # The model's code slices its layers by num_hidden_layers, and looks up layer_types by position.
    config = copy.copy(config)
    try:
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = [config.layer_types[number] for number in layers]
    except AttributeError as error:
        raise UnknownModel(f"{type(config).__name__} does not provide the type of each layer ({error})") from error
    return config


def _leave_out_siblings(module: nn.Module, name: str, is_last: bool) -> None:
    """Remove the siblings of the layers' module, such as the head, from all stages but the last."""
    # None is enough: other stages call the base model, which does not use its siblings.
    for sibling in module._modules:
        if sibling != name and not is_last:
            module._modules[sibling] = None


def _prune_owner(owner: nn.Module, anatomy: Anatomy, layers: range, is_first: bool, is_last: bool) -> None:
    embedding = anatomy.model.get_input_embeddings()
    for name, module in owner._modules.items():
        if name == anatomy.layers_name:
            owner._modules[name] = _layers_of(module, layers)  # type: ignore[arg-type]
        elif module is None:
            continue
        elif name in anatomy.output_names:
            # The model's code calls these modules in every stage, so None is not enough.
            if not is_last:
                owner._modules[name] = nn.Identity()
        elif not is_first:
            owner._modules[name] = _without_input_part(module, embedding)


def _without_input_part(module: nn.Module, embedding: nn.Module) -> nn.Module | None:
    """Return the replacement of an input-side module in stages that get hidden states."""
    # The token embedding is not called, since the stage gets `inputs_embeds`.
    if module is embedding:
        return None
    # Position embeddings, norms, projections and dropout of the input have run in the first stage. Modules without
    # parameters, such as rotary embeddings, serve the layers of every stage.
    if isinstance(module, nn.Embedding):
        return _Nothing()
    if isinstance(module, nn.Dropout) or any(True for _ in module.parameters()):
        return nn.Identity()
    return module


def _layers_of(all_layers: nn.ModuleList, layers: range) -> nn.ModuleList:
    some = _LayerRange()
    for number in layers:
        some.add_module(str(number), all_layers[number])
    return some


def _check_by_trial(anatomy: Anatomy) -> None:
    """Raise UnknownModel unless a middle stage without layers returns its input unchanged."""
    # Any other operation on hidden states, such as a scale, would be repeated in every stage.
    name = type(anatomy.model).__name__
    part = _part_of(anatomy, range(0), is_first=False, is_last=False)
    owner = part.get_submodule(".".join(anatomy.path))
    for child in list(owner._modules):
        if owner._modules[child] is not None and any(True for _ in owner._modules[child].buffers()):
            owner._modules[child] = _Unused()
    hidden = _some_hidden_states(anatomy)
    result = _run_without_values(part, hidden)
    if result.shape != hidden.shape or not torch.equal(result, hidden):
        raise UnknownModel(f"{name} changes hidden states outside of its layers and its final norm")


def _head_is_all(anatomy: Anatomy) -> bool:
    """Return whether a last stage without layers returns exactly the output of its head, in a trial run."""
    # The trial head doubles its input. A final scale or soft cap of logits would change the result.
    part = _part_of(anatomy, range(0), is_first=False, is_last=True)
    owner = part.get_submodule(".".join(anatomy.path))
    for name, child in list(owner.named_children()):
        if name in anatomy.output_names:
            owner._modules[name] = nn.Identity()
        elif any(True for _ in child.buffers()):
            owner._modules[name] = _Unused()
    head = part.get_output_embeddings()
    names = [name for name, child in part.named_children() if child is head]
    if len(names) != 1:
        return False
    part._modules[names[0]] = _Doubled()
    hidden = _some_hidden_states(anatomy)
    with torch.no_grad(), torch.device("cpu"):
        logits = part(inputs_embeds=hidden, use_cache=False).logits
    return logits.shape == hidden.shape and torch.equal(logits, 2 * hidden)


class _Doubled(nn.Module):
    """Trial head with predictable logits: twice its input."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * hidden


def _some_hidden_states(anatomy: Anatomy) -> Tensor:
    return torch.arange(3.0 * anatomy.hidden_size, device="cpu").view(1, 3, -1) + 1.0


def hugging_face_stages(anatomy: Anatomy, ranges: Sequence[range]) -> list[nn.Module]:
    """Return the stages with these layers, on the device of the model."""
    return [HuggingFaceStage(anatomy, layers, index, len(ranges)) for index, layers in enumerate(ranges)]
