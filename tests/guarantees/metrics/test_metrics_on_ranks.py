"""Metrics on ranks: single batches, nested predictions, streams, and errors of one rank, which reach all ranks."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from forgather.ml.trainer import DDPTrainer, FSDP2Trainer, PipelineTrainer, Trainer
from forgather.ml.trainer.metrics import gathering
from tests.guarantees.metrics.metric_runs import BATCH_SIZE, Echo, ids, order_metrics, ordered_samples
from tests.support.pipelines import trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Stream, TokenModel, tiny_llama
from tests.support.tiny_parallel import raised

MODEL = functools.partial(tiny_llama, num_hidden_layers=2)


def on_rank(rank: int) -> bool:
    return dist.get_rank() == rank


def trainer_on_ranks(
    trainer_class: type[Trainer], output_dir: str, model: Any = TokenModel, **settings: Any
) -> Trainer:
    names = ("compute_metrics", "preprocess_logits_for_metrics", "eval_dataset")
    options = {name: settings.pop(name) for name in names if name in settings}
    defaults = {"per_device_eval_batch_size": BATCH_SIZE}
    if trainer_class is PipelineTrainer:
        defaults |= {"n_microbatches": 2, "per_device_train_batch_size": 2}
    return trainer_of(trainer_class, Path(output_dir), model, None, trainer_options=options, **{**defaults, **settings})


# --- results


def results(output_dir: str) -> dict[str, Any]:
    calls: list[tuple[list[int], bool]] = []

    def accumulate(prediction: Any, compute_result: bool) -> dict[str, Any]:
        calls.append((prediction.label_ids[:, 0].tolist(), compute_result))
        assert len(prediction.predictions) == len(prediction.losses) == len(prediction.inputs["input_ids"])
        return {"num_samples": sum(len(numbers) for numbers, _ in calls)} if compute_result else {}

    settings: dict[str, Any] = {"batch_eval_metrics": True, "include_for_metrics": ["inputs", "loss"]}
    found: dict[str, Any] = {}
    for name, trainer_class in {"ddp": DDPTrainer, "pipeline": PipelineTrainer}.items():
        calls.clear()
        trainer = trainer_on_ranks(trainer_class, output_dir, MODEL, compute_metrics=accumulate, **settings)
        found[name] = (trainer.evaluate(ordered_samples(7))["eval_num_samples"], list(calls))
    nested = trainer_on_ranks(DDPTrainer, output_dir, Echo)
    found["nested"] = nested.predict(ids(*range(7))).predictions
    found["small messages"] = in_small_messages(lambda: nested.predict(ids(*range(7))).predictions)
    # A rank without a batch learns the structure of predictions from the others.
    found["one sample"] = nested.predict(ids(5)).predictions
    streaming = trainer_on_ranks(DDPTrainer, output_dir, compute_metrics=order_metrics, dispatch_batches=True)
    found["stream"] = streaming.evaluate(Stream(ordered_samples(7)))
    by_name = {"a": ordered_samples(7), "b": ordered_samples(1)}
    found["by name"] = trainer_on_ranks(DDPTrainer, output_dir, compute_metrics=order_metrics).evaluate(by_name)
    limited = trainer_on_ranks(DDPTrainer, output_dir, compute_metrics=order_metrics, max_eval_steps=1)
    found["limited"] = limited.evaluate(ordered_samples(9))
    found["random"] = trainer_on_ranks(DDPTrainer, output_dir, compute_metrics=own_rank).evaluate(ordered_samples(3))
    return found


def in_small_messages(predict: Callable[[], Any]) -> Any:
    usual, gathering._MESSAGE_BYTES = gathering._MESSAGE_BYTES, 8
    try:
        return predict()
    finally:
        gathering._MESSAGE_BYTES = usual


def own_rank(prediction: object) -> dict[str, int]:
    return {"rank": dist.get_rank()}


def test_results_on_two_ranks(tmp_path: Path) -> None:
    for found in run_on_ranks(results, 2, str(tmp_path)):
        assert found["ddp"] == (7, [([0, 1, 2, 3], False), ([4, 5, 6], True)])
        assert found["pipeline"] == (7, [([0, 1], False), ([2, 3], False), ([4, 5], False), ([6], True)])
        for name in ("nested", "small messages"):
            logits, (column, heads) = found[name]
            assert logits[:, 0].tolist() == column[:, 0].tolist() == heads["last"].tolist() == list(range(7))
        assert found["one sample"][0].tolist() == [[5, -5]]
        assert found["stream"]["eval_num_samples"] == 7 and found["stream"]["eval_in_order"] == 1.0
        assert found["by name"]["eval_a_num_samples"] == 7 and found["by name"]["eval_b_num_samples"] == 1
        assert found["limited"]["eval_num_samples"] == 4 and found["limited"]["eval_in_order"] == 1.0
        assert found["random"]["eval_rank"] == 0


# --- errors


def failing_metrics(prediction: object, compute_result: bool = True) -> dict[str, Any]:
    if on_rank(1):
        raise ArithmeticError("no such metric")
    return {}


def failing_logits(logits: Tensor, labels: Tensor) -> Tensor:
    if on_rank(1):
        raise ArithmeticError("no such logits")
    return logits


def errors(output_dir: str) -> dict[str, tuple[str, str]]:
    found = {}
    cases: dict[str, dict[str, Any]] = {
        "metrics": {"compute_metrics": failing_metrics},
        "batches": {"compute_metrics": failing_metrics, "batch_eval_metrics": True},
        "logits": {"compute_metrics": order_metrics, "preprocess_logits_for_metrics": failing_logits},
    }
    for name, functions in cases.items():
        for trainer_class in (DDPTrainer, FSDP2Trainer, PipelineTrainer):
            trainer = trainer_on_ranks(trainer_class, output_dir, MODEL, **functions)
            where = f"{name}, {trainer_class.__name__}"
            found[where] = raised(functools.partial(trainer.evaluate, ordered_samples(9)))
            # All ranks have left the evaluation at the same point, so that the next one works.
            trainer.compute_metrics = trainer.preprocess_logits_for_metrics = None
            assert np.isfinite(trainer.evaluate(ordered_samples(3))["eval_loss"]), where
    uneven = trainer_on_ranks(DDPTrainer, output_dir, compute_metrics=order_metrics)
    uneven.evaluate(ordered_samples(3))
    if on_rank(1):
        uneven.compute_metrics = None
    found["uneven"] = raised(lambda: uneven.evaluate(ordered_samples(3)))
    given = {"compute_metrics": order_metrics} if on_rank(0) else {}
    found["given"] = raised(lambda: trainer_on_ranks(DDPTrainer, output_dir, **given).evaluate(ordered_samples(3)))
    return found


def test_an_error_of_one_rank_reaches_all_ranks(tmp_path: Path) -> None:
    for found in run_on_ranks(errors, 2, str(tmp_path)):
        uneven, given = found.pop("uneven"), found.pop("given")
        assert uneven[0] == "ValueError" and "compute_metrics is set on 1 of 2 ranks" in uneven[1]
        assert "compute_metrics" in given[1]
        assert len(found) == 9
        for where, (kind, message) in found.items():
            assert kind == "DistributedError" and "rank 1 failed while" in message, where
            assert "ArithmeticError: no such" in message, where
