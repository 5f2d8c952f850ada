"""docs/reference/checkpoint-format.md: a reader that was written from the page alone reads checkpoints of every layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forgather import DDPTrainer, FSDP2Trainer, PipelineTrainer, Trainer
from forgather.ml.checkpoint.files.state_files import read_state as own_read_state
from tests.docs.plain_reader import merged_optimizer, read_checkpoint, read_manifest
from tests.support.ranks import run_on_ranks

TRAINERS: dict[str, tuple[type[Any], int]] = {
    "single": (Trainer, 1),
    "ddp": (DDPTrainer, 2),
    "fsdp2": (FSDP2Trainer, 2),
    "pipeline": (PipelineTrainer, 2),
}


def build() -> LlamaForCausalLM:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))


def train(kind: str, folder: str) -> None:
    samples = [{"input_ids": torch.arange(8) + i % 50, "labels": torch.arange(8) + i % 50} for i in range(32)]
    args = {"output_dir": folder, "max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True, "seed": 1}
    options: dict[str, Any] = {"model_init": build, "train_dataset": samples, "default_callbacks": False}
    if kind == "pipeline":
        args["n_microbatches"] = 2
        options["pipe_schedule_factory"] = "1f1b"
    TRAINERS[kind][0](args=args, **options).train()


@pytest.mark.parametrize("kind", TRAINERS)
def test_reader_of_the_page_reads_every_component(tmp_path: Path, kind: str) -> None:
    run_on_ranks(train, TRAINERS[kind][1], kind, str(tmp_path))
    folder = tmp_path / "checkpoints" / "checkpoint-2"
    found = read_checkpoint(folder)

    model = LlamaForCausalLM.from_pretrained(folder)
    assert found.weights.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert np.array_equal(found.weights[name], weight.numpy()), name
    moments = merged_optimizer(found.states["optimizer"])
    assert moments.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert moments[name]["exp_avg"].shape == parameter.shape, name
    own = [own_read_state(str(path))["state"] for path in sorted(folder.glob("optimizer_state*.pt"))]
    for name, values in ((name, values) for state in own for name, values in state.items()):
        assert np.array_equal(moments[name]["exp_avg_sq"], values["exp_avg_sq"].numpy()), name
    assert list(found.states["rng"]) == list(range(TRAINERS[kind][1]))
    assert found.states["trainer"][None]["state"]["global_step"] == found.manifest["step"] == 2


def test_reader_of_the_page_finds_damage(tmp_path: Path) -> None:
    run_on_ranks(train, 1, "single", str(tmp_path))
    folder = tmp_path / "checkpoints" / "checkpoint-2"
    state = folder / "optimizer_state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    with pytest.raises(ValueError, match=r"optimizer_state\.pt is damaged"):
        read_checkpoint(folder)
    manifest = folder / "checkpoint_manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(ValueError, match="the manifest is damaged"):
        read_manifest(folder)
