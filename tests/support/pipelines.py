"""Pipeline trainers for the ranks of a test, their models, and the combined weights of all ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import Result, environment, run
from tests.support.tiny_models import VOCAB_SIZE, quiet_trainer, tiny_llama

NUM_LAYERS = 8


def llama(num_layers: int = NUM_LAYERS, **options: Any) -> nn.Module:
    """Build a Llama with weights from the current random state, like any `model_init`."""
    return tiny_llama(None, num_hidden_layers=num_layers, **options)


def tied_gpt2(num_layers: int = NUM_LAYERS, width: int = 16) -> nn.Module:
    """Build a GPT-2 with tied embedding and head, without dropout, because ranks draw different random numbers."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_embd=width,
            n_layer=num_layers,
            n_head=2,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def trainer_of(
    trainer_class: type[Trainer],
    output_dir: Path,
    model_init: Callable[[], nn.Module],
    train: Any,
    *callbacks: Any,
    trainer_options: dict[str, Any] | None = None,
    schedule: Any = None,
    **settings: Any,
) -> Trainer:
    """Build a `quiet_trainer` with a model that every rank builds."""
    options: dict[str, Any] = {"model_init": model_init, **(trainer_options or {})}
    if schedule is not None:
        options["pipe_schedule_factory"] = schedule
    if dist.is_initialized() and trainer_class is not Trainer:
        options["distributed_env"] = environment()
    return quiet_trainer(
        output_dir, None, train, *callbacks, trainer_class=trainer_class, trainer_options=options, **settings
    )


def pipeline_trainer(
    output_dir: Path, model_init: Callable[[], nn.Module], train: Any, *callbacks: Any, **settings: Any
) -> PipelineTrainer:
    trainer = trainer_of(PipelineTrainer, output_dir, model_init, train, *callbacks, **settings)
    assert isinstance(trainer, PipelineTrainer)
    return trainer


def whole_result(trainer: Trainer) -> Result:
    """Train and return the result with the weights of all ranks; copies of a weight must be equal."""
    result = run(trainer)
    return result._replace(weights=joined(result.weights))


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all ranks by name; copies must be bitwise equal."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensors)
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), name
    return whole
