"""Summary at the start of training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forgather.ml.trainer.callbacks import InfoCallback
from tests.unit.ml.trainer.callbacks.run import Run


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 10)
        self.layer = nn.Linear(10, 100, bias=False)


def summary(run: Run, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    run.send("on_train_begin")
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: line for line in lines}


def test_summary_shows_parameters_batches_steps_devices_and_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, InfoCallback(), model=Model().to(torch.bfloat16), max_steps=2500, num_train_epochs=2.5)
    run.args.gradient_accumulation_steps = 4
    run.args.mixed_precision = "bf16"
    run.state.num_processes = 2  # type: ignore[attr-defined]
    rows = summary(run, capsys)
    assert "2.00k parameters (1.00k without embeddings)" in rows["model"]
    assert "bfloat16, computed in bf16" in rows["precision"]
    assert "16 per device x 4 accumulated x 2 data-parallel = 128 per step" in rows["batch"]
    assert "2,500, 2.5 epochs" in rows["steps"]
    assert "2 processes" in rows["devices"]
    assert "from the beginning" in rows["start"]
    assert str(tmp_path) in rows["output"]


def test_recipes_are_listed_if_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, InfoCallback(), model=Model())
    assert "recipes" not in summary(run, capsys)
    run.args.gradient_checkpointing, run.args.ema_decay = True, 0.99
    assert "gradient_checkpointing, ema_decay=0.99" in summary(run, capsys)["recipes"]


def test_frozen_parameters_are_listed_separately(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    model.table.requires_grad_(False)
    assert "1.00k trainable" in summary(Run(tmp_path, InfoCallback(), model=model), capsys)["model"]


def test_resumed_run_shows_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, InfoCallback(), global_step=1200, epoch=0.5, num_input_tokens_seen=3_400_000)
    assert "resumed at step 1,200 (epoch 0.50), after 3.40M tokens" in summary(run, capsys)["start"]


def test_pipeline_stages_do_not_multiply_the_batch_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class PipelineTrainer:
        num_data_parallel_ranks = 1

    run = Run(tmp_path, InfoCallback())
    run.state.num_processes = 4  # type: ignore[attr-defined]
    trainer: Any = PipelineTrainer()
    run.trainer = trainer
    assert "x 1 data-parallel = 16 per step" in summary(run, capsys)["batch"]


def test_run_without_a_step_limit_is_labelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no limit" in summary(Run(tmp_path, InfoCallback(), max_steps=2**62), capsys)["steps"]


def test_other_ranks_print_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert summary(Run(tmp_path, InfoCallback(), is_world_process_zero=False), capsys) == {}
