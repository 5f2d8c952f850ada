"""Metrics are the same numbers on one device and on ranks of every strategy, with predictions in the order of the dataset."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator

from forgather.ml.trainer import AccelTrainer, DDPTrainer, FSDP2Trainer, HybridTrainer, PipelineTrainer, Trainer
from tests.guarantees.metrics.metric_runs import BATCH_SIZE, order_metrics, ordered_samples
from tests.support.pipelines import trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import tiny_llama

SIZES = (11, 3)
"""With four ranks, the last round of 11 samples has batches for two ranks, and 3 samples have no batch for two ranks."""
MODEL = functools.partial(tiny_llama, num_hidden_layers=4)
MICRO = {"n_microbatches": 2, "per_device_train_batch_size": 2}
CASES: dict[int, dict[str, tuple[type[Trainer], dict[str, Any]]]] = {
    1: {"one device": (Trainer, {})},
    2: {
        "ddp, sharded": (DDPTrainer, {"dispatch_batches": False}),
        "ddp, dispatched": (DDPTrainer, {"dispatch_batches": True}),
        "fsdp2": (FSDP2Trainer, {}),
        "accelerate": (AccelTrainer, {}),
        "pipeline": (PipelineTrainer, MICRO),
        "pipeline, two stages per rank": (PipelineTrainer, {**MICRO, "schedule": "interleaved1f1b"}),
    },
    4: {
        "ddp, sharded": (DDPTrainer, {"dispatch_batches": False}),
        "ddp, dispatched": (DDPTrainer, {"dispatch_batches": True}),
        "fsdp2, sharded": (FSDP2Trainer, {"dispatch_batches": False}),
        "hybrid": (HybridTrainer, {**MICRO, "dp_size": 2, "dispatch_batches": False}),
        "hybrid, dispatched": (HybridTrainer, {**MICRO, "dp_size": 2, "dispatch_batches": True}),
        "hybrid, stages sharded": (HybridTrainer, {**MICRO, "dp_size": 2, "dp_strategy": "shard"}),
    },
}


def evaluated(output_dir: str, num_ranks: int) -> dict[str, list[Any]]:
    """Return metrics and predictions of each strategy, with labels and without."""
    results = {}
    for number, (name, (trainer_class, settings)) in enumerate(CASES[num_ranks].items()):
        options: dict[str, Any] = {"compute_metrics": order_metrics}
        if trainer_class is AccelTrainer:
            options |= {"accelerator": Accelerator(cpu=True)}
        trainer = trainer_of(
            trainer_class,
            Path(output_dir) / str(number),
            MODEL,
            None,
            trainer_options=options,
            **{"per_device_eval_batch_size": BATCH_SIZE, **settings},
        )
        evaluations = [trainer.evaluate(ordered_samples(size)) for size in SIZES]
        unlabelled = [{"input_ids": one["input_ids"]} for one in ordered_samples(SIZES[0])]
        results[name] = [evaluations, trainer.predict(ordered_samples(SIZES[0])), trainer.predict(unlabelled)]
    return results


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return evaluated(str(tmp_path_factory.mktemp("one")), 1)["one device"]


def comparable(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.endswith(("_runtime", "_per_second"))}


def test_one_device_sees_each_sample_once_in_order(expected: list[Any]) -> None:
    for metrics, size in zip(expected[0], SIZES, strict=True):
        assert metrics["eval_num_samples"] == size and metrics["eval_in_order"] == 1.0
        assert metrics["eval_labelled"] > metrics["eval_correct"] >= 0
    assert expected[1].predictions.shape == (11, 7, 32)
    assert expected[1].label_ids[:, 0].tolist() == list(range(11))
    # Shorter batches are padded.
    assert (expected[1].predictions[:2, 3:] == -100).all() and (expected[1].label_ids[:2, 3:] == -100).all()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_of_every_strategy_compute_the_same_metrics(tmp_path: Path, expected: list[Any], num_ranks: int) -> None:
    evaluations, prediction, unlabelled = expected
    for rank, results in enumerate(run_on_ranks(evaluated, num_ranks, str(tmp_path), num_ranks)):
        assert results.keys() == CASES[num_ranks].keys()
        for name, (found, predicted, without_labels) in results.items():
            where = f"{name}, rank {rank}"
            for metrics, wanted in zip(found, evaluations, strict=True):
                assert comparable(metrics) == pytest.approx(comparable(wanted), rel=1e-5), where
                for exact in ("num_samples", "in_order", "labelled", "correct"):
                    assert metrics[f"eval_{exact}"] == wanted[f"eval_{exact}"], where
            np.testing.assert_array_equal(predicted.label_ids, prediction.label_ids, where)
            np.testing.assert_allclose(predicted.predictions, prediction.predictions, atol=1e-5, err_msg=where)
            assert comparable(predicted.metrics) == pytest.approx(comparable(prediction.metrics), rel=1e-5), where
            np.testing.assert_allclose(without_labels.predictions, unlabelled.predictions, atol=1e-5, err_msg=where)
            assert without_labels.label_ids is None and comparable(without_labels.metrics) == {}, where
