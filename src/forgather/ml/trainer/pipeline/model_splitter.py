"""ModelSplitter: protocol of functions that divide a model into pipeline stages; and the layer ranges of stages.

Stages keep the FQNs of the full model. `PipelineTrainer` calls the splitter with a model on the meta device.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining.stage import _PipelineStageBase

AttentionMaskCreator = Callable[..., Tensor | None]
"""Function of the batch's tensors, passed by name; returns the `attention_mask` for all stages, or None."""

Split = tuple[list[nn.Module], list[nn.Module], list[Any], AttentionMaskCreator | None]
"""Modules of all stages (on meta), modules and torch stages of this rank, and the attention mask creator or None."""


class ModelSplitter(Protocol):
    """Function that divides a model on the meta device into stages.

    `stage_indices[r]` lists the stages of rank r. Stages keep the FQNs of the full model.
    """

    def __call__(
        self,
        model: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: Mapping[str, Any],
        stage_indices: Sequence[tuple[int, ...]],
        train: bool,
        *,
        device: torch.device,
        rank: int,
        pp_group: ProcessGroup,
    ) -> Split: ...


Stage = _PipelineStageBase


def layer_ranges(num_layers: int, num_stages: int, input_weight: float, output_weight: float) -> list[range]:
    """Return the layers of each stage, divided evenly; input and output count as `input_weight` and `output_weight` layers."""
    if num_stages > num_layers:
        raise ValueError(
            f"The model has {num_layers} layers, which cannot be divided into {num_stages} stages (ranks of a pipeline x "
            "stages_per_rank): every stage needs a layer. Use fewer ranks or stages_per_rank, or a model with more layers."
        )
    if input_weight < 0 or output_weight < 0:
        raise ValueError(f"input_weight={input_weight} and output_weight={output_weight} must be 0 or more.")
    share = (num_layers + input_weight + output_weight) / num_stages
    cuts = [0]
    for number in range(1, num_stages):
        cut = round(number * share - input_weight)
        # Large weights must not leave a stage without layers.
        cuts.append(min(max(cut, cuts[-1] + 1), num_layers - (num_stages - number)))
    cuts.append(num_layers)
    return [range(first, last) for first, last in pairwise(cuts)]
