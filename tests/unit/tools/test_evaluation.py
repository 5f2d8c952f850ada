"""Evaluation of checkpoints from Python."""

from pathlib import Path

import pytest
import torch
from transformers import EvalPrediction

from forgather.ml.checkpoint.manifest import CheckpointManifest
from forgather.tools.evaluation import evaluate_checkpoint, num_data_parallel_ranks
from tests.support.tiny_models import quiet_trainer, tiny_llama


def samples(count: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    tokens = [torch.arange(number, number + 8) % 16 for number in range(first, first + count)]
    return [{"input_ids": one, "labels": one} for one in tokens]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_metrics_and_named_datasets_are_those_of_the_trainer(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, tiny_llama(None), samples(12), max_steps=2)
    trainer.train()
    trainer.save_checkpoint()
    datasets = {"short": samples(3), "long": samples(9, first=3)}
    expected = trainer.evaluate(datasets)
    found = evaluate_checkpoint(str(tmp_path), datasets, args=trainer.args, compute_metrics=accuracy)
    for name in ("eval_short_loss", "eval_long_loss"):
        assert found.metrics[name] == pytest.approx(expected[name], rel=1e-6)
    assert 0 <= found.metrics["eval_short_accuracy"] <= 1
    assert (found.num_samples, found.num_tokens, found.step) == (12, 12 * 7, 2)
    assert found.loss == pytest.approx((expected["eval_short_loss"] + 3 * expected["eval_long_loss"]) / 4, rel=1e-6)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (None, 4),
        ({"shape": [4], "axis_names": ["data_parallel"]}, 4),
        ({"shape": [4], "axis_names": ["pipeline_parallel"]}, 1),
        ({"shape": [2, 2], "axis_names": ["data_parallel", "pipeline_parallel"]}, 2),
        ({"shape": "none", "axis_names": 3}, 4),
        ({"shape": [0], "axis_names": ["pipeline_parallel"]}, 1),
    ],
)
def test_ranks_with_batches_of_their_own_are_read_from_the_mesh(mesh: dict[str, object] | None, expected: int) -> None:
    assert num_data_parallel_ranks(CheckpointManifest("x", 4, "2026-01-01", {}, mesh=mesh)) == expected
