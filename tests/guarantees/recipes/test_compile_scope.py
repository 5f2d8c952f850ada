"""torch_compile_scope="layer": one graph for all layers, the same training, and checkpoints of the uncompiled model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from forgather.ml.trainer.trainer import Trainer
from tests.guarantees.recipes.test_compile import Decoder
from tests.support.data_parallel import run
from tests.support.pipelines import pipeline_trainer, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.sampling import long_search
from tests.support.tiny_models import TokenModel, quiet_trainer, saved_steps, tiny_llama, token_samples, weights

BY_LAYER: dict[str, Any] = {"torch_compile": True, "torch_compile_scope": "layer", "torch_compile_backend": "eager"}
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 3,
}


def eight_layers() -> Decoder:
    return Decoder(8)


def files_of(output_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(output_dir.rglob("*.safetensors"))}


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def job(output_dir: str) -> tuple[list[float], int]:
    torch.compiler.reset()
    counters.clear()
    trainer = pipeline_trainer(
        Path(output_dir), eight_layers, token_samples(12), schedule="1f1b", n_microbatches=2, **SETTINGS, **BY_LAYER
    )
    return run(trainer).losses, num_graphs()


@long_search
def test_layers_share_a_graph_and_checkpoints_equal_eager_ones(tmp_path: Path) -> None:
    eager = run(trainer_of(Trainer, tmp_path / "eager", eight_layers, token_samples(12), **SETTINGS))
    torch.compiler.reset()
    counters.clear()
    trainer = trainer_of(Trainer, tmp_path / "layers", eight_layers, token_samples(12), **SETTINGS, **BY_LAYER)
    compiled = run(trainer)
    assert num_graphs() == 1, "all layers run the same code"
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-6)
    assert files_of(tmp_path / "layers") == files_of(tmp_path / "eager") and saved_steps(tmp_path / "layers") == [3]
    for losses, graphs in run_on_ranks(job, 2, str(tmp_path / "ranks")):
        # A second graph for received hidden states: they are leaves.
        assert graphs <= 2 and losses == pytest.approx(eager.losses, rel=1e-6)


def test_transformers_model_with_selective_checkpointing_compiles_one_layer(tmp_path: Path) -> None:
    """aot_eager traces the backward pass: the compiler keeps results by the same policy."""
    settings = {"gradient_checkpointing": "selective", "per_device_train_batch_size": 2, "max_steps": 1}
    plain, compiled = tiny_llama(num_hidden_layers=3), tiny_llama(num_hidden_layers=3)
    quiet_trainer(tmp_path, plain, token_samples(2), **settings).train()
    torch.compiler.reset()
    counters.clear()
    backend = {**BY_LAYER, "torch_compile_backend": "aot_eager", "torch_compile_dynamic": False}
    quiet_trainer(tmp_path, compiled, token_samples(2), **settings, **backend).train()
    assert num_graphs() == 1 and not counters["graph_break"]
    torch.testing.assert_close(weights(compiled), weights(plain), rtol=1e-6, atol=1e-6)


def test_model_without_layers_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"torch_compile_scope='layer' works on .*TokenModel shows none"):
        quiet_trainer(tmp_path, TokenModel(), token_samples(2), **BY_LAYER).train()
