"""Splitter for causal language models: decoder-only models of transformers, or models that follow a small protocol.

A stage runs consecutive layers, under the FQNs of the full model. This is the default splitter of `PipelineTrainer`.
`create_causal_lm_splitter` describes the protocol.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from forgather.ml.trainer.pipeline.model_splitter import ModelSplitter, Split, layer_ranges
from forgather.ml.trainer.pipeline.splitters.hugging_face_stages import UnknownModel, find_anatomy, hugging_face_stages
from forgather.ml.trainer.pipeline.splitters.stage_building import twin_of
from forgather.ml.trainer.step_loss.token_weighting import parameters_of

_PROTOCOL = ("input_encoder", "layer_stack", "output_decoder")


def create_causal_lm_splitter(
    num_layers: int | None = None, input_weight: float = 1, output_weight: float = 1
) -> ModelSplitter:
    """Return a splitter that divides layers evenly; input and output count as `input_weight` and `output_weight` layers.

    `num_layers` identifies the list of layers in a model with several lists.

    Decoder-only models of transformers are supported as they are. Other models follow a protocol: three modules hold all
    parameters, and the forward pass calls them in this order:

    - `input_encoder(main_input, **keywords) -> hidden`,
    - `layer_stack`, a `ModuleList` or `ModuleDict` of layers, each `layer(hidden, **keywords) -> hidden`,
    - `output_decoder(hidden, **keywords) -> logits`.

    Keywords are the tensors of the batch except the main input. A module gets the keywords that its `forward` names, or
    all keywords if it takes `**keywords`. If the model has `attention_mask_creator`, a function of the batch's tensors,
    every stage gets the result as `attention_mask`.
    """

    def split(
        model: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: Mapping[str, Any],
        stage_indices: Sequence[tuple[int, ...]],
        train: bool,
        *,
        device: torch.device,
        rank: int,
        pp_group: ProcessGroup,
    ) -> Split:
        num_stages = sum(map(len, stage_indices))
        modules = _stages_of(
            model, num_layers, lambda count: layer_ranges(count, num_stages, input_weight, output_weight)
        )
        own = [modules[index] for index in stage_indices[rank]]
        stages = [
            PipelineStage(modules[index], index, num_stages, device, group=pp_group) for index in stage_indices[rank]
        ]
        return modules, own, stages, getattr(model, "attention_mask_creator", None)

    return split


def create_manual_causal_lm_splitter(
    num_layers: int | None = None, input_weight: float = 1, output_weight: float = 1
) -> ModelSplitter:
    """Return `create_causal_lm_splitter(...)`; a second name for users of the protocol."""
    return create_causal_lm_splitter(num_layers, input_weight, output_weight)


def _stages_of(model: nn.Module, num_layers: int | None, divide: Callable[[int], list[range]]) -> list[nn.Module]:
    if all(isinstance(getattr(model, name, None), nn.Module) for name in _PROTOCOL):
        _refuse_other_parts(model)
        return _protocol_stages(model, divide(len(model.layer_stack)))  # type: ignore[arg-type]
    try:
        anatomy = find_anatomy(model, num_layers)
    except UnknownModel as reason:
        raise ValueError(
            f"{reason}, so the splitter for causal language models cannot divide it into stages. Give the model the "
            f"modules {', '.join(_PROTOCOL)} (see create_causal_lm_splitter), or pass model_splitter="
            "create_automatic_splitter(split_spec), which traces the model, or your own splitter."
        ) from reason
    return hugging_face_stages(anatomy, divide(anatomy.num_layers))


def _refuse_other_parts(model: nn.Module) -> None:
    other = next((name for name in dict(model.named_parameters()) if name.split(".")[0] not in _PROTOCOL), None)
    if other is not None:
        raise ValueError(
            f"{type(model).__name__} has {other!r} outside of {', '.join(_PROTOCOL)}, so no stage would train it. Move it "
            "into one of these modules."
        )


class ProtocolStage(nn.Module):
    """Consecutive layers of a model that follows the protocol; the first and last stage add encoder and decoder."""

    def __init__(self, model: nn.Module, layers: range, stage_index: int, num_stages: int) -> None:
        super().__init__()
        # A copy of the container with some of its entries. They keep their keys, and thereby their FQNs.
        stack = twin_of(model.layer_stack)  # type: ignore[arg-type]
        names = list(stack._modules)
        stack._modules = {names[number]: stack._modules[names[number]] for number in layers}
        parts: dict[str, Any] = {"input_encoder": None, "layer_stack": stack, "output_decoder": None}
        if stage_index == 0:
            parts["input_encoder"] = model.input_encoder
        if stage_index == num_stages - 1:
            parts["output_decoder"] = model.output_decoder
        for name, part in parts.items():
            self.add_module(name, part)
        # A tuple, which nn.Module does not register: each layer has one FQN.
        self._layers = tuple(stack._modules.values())

    def forward(self, inputs: Any, **keywords: Any) -> Any:
        hidden = inputs
        for part in (self.input_encoder, *self._layers, self.output_decoder):
            if part is not None:
                hidden = part(hidden, **_accepted(part, keywords))  # type: ignore[operator]
        return hidden


def _accepted(part: Any, keywords: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the keywords that the module's `forward` names, or all if it takes any."""
    parameters = parameters_of(part.forward)
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return keywords
    return {name: value for name, value in keywords.items() if name in parameters}


def _protocol_stages(model: nn.Module, ranges: Sequence[range]) -> list[nn.Module]:
    return [ProtocolStage(model, layers, index, len(ranges)) for index, layers in enumerate(ranges)]
