"""Evaluation means, evaluation and save intervals, and the choice of the best model, with exact values."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forgather.ml.loss import RescaleLoss
from forgather.ml.trainer.loop.evaluation_sums import EvaluationSums
from forgather.ml.trainer.trainer import Trainer
from tests.support.tiny_models import (
    Recorder,
    ScalarModel,
    TokenModel,
    quiet_trainer,
    saved_steps,
    scalars,
    token_samples,
)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, -2), labels[:, 1:].flatten())


def stop_at(step: int, event: str = "on_step_end", flag: str = "should_training_stop") -> Recorder:
    def ask(state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            setattr(control, flag, True)

    return Recorder(**{event: ask})


# --- evaluation


def evaluate_scalars(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    return quiet_trainer(tmp_path, ScalarModel(), None, **settings).evaluate(scalars(2, 4, 6))


def test_max_eval_steps_counts_batches(tmp_path: Path) -> None:
    metrics = evaluate_scalars(tmp_path, max_eval_steps=2)
    assert metrics["eval_loss"] == 3.0
    assert metrics["eval_tokens"] == 2
    assert metrics["eval_runtime"] > 0 and metrics["eval_samples_per_second"] > 0


def test_no_batch_is_fetched_beyond_max_eval_steps(tmp_path: Path) -> None:
    fetched = []

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            for number in range(5):
                fetched.append(number)
                yield {"value": torch.tensor([1.0])}

    loader: Any = Batches()
    quiet_trainer(tmp_path, ScalarModel(), None, max_eval_steps=2).evaluate(loader)
    assert fetched == [0, 1]


def test_evaluation_without_targets_is_nan_and_never_the_best(tmp_path: Path) -> None:
    samples = token_samples(4)
    options = {"eval_dataset": samples[3:]}
    trainer = quiet_trainer(tmp_path, TokenModel(), samples, trainer_options=options, eval_strategy="epoch")
    trainer.train()
    assert math.isnan(trainer.evaluate()["eval_loss"])
    assert trainer.state.best_metric is None


def test_evaluation_sums_use_no_float64_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = EvaluationSums()
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "double", None)
        sums.add(torch.tensor(2.0), 3, 1)
        sums.add(torch.tensor(4.0), torch.tensor(1), 1)
    assert (sums.loss_sum, sums.targets, sums.mean, sums.num_samples) == (10.0, 4, 2.5, 2)


def test_rescaled_loss_is_not_rescaled_in_an_evaluation(tmp_path: Path) -> None:
    losses = []
    for loss in (shifted, RescaleLoss(shifted, 0.25)):
        options = {"compute_loss_func": loss}
        trainer = quiet_trainer(tmp_path, TokenModel(), None, trainer_options=options)
        losses.append(trainer.evaluate(token_samples(4))["eval_loss"])
    assert losses[0] == losses[1]


def test_callbacks_see_predictions_and_their_metrics_are_logged(tmp_path: Path) -> None:
    correct = []

    def compare(batch: Any, logits: Tensor, labels: Tensor, **_: Any) -> None:
        assert torch.equal(batch["labels"], labels)
        correct.append((logits.argmax(-1) == labels).float().mean().item())

    def add_accuracy(metrics: dict[str, Any], **_: Any) -> None:
        metrics["eval_accuracy"] = sum(correct) / len(correct)

    recorder = Recorder(on_prediction_step=compare, on_evaluate=add_accuracy)
    samples = token_samples(3)
    options = {"eval_dataset": samples}
    trainer = quiet_trainer(tmp_path, TokenModel(), samples, recorder, trainer_options=options, eval_strategy="epoch")
    trainer.train()
    assert len(correct) == 3
    (record,) = (record for record in trainer.state.log_history if "eval_loss" in record)
    assert record["eval_accuracy"] == sum(correct) / 3


def test_unused_logits_are_released(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, TokenModel(), None)
    trainer.evaluate(token_samples(1))
    sample = {name: value[None] for name, value in token_samples(1)[0].items()}
    assert trainer._prediction_step(*trainer._prepare_batch(sample))["logits"] is None


def test_tensors_inside_lists_and_dicts_are_moved(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, TokenModel(), None)
    trainer.evaluate(token_samples(1))
    trainer.device = torch.device("meta")
    tensor = torch.ones(1)
    inputs, _ = trainer._prepare_batch({"a": tensor, "b": [tensor, (tensor, 1)], "c": {"d": tensor, "e": "text"}})
    moved = [inputs["a"], inputs["b"][0], inputs["b"][1][0], inputs["c"]["d"]]
    assert all(part.device.type == "meta" for part in moved)
    assert (inputs["b"][1][1], inputs["c"]["e"]) == (1, "text")


def test_samples_have_equal_weight_in_batches_of_different_sizes(tmp_path: Path) -> None:
    assert evaluate_scalars(tmp_path, per_device_eval_batch_size=2)["eval_loss"] == 4.0


def evaluated_steps(tmp_path: Path, num_samples: int, **settings: Any) -> list[int]:
    recorder = Recorder()
    options: dict[str, Any] = {"eval_dataset": scalars(2, 4, 6)}
    data = scalars(*range(num_samples))
    quiet_trainer(tmp_path, ScalarModel(), data, recorder, trainer_options=options, **settings).train()
    return recorder.steps("on_evaluate")


def test_epoch_strategy_evaluates_once_per_epoch(tmp_path: Path) -> None:
    steps = evaluated_steps(tmp_path, 8, eval_strategy="epoch", gradient_accumulation_steps=4, num_train_epochs=4)
    assert steps == [2, 4, 6, 8]


def test_evaluates_at_every_step_on_request(tmp_path: Path) -> None:
    assert evaluated_steps(tmp_path, 2, eval_strategy="steps", eval_steps=1) == [1, 2]


@pytest.mark.parametrize(("strategy", "steps"), [("steps", [4, 6, 8]), ("epoch", [6, 9])])
def test_no_evaluation_before_the_delay(tmp_path: Path, strategy: str, steps: list[int]) -> None:
    settings: dict[str, Any] = {"eval_strategy": strategy, "eval_steps": 2, "eval_delay": 4, "num_train_epochs": 3}
    assert evaluated_steps(tmp_path, 3, **settings) == steps


@pytest.mark.parametrize("accumulation", [1, 2])
def test_evaluate_after_train_repeats_the_last_evaluation(tmp_path: Path, accumulation: int) -> None:
    recorder = Recorder()
    trainer = quiet_trainer(
        tmp_path,
        TokenModel(),
        token_samples(8),
        recorder,
        trainer_options={"eval_dataset": token_samples(7, seed=2)},
        eval_strategy="steps",
        eval_steps=2,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
    )
    trainer.train()
    last = recorder.details("on_evaluate", "metrics")[-1]
    again = trainer.evaluate()
    assert again["eval_loss"] == last["eval_loss"]
    assert again["eval_tokens"] == last["eval_tokens"]


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    class Dropout(TokenModel):
        """Model that also draws random numbers in evaluations."""

        def forward(self, input_ids: Tensor) -> Tensor:
            return torch.nn.functional.dropout(super().forward(input_ids), 0.5, training=True)

    def final_weights(strategy: str) -> Tensor:
        model = Dropout()
        data = token_samples(8)
        options: dict[str, Any] = {"eval_dataset": data}
        quiet_trainer(tmp_path, model, data, trainer_options=options, eval_strategy=strategy, eval_steps=1).train()
        return model.head.weight.detach()

    assert torch.equal(final_weights("no"), final_weights("steps"))


# --- saving


def test_save_interval_follows_the_global_step_across_a_resume(tmp_path: Path) -> None:
    def run(max_steps: int) -> list[int]:
        recorder = Recorder()
        quiet_trainer(
            tmp_path,
            ScalarModel(),
            scalars(1, 2, 3, 4, 5),
            recorder,
            save_strategy="steps",
            save_steps=4,
            max_steps=max_steps,
            save_total_limit=None,
        ).train()
        return recorder.steps("on_save")

    assert run(6) == [4, 6]
    assert run(20) == [8, 12, 16, 20]
    assert saved_steps(tmp_path) == [4, 6, 8, 12, 16, 20]
    assert run(20) == []


def test_step_is_saved_once_despite_two_requests(tmp_path: Path) -> None:
    recorder = stop_at(4, flag="should_save")
    quiet_trainer(tmp_path, ScalarModel(), scalars(1, 2, 3, 4), recorder, save_strategy="steps", save_steps=2).train()
    assert recorder.steps("on_save") == [2, 4]


def test_save_strategy_epoch_saves_once_per_epoch(tmp_path: Path) -> None:
    recorder = Recorder()
    quiet_trainer(
        tmp_path,
        ScalarModel(),
        scalars(1, 2, 3, 4, 5),
        recorder,
        save_strategy="epoch",
        num_train_epochs=3,
        gradient_accumulation_steps=2,
    ).train()
    assert recorder.steps("on_save") == [3, 6, 9]


def test_abort_makes_no_final_save(tmp_path: Path) -> None:
    recorder = stop_at(5, flag="should_abort_without_save")
    output = quiet_trainer(
        tmp_path, ScalarModel(), scalars(*range(9)), recorder, save_strategy="steps", save_steps=2
    ).train()
    assert output.global_step == 5
    assert saved_steps(tmp_path) == [2, 4]


def test_eval_on_save_evaluates_each_saved_step_once(tmp_path: Path) -> None:
    recorder = Recorder()
    quiet_trainer(
        tmp_path,
        ScalarModel(),
        scalars(*range(6)),
        recorder,
        trainer_options={"eval_dataset": scalars(2, 4, 6)},
        eval_on_save=True,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=2,
    ).train()
    assert recorder.steps("on_evaluate") == [2, 4, 6]
    assert recorder.steps("on_save") == [2, 4, 6]


# --- the best model


def best_run(tmp_path: Path, recorder: Recorder, losses: tuple[float, ...] = (1, -1, 3, 2), **settings: Any) -> Trainer:
    """Train with an evaluation after each step that gives these losses: the weight itself, which starts at 2."""
    defaults: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
        "learning_rate": 1.0,
    }
    options: dict[str, Any] = {"eval_dataset": scalars(1)}
    data = scalars(*(before - after for before, after in zip((2, *losses), losses, strict=False)))
    trainer = quiet_trainer(
        tmp_path, ScalarModel(2.0), data, recorder, trainer_options=options, **{**defaults, **settings}
    )
    trainer.train()
    assert [metrics["eval_loss"] for metrics in recorder.details("on_evaluate", "metrics")] == list(losses)
    return trainer


def test_the_best_checkpoint_is_preserved(tmp_path: Path) -> None:
    trainer = best_run(tmp_path, Recorder(), preserve_best_model=True)
    assert saved_steps(tmp_path) == [2, 4]
    assert trainer.state.best_metric == -1.0
    assert Path(trainer.state.best_model_checkpoint) == tmp_path / "checkpoints" / "checkpoint-2"
    assert trainer.model is not None and trainer.model.weight.item() == 2.0  # type: ignore[operator]


def test_the_n_best_checkpoints_are_preserved(tmp_path: Path) -> None:
    best_run(tmp_path, Recorder(), preserve_best_model=True, preserve_n_best=2)
    assert saved_steps(tmp_path) == [1, 2, 4]


def test_best_checkpoint_is_not_preserved_by_default(tmp_path: Path) -> None:
    best_run(tmp_path, Recorder())
    assert saved_steps(tmp_path) == [4]


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    trainer = best_run(tmp_path, Recorder(), load_best_model_at_end=True)
    assert trainer.evaluate()["eval_loss"] == -1.0


def test_best_saved_checkpoint_is_loaded_if_the_best_step_was_not_saved(tmp_path: Path) -> None:
    trainer = best_run(tmp_path, Recorder(), (-5, 1, 4, 3), load_best_model_at_end=True, save_steps=2)
    assert saved_steps(tmp_path) == [2, 4]
    assert trainer.state.best_metric == -5.0
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    assert trainer.evaluate()["eval_loss"] == 1.0


@pytest.mark.parametrize("greater", ["greater_is_better", "best_model_greater_is_better"])
@pytest.mark.parametrize("metric", ["metric_for_best_model", "best_model_metric"])
def test_both_argument_names_select_the_best_metric(tmp_path: Path, metric: str, greater: str) -> None:
    def add_score(metrics: dict[str, Any], **_: Any) -> None:
        metrics["eval_score"] = metrics["eval_loss"]

    settings: dict[str, Any] = {metric: "score", greater: True}
    trainer = best_run(tmp_path, Recorder(on_evaluate=add_score), preserve_best_model=True, **settings)
    assert saved_steps(tmp_path) == [3, 4]
    assert trainer.state.best_metric == 3.0
