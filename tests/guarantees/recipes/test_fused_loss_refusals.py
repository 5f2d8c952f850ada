"""Fused losses reject models, wrappers and pipelines that would compute a different loss."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    Qwen2Config,
)

from forgather.ml.loss import CausalLoss, LinearCrossEntropyLoss
from forgather.ml.trainer.accelerate import AccelTrainer
from forgather.ml.trainer.ddp import DDPTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from tests.guarantees.recipes.fused_losses import FUSED, OPT, losses, plain_fused_loss
from tests.support.pipelines import llama, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import (
    VOCAB_SIZE,
    TokenModel,
    quiet_trainer,
    tiny_llama,
    token_samples,
)

# --- rejected


class NeedsMore(GPTNeoXForCausalLM):
    """Model that cannot run on token ids alone."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask.bool(), **options)


def test_models_that_fail_the_trial_are_rejected(tmp_path: Path) -> None:
    config = GPTNeoXConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ValueError, match=r"NeedsMore, which failed in a trial run on two tokens .*attention_mask"):
        build_only(tmp_path, NeedsMore(config), **FUSED)


def test_factory_that_returns_no_loss_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fused_loss_factory returned None for the output embeddings"):
        build_only(tmp_path, tiny_llama(), fused_loss_factory=lambda head: None)


def test_model_that_requires_autocast_is_tried_with_autocast(tmp_path: Path) -> None:
    def require_few_bits(*_: Any) -> None:
        if not torch.is_autocast_enabled("cpu"):
            raise ValueError("only few bits")

    model = tiny_llama()
    # Flash attention has the same requirement.
    model.model.layers[0].register_forward_pre_hook(require_few_bits)
    result, _ = losses(tmp_path, model, True, mixed_precision="bf16")
    assert len(result.losses) > 0


def gemma2() -> nn.Module:
    config = Gemma2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
    )
    return AutoModelForCausalLM.from_config(config)


def cohere() -> nn.Module:
    config = CohereConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config)


def build_only(output_dir: Path, model: nn.Module, **options: Any) -> None:
    trainer = quiet_trainer(output_dir, model, None, trainer_options={"eval_dataset": token_samples(4), **options})
    trainer.evaluate()


@pytest.mark.parametrize("build", [gemma2, cohere])
def test_models_that_change_logits_are_rejected(build: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"fused_loss_factory cannot be used with .*, which applies more than its head between hidden states",
    ):
        build_only(tmp_path, build(), **FUSED)


class ChangedLogits(LlamaForCausalLM):
    """Model that changes the logits after the head."""

    def __init__(self, change: str) -> None:
        super().__init__(tiny_llama().config)
        self.change = change
        # An additional trained parameter has no effect at first.
        self.bias = nn.Parameter(torch.zeros(VOCAB_SIZE))

    def forward(self, *args: Any, **keywords: Any) -> Any:
        outputs = super().forward(*args, **keywords)
        logits = outputs.logits
        changes = {"scale": logits.float() * 4, "bias": logits + self.bias, "cap": logits.clamp(-50, 50)}
        outputs.logits = changes[self.change]
        return outputs


def scaled_hidden_states() -> nn.Module:
    model = tiny_llama()
    model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] / 4,))
    return model


@pytest.mark.parametrize(
    "build",
    [*(functools.partial(ChangedLogits, change) for change in ("scale", "bias", "cap")), scaled_hidden_states],
    ids=["scale", "bias", "cap", "scaled hidden states"],
)
def test_changed_logits_are_detected_with_zero_weights(build: Any, tmp_path: Path) -> None:
    model = build()
    for parameter in model.parameters():
        parameter.detach().zero_()
    options = {"eval_dataset": token_samples(4), **FUSED}
    with pytest.raises(ValueError, match="applies more than its head between hidden states and logits"):
        quiet_trainer(tmp_path, model, None, trainer_options=options, mixed_precision="bf16").evaluate()


def test_models_without_a_head_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TokenModel, which returns no head.*can_return_hidden_states=True"):
        build_only(tmp_path, TokenModel(), **FUSED)


def test_fused_loss_with_compute_loss_func_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"fused_loss_factory cannot be combined with compute_loss_func: both define the loss"
    ):
        build_only(tmp_path, tiny_llama(), compute_loss_func=CausalLoss(), **FUSED)


def test_find_unused_parameters_is_rejected(tmp_path: Path) -> None:
    keywords = {"model": tiny_llama(), "train_dataset": token_samples(4), **FUSED}
    with pytest.raises(ValueError, match=r"fused_loss_factory cannot be combined with ddp.find_unused_parameters=True"):
        DDPTrainer(args={"output_dir": str(tmp_path), "ddp": {"find_unused_parameters": True}}, **keywords)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    with pytest.raises(ValueError, match=r"cannot be combined with DistributedDataParallelKwargs.*Omit one"):
        AccelTrainer(args={"output_dir": str(tmp_path)}, accelerator=accelerator, **keywords)


@pytest.mark.parametrize(
    "config",
    [
        OPT,
        GPTNeoXConfig(
            vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ),
        Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_fused_loss_supports_causal_transformers_models(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    evaluations = [
        quiet_trainer(tmp_path, model, None, trainer_options={"eval_dataset": token_samples(8), **options}).evaluate()
        for options in ({}, FUSED)
    ]
    assert evaluations[1]["eval_loss"] == pytest.approx(evaluations[0]["eval_loss"], rel=1e-6)


def refused_in_pipeline(output_dir: Path, schedule: str, build: Any, factory: Any) -> None:
    trainer_of(
        PipelineTrainer,
        output_dir,
        build,
        token_samples(8),
        trainer_options={"fused_loss_factory": factory},
        schedule=schedule,
        per_device_train_batch_size=4,
    ).train()


@pytest.mark.parametrize(
    ("schedule", "build", "factory", "message"),
    [
        ("1f1b", gemma2, LinearCrossEntropyLoss, "applies more than its head between hidden states and logits"),
        ("zbv", llama, plain_fused_loss, r"schedule='zbv' computes .* has no method unfused\(\)"),
    ],
)
def test_pipelines_reject_unsupported_models_and_losses(
    schedule: str, build: Any, factory: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=message):
        run_on_ranks(refused_in_pipeline, 2, tmp_path, schedule, build, factory)
