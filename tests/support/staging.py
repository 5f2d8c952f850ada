"""Pipeline stages from splitters, in one process: filled with a model's values and run in sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather.ml.trainer.pipeline.model_splitter import ModelSplitter, Split
from forgather.ml.trainer.pipeline.pipeline_utils import tensors_of
from forgather.ml.trainer.pipeline.splitters.causal_lm import create_causal_lm_splitter
from forgather.ml.trainer.pipeline.splitters.stage_building import materialise

MakeModel = Callable[[], Any]


def split(model: nn.Module, num_stages: int, splitter: ModelSplitter | None = None) -> Split:
    """Split a model like a trainer with all stages on one rank."""
    return split_for_rank(model, [tuple(range(num_stages))], 0, splitter)


def split_for_rank(
    model: nn.Module, stage_indices: Sequence[tuple[int, ...]], rank: int, splitter: ModelSplitter | None = None
) -> Split:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        # torch's stages require a process group. It ends with the test.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    example = torch.zeros((2, 5), dtype=torch.int64, device="meta")
    return (splitter or create_causal_lm_splitter())(
        model, (example,), {}, stage_indices, True, device=torch.device("cpu"), rank=rank, pp_group=group
    )


def on_meta(make: MakeModel) -> Any:
    with torch.device("meta"):
        return make()


def filled(modules: Sequence[nn.Module], model: nn.Module) -> Sequence[nn.Module]:
    """Allocate the stages, each separately as on different ranks, and fill them with the model's values."""
    values = tensors_of(model)
    with torch.no_grad():
        for module in modules:
            materialise([module], torch.device("cpu"))
            module.train(model.training)
            for name, tensor in tensors_of(module).items():
                tensor.copy_(values[name])
    return modules


def in_a_row(modules: Sequence[nn.Module], inputs: Tensor, **keywords: Any) -> Tensor:
    for module in modules:
        inputs = module(inputs, **keywords)
    return inputs
