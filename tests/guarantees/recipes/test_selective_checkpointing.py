"""Selective activation checkpointing: bit-identical losses and weights; memory between full checkpointing and none."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from forgather.ml.loss import LinearCrossEntropyLoss
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.ddp import DDPTrainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.recipes.activation_checkpointing import (
    _policy,
    checkpointing_function,
    enable_selective_activation_checkpointing,
)
from forgather.ml.trainer.trainer import Trainer
from tests.guarantees.recipes.test_gradient_checkpointing import deep_llama, one_step
from tests.support.data_parallel import Result, run
from tests.support.pipelines import trainer_of, whole_result
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCAB_SIZE, TokenModel, quiet_trainer, tiny_llama, token_samples, weights

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "logging_strategy": "steps",
    "logging_steps": 1,
}


class Layer(nn.Module):
    """Layer with dropout before and after kept results, and a keyword of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(F.dropout(hidden, 0.1, self.training)).unsqueeze(1).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        wide = F.dropout(torch.tanh(self.up(F.dropout(mixed, 0.2, self.training))), 0.3, self.training)
        result = hidden + F.dropout(self.down(wide), 0.1, self.training)
        return result if scale is None else result * scale.view(-1, 1, 1)


class ByProtocol(nn.Module):
    """Model of the pipeline protocol with dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.input_encoder = nn.Embedding(VOCAB_SIZE, width)
        self.layer_stack = nn.ModuleList(Layer(width) for _ in range(4))
        self.output_decoder = nn.Linear(width, VOCAB_SIZE)

    def forward(self, input_ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.input_encoder(input_ids)
        for layer in self.layer_stack:
            hidden = layer(hidden, scale=scale)
        logits: Tensor = self.output_decoder(hidden)
        return logits


dropping_llama = functools.partial(tiny_llama, None, num_hidden_layers=4, attention_dropout=0.2)


def trained(kind: type[Trainer], output_dir: str, model_init: Any, **settings: Any) -> Result:
    trainer = trainer_of(kind, Path(output_dir), model_init, token_samples(8), **SETTINGS, **settings)
    return run(trainer) if kind in (Trainer, DDPTrainer) else whole_result(trainer)


def assert_equal(selective: Result, plain: Result) -> None:
    assert selective.losses == plain.losses and len(plain.losses) == 2
    for name, tensor in plain.weights.items():
        assert torch.equal(selective.weights[name], tensor), name


CASES: dict[str, dict[str, Any]] = {
    "transformers": {"model_init": dropping_llama},
    "protocol": {"model_init": ByProtocol},
    "bf16": {"model_init": dropping_llama, "mixed_precision": "bf16", "gradient_accumulation_steps": 2},
    "fused loss, step in backward": {
        "model_init": dropping_llama,
        "trainer_options": {"fused_loss_factory": LinearCrossEntropyLoss},
        "fuse_optim_with_backward": True,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_training_on_one_device_is_unchanged(name: str, tmp_path: Path) -> None:
    plain, selective = (
        trained(Trainer, str(tmp_path / str(mode)), gradient_checkpointing=mode, **CASES[name])
        for mode in (False, "selective")
    )
    assert_equal(selective, plain)


def job(output_dir: str) -> list[tuple[Result, ...]]:
    """Train with each strategy, without and with selective checkpointing."""
    two_stages = {"n_microbatches": 2, "schedule": "1f1b"}
    cases: list[tuple[type[Trainer], Any, dict[str, Any]]] = [
        (DDPTrainer, dropping_llama, {}),
        (PipelineTrainer, dropping_llama, {**two_stages, "schedule": "interleaved1f1b"}),
        (PipelineTrainer, ByProtocol, two_stages),
        (HybridTrainer, dropping_llama, {**two_stages, "pp_size": 2}),
    ]
    modes: tuple[Any, ...] = (False, "selective")
    return [
        tuple(
            trained(kind, f"{output_dir}/{number}{mode}", init, gradient_checkpointing=mode, **more) for mode in modes
        )
        for number, (kind, init, more) in enumerate(cases)
    ]


def test_training_with_every_strategy_is_unchanged(tmp_path: Path) -> None:
    for results in run_on_ranks(job, 2, str(tmp_path)):
        for plain, selective in results:
            assert_equal(selective, plain)


def test_memory_is_between_full_checkpointing_and_none(tmp_path: Path) -> None:
    plain, selective, full = (
        one_step(tmp_path, deep_llama(), gradient_checkpointing=mode) for mode in (False, "selective", "full")
    )
    assert full.peak < 0.6 * selective.peak and selective.peak < 0.6 * plain.peak


def test_layers_are_prepared_once_keep_their_names_and_can_be_copied(tmp_path: Path) -> None:
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    names = list(weights(model))
    for _ in range(2):
        quiet_trainer(tmp_path, model, token_samples(2), gradient_checkpointing="selective", max_steps=1).train()
    layer = model.model.layers[0]
    assert not model.is_gradient_checkpointing and not hasattr(layer.forward.__wrapped__, "__wrapped__")
    assert list(weights(model)) == names
    twin = copy.deepcopy(layer)
    assert twin.forward.__wrapped__.__self__ is twin


def test_attention_is_recomputed_if_it_draws_random_numbers() -> None:
    """Later dropout in the layer draws the numbers that follow."""
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    factors = [torch.zeros(1, 1, 2, 8)] * 3
    assert _policy(None, op, *factors) is CheckpointPolicy.MUST_SAVE
    assert _policy(None, op, *factors, 0.0, True) is CheckpointPolicy.MUST_SAVE
    for given, named in (((0.1, True), {}), ((), {"dropout_p": 0.1})):
        assert _policy(None, op, *factors, *given, **named) is CheckpointPolicy.PREFER_RECOMPUTE
    for width, kept in ((2, True), (4, True), (8, False)):
        expected = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
        assert _policy(None, torch.ops.aten.mm.default, torch.zeros(3, 4), torch.zeros(4, width)) is expected


def test_function_in_the_arguments_is_called_like_enable_activation_checkpoint_fn(tmp_path: Path) -> None:
    called: list[tuple[int, str]] = []

    def enable(rank: int, module: nn.Module) -> None:
        called.append((rank, type(module).__name__))

    quiet_trainer(tmp_path, TokenModel(), token_samples(2), gradient_checkpointing=enable, max_steps=1).train()
    assert called == [(0, "TokenModel")]
    args = TrainingArguments(gradient_checkpointing="selective")
    assert checkpointing_function(args, enable) is enable_selective_activation_checkpointing
    assert checkpointing_function(args, None) is None
    for mode in (enable, "selective"):
        with pytest.raises(ValueError, match="enable_activation_checkpoint_fn was passed to the trainer too"):
            options = {"enable_activation_checkpoint_fn": lambda rank, module: None}
            quiet_trainer(tmp_path, TokenModel(), None, gradient_checkpointing=mode, trainer_options=options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_checkpointing": "some"}, "gradient_checkpointing='some' cannot be used: choose False, True"),
        ({"gradient_checkpointing": 2}, "gradient_checkpointing=2 has type int"),
        (
            {"gradient_checkpointing": "full", "torch_compile": True, "torch_compile_backend": "eager"},
            "cannot be combined with torch_compile_backend='eager'.*dropout",
        ),
        ({"torch_compile_scope": "block", "torch_compile": True}, "torch_compile_scope='block'.*'model' or 'layer'"),
        ({"torch_compile_scope": "layer"}, "torch_compile_scope='layer' needs torch_compile=True"),
    ],
)
def test_invalid_arguments_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingArguments(**settings)


def test_model_without_layers_and_schedules_with_two_backward_passes_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gradient_checkpointing='selective' works on .*TokenModel shows none"):
        quiet_trainer(tmp_path, TokenModel(), token_samples(2), gradient_checkpointing="selective").train()
    with pytest.raises(ValueError, match=r"'selective' cannot be combined with schedule='zbv'.*two passes"):
        trained(PipelineTrainer, str(tmp_path), ByProtocol, schedule="zbv", gradient_checkpointing="selective")
