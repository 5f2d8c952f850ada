"""Shared settings, models and runs for the tests of fused losses."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import OPTConfig

from forgather.ml.loss import CausalLoss, LinearCrossEntropyLoss
from tests.support.data_parallel import Result, run
from tests.support.tiny_models import VOCAB_SIZE, quiet_trainer, token_samples

SETTINGS: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "momentum": 0.9,
}
FUSED = {"fused_loss_factory": LinearCrossEntropyLoss}
OPT = OPTConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=16,
    word_embed_proj_dim=8,
    ffn_dim=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
    dropout=0.0,
)


def plain_fused_loss(head: Any) -> Any:
    """Return a custom fused loss that does not declare its targets."""

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return CausalLoss()(head(hidden), labels)

    return loss


def losses(output_dir: Path, model: nn.Module, fused: bool, **settings: Any) -> tuple[Result, dict[str, Any]]:
    options = (
        {**FUSED, "eval_dataset": token_samples(9, seed=5)} if fused else {"eval_dataset": token_samples(9, seed=5)}
    )
    trainer = quiet_trainer(output_dir, model, token_samples(30), trainer_options=options, **{**SETTINGS, **settings})
    return run(trainer), trainer.evaluate()
