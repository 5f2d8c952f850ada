"""Gradient checkpointing: the same gradients with far less memory, on one device and in pipeline stages.

`test_model_construction.py` tests the rejection of models without support.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forgather.ml.trainer.trainer import Trainer
from tests.support.memory import peak_bytes
from tests.support.pipelines import joined, pipeline_trainer
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCAB_SIZE, quiet_trainer, tiny_llama, weights

LENGTH = 128
BATCH_SIZE = 4
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": BATCH_SIZE, "max_steps": 1}


def long_samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB_SIZE, (BATCH_SIZE, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def deep_llama() -> nn.Module:
    return tiny_llama(num_hidden_layers=8, max_position_embeddings=LENGTH)


class Layer(nn.Module):
    """Layer with several activations, which can be recomputed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.recomputes = False

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = checkpoint(self._mix, hidden, use_reentrant=False) if self.recomputes else self._mix(hidden)
        return result

    def _mix(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class OwnModel(nn.Module):
    """Model that is not from transformers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB_SIZE, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(8)))
        self.head = nn.Linear(width, VOCAB_SIZE)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(input_ids)))
        return logits


def recompute_layers(rank: int, module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, Layer):
            layer.recomputes = True


class Measured(NamedTuple):
    """Results of one step."""

    weights: dict[str, Tensor]
    peak: int


def measured(trainer: Trainer) -> Measured:
    peak = peak_bytes(trainer.train)
    assert trainer.state.global_step == 1
    return Measured(weights(trainer.unwrapped_model()), peak)


def one_step(output_dir: Path, model: nn.Module, **settings: Any) -> Measured:
    return measured(quiet_trainer(output_dir, model, long_samples(), **SETTINGS, **settings))


def assert_same_step(plain: Measured, saving: Measured, before: dict[str, Tensor]) -> None:
    torch.testing.assert_close(saving.weights, plain.weights, rtol=1e-6, atol=1e-6)
    for name, tensor in plain.weights.items():
        assert not torch.equal(tensor, before[name]), f"{name} was not trained"


def test_one_device_takes_the_same_step_with_less_memory(tmp_path: Path) -> None:
    plain = one_step(tmp_path, deep_llama())
    saving = one_step(tmp_path, deep_llama(), gradient_checkpointing=True)
    assert_same_step(plain, saving, weights(deep_llama()))
    assert saving.peak < 0.5 * plain.peak, (saving.peak, plain.peak)


def test_recomputation_is_not_reentrant(tmp_path: Path) -> None:
    """Re-entrant checkpointing of torch does not work with DDP and torch.compile."""
    model = tiny_llama()
    has_gradients: list[bool] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: has_gradients.append(torch.is_grad_enabled()))
    one_step(tmp_path, model, gradient_checkpointing=True)
    assert has_gradients == [False, True, True], "trial of the loss, forward pass, recomputation"


def test_custom_model_saves_memory_with_a_custom_function(tmp_path: Path) -> None:
    options = {"enable_activation_checkpoint_fn": recompute_layers}
    plain = one_step(tmp_path, OwnModel())
    saving = one_step(tmp_path, OwnModel(), gradient_checkpointing=True, trainer_options=options)
    assert_same_step(plain, saving, weights(OwnModel()))
    assert saving.peak < 0.5 * plain.peak, (saving.peak, plain.peak)


def job(output_dir: str) -> list[Measured]:
    """Run a pipeline step on ranks, without and with recomputed activations; the memory is of this rank only."""
    results = []
    for recomputes in (False, True):
        trainer = pipeline_trainer(
            Path(output_dir),
            deep_llama,
            long_samples(),
            gradient_checkpointing=recomputes,
            n_microbatches=2,
            **SETTINGS,
        )
        result = measured(trainer)
        results.append(result._replace(weights=joined(result.weights)))
    return results


def test_pipeline_stages_take_the_same_step_with_less_memory(tmp_path: Path) -> None:
    alone = one_step(tmp_path, deep_llama())
    for plain, saving in run_on_ranks(job, 2, str(tmp_path / "ranks")):
        assert_same_step(plain, saving, weights(deep_llama()))
        assert_same_step(alone, plain, weights(deep_llama()))
        assert saving.peak < 0.6 * plain.peak, (saving.peak, plain.peak)
