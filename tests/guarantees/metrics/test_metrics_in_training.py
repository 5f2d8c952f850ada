"""Metrics in training: logs, eval_metrics.json, the best model, early stopping, and evaluation before the first step."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback

from forgather.ml.trainer.callbacks import EarlyStopping, JsonLogger
from tests.guarantees.metrics.metric_runs import order_metrics, ordered_samples
from tests.support.data_parallel import ddp_trainer
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, TokenModel, quiet_trainer, saved_steps

SCORES = [0.2, 0.9, 0.3, 0.1, 0.0]


class Scores:
    """`compute_metrics` with a given score for each evaluation; the second one is the best."""

    def __init__(self, *scores: float) -> None:
        self._scores = iter(scores or SCORES)

    def __call__(self, prediction: Any) -> dict[str, float]:
        return {"score": next(self._scores)}


SETTINGS: dict[str, Any] = {
    "max_steps": 5,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 1,
}


def options_with(compute: Any, eval_dataset: Any = None) -> dict[str, Any]:
    return {"compute_metrics": compute, "eval_dataset": eval_dataset or ordered_samples(3)}


@pytest.mark.parametrize("name", ["score", "eval_score"])
def test_the_best_model_is_chosen_by_a_metric(tmp_path: Path, name: str) -> None:
    settings = {**SETTINGS, "metric_for_best_model": name, "load_best_model_at_end": True}
    trainer = quiet_trainer(
        tmp_path, TokenModel(), ordered_samples(4), JsonLogger(), trainer_options=options_with(Scores()), **settings
    )
    trainer.train()
    assert trainer.state.best_metric == 0.9
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    assert saved_steps(tmp_path) == [2, 5]
    stored = json.loads((tmp_path / "checkpoints" / "checkpoint-2" / "eval_metrics.json").read_text())
    assert stored.get("metrics", stored)["eval_score"] == 0.9
    assert [record["eval_score"] for record in trainer.state.log_history if "eval_score" in record] == SCORES
    lines = [json.loads(line) for line in (tmp_path / "trainer_logs.jsonl").read_text().splitlines()]
    assert [line["eval_score"] for line in lines if "eval_score" in line] == SCORES


@pytest.mark.parametrize("of_transformers", [False, True])
def test_early_stopping_on_a_metric(tmp_path: Path, of_transformers: bool) -> None:
    own = EarlyStopping(patience=2, metric="score")
    callback = EarlyStoppingCallback(early_stopping_patience=2) if of_transformers else own
    settings = {**SETTINGS, "metric_for_best_model": "score", "load_best_model_at_end": True}
    options = options_with(Scores())
    trainer = quiet_trainer(tmp_path, TokenModel(), ordered_samples(5), callback, trainer_options=options, **settings)
    assert trainer.train().global_step == 4


def test_a_missing_metric_is_an_error_that_lists_the_others(tmp_path: Path) -> None:
    settings = {**SETTINGS, "metric_for_best_model": "f1", "load_best_model_at_end": True}
    options = options_with(Scores())
    trainer = quiet_trainer(tmp_path, TokenModel(), ordered_samples(4), trainer_options=options, **settings)
    with pytest.raises(ValueError, match=r"No metric 'f1' .* Available metrics: eval_loss, .*eval_score"):
        trainer.train()


def test_several_datasets_in_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    datasets = {"a": ordered_samples(3), "b": ordered_samples(4)}
    for number, more in enumerate([{}, {"metric_for_best_model": "b_score", "load_best_model_at_end": True}]):
        scores = Scores(*(value for score in SCORES for value in (0.5, score)))
        options, stopping = options_with(scores, datasets), EarlyStopping(patience=2, metric="eval_b_score")
        trainer = quiet_trainer(
            *(tmp_path / str(number), TokenModel(), ordered_samples(4), stopping),
            trainer_options=options,
            **{**SETTINGS, **more},
        )
        with caplog.at_level(logging.WARNING):
            assert trainer.train().global_step == 4
        assert "EarlyStopping" not in caplog.text
        assert trainer.state.best_metric == (0.9 if more else None)
        record = next(one for one in trainer.state.log_history if "eval_a_loss" in one)
        assert record["eval_a_score"] == 0.5 and record["eval_b_score"] == 0.2


def test_evaluation_on_start(tmp_path: Path) -> None:
    recorder = Recorder()
    settings = {**SETTINGS, "eval_strategy": "no", "eval_on_start": True, "max_steps": 2}
    options = options_with(order_metrics)
    trainer = quiet_trainer(tmp_path, TokenModel(), ordered_samples(4), recorder, trainer_options=options, **settings)
    trainer.train()
    assert recorder.steps("on_evaluate") == [0]
    # A resumed run has evaluated before its first step already.
    resumed = quiet_trainer(
        *(tmp_path, TokenModel(), ordered_samples(4), recorder),
        trainer_options=options,
        **{**settings, "max_steps": 4},
    )
    resumed.train()
    assert resumed.state.global_step == 4 and recorder.steps("on_evaluate") == [0]
    with pytest.raises(ValueError, match="eval_on_start=True needs an eval_dataset"):
        quiet_trainer(tmp_path, TokenModel(), ordered_samples(4), eval_on_start=True)


def test_averaged_weights_have_metrics_on_request(tmp_path: Path) -> None:
    settings = {"max_steps": 2, "ema_decay": 0.5, "eval_ema": True}
    trainer = quiet_trainer(
        tmp_path, TokenModel(), ordered_samples(4), trainer_options=options_with(order_metrics), **settings
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_num_samples"] == 3 and metrics["eval_ema_loss"] != metrics["eval_loss"]
    averaged = trainer.evaluate(use_ema=True)
    assert averaged["eval_loss"] == metrics["eval_ema_loss"] and averaged["eval_mean"] != metrics["eval_mean"]


def trained_on_ranks(output_dir: str) -> tuple[float, str, int, list[float]]:
    settings = {**SETTINGS, "metric_for_best_model": "score", "load_best_model_at_end": True}
    stopping = EarlyStopping(patience=2, metric="score")
    options = options_with(Scores())
    trainer = ddp_trainer(
        Path(output_dir), TokenModel(), ordered_samples(9), stopping, trainer_options=options, **settings
    )
    step = trainer.train().global_step
    scores = [record["eval_score"] for record in trainer.state.log_history if "eval_score" in record]
    return trainer.state.best_metric, Path(trainer.state.best_model_checkpoint).name, step, scores


def test_ranks_agree_on_the_best_model_and_the_end(tmp_path: Path) -> None:
    found = run_on_ranks(trained_on_ranks, 2, str(tmp_path))
    assert found == [(0.9, "checkpoint-2", 4, SCORES[:4])] * 2
