"""Predictions of one process: structure, labels, padding, requested additions, and errors of metric functions."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from transformers import Trainer as TheirTrainer
from transformers import TrainingArguments as TheirArguments

from forgather.ml.trainer.trainer import Trainer
from tests.guarantees.metrics.metric_runs import Echo, ids, order_metrics, ordered_samples
from tests.support.tiny_models import Recorder, ScalarModel, TokenModel, quiet_trainer, scalars, tiny_llama


def trainer_with(tmp_path: Path, model: nn.Module, *callbacks: Any, **settings: Any) -> Trainer:
    functions = {
        name: settings.pop(name) for name in ("compute_metrics", "preprocess_logits_for_metrics") if name in settings
    }
    defaults = {"per_device_eval_batch_size": 2}
    return quiet_trainer(tmp_path, model, None, *callbacks, trainer_options=functions, **{**defaults, **settings})


class Seen:
    """`compute_metrics` that keeps its arguments."""

    def __init__(self, **metrics: Any) -> None:
        self.predictions: list[Any] = []
        self._metrics = metrics

    def __call__(self, prediction: Any) -> dict[str, Any]:
        self.predictions.append(prediction)
        return self._metrics

    @property
    def last(self) -> Any:
        return self.predictions[-1]


# --- structure


def test_several_outputs_are_a_tuple_and_keep_their_structure(tmp_path: Path) -> None:
    seen = Seen()
    trainer_with(tmp_path, Echo(), compute_metrics=seen).evaluate(ids(4, 2, 9))
    logits, (column, heads) = seen.last.predictions
    assert logits.tolist() == [[4, -4], [2, -2], [9, -9]]
    assert column.tolist() == [[4], [2], [9]]
    assert heads["last"].tolist() == [4, 2, 9] and heads["last"].dtype == np.float64
    assert seen.last.label_ids.tolist() == [0, 0, 1]
    assert seen.last.inputs is None and seen.last.losses is None


def test_the_cache_of_a_language_model_is_no_prediction(tmp_path: Path) -> None:
    output = trainer_with(tmp_path, tiny_llama()).predict(ordered_samples(3))
    assert output.predictions.shape == (3, 5, 32) and output.label_ids.shape == (3, 5)
    assert set(output.metrics) == {"test_loss", "test_tokens", "test_runtime", "test_samples_per_second"}


BERT = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)


def answers(number: int) -> dict[str, Tensor]:
    return {"start_positions": torch.tensor(number % 3), "end_positions": torch.tensor(number % 3 + 1)}


@pytest.mark.parametrize("is_labelled", [True, False])
@pytest.mark.parametrize(
    ("model_class", "labels_of"),
    [
        (BertForSequenceClassification, lambda number: {"labels": torch.tensor(number % 2)}),
        (BertForTokenClassification, lambda number: {"labels": torch.tensor([0, 1, -100, number % 2])}),
        (BertForQuestionAnswering, answers),
    ],
)
def test_predictions_and_labels_are_as_in_transformers(
    tmp_path: Path, model_class: Any, labels_of: Callable[[int], dict[str, Tensor]], is_labelled: bool
) -> None:
    torch.manual_seed(0)
    model = model_class(BERT)
    samples = [{"input_ids": torch.arange(n, n + 4), **(labels_of(n) if is_labelled else {})} for n in range(1, 5)]
    args = TheirArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], per_device_eval_batch_size=2)
    functions = [Seen(mean=0.5) for _ in range(2)]
    theirs = TheirTrainer(model, args, compute_metrics=functions[0]).predict(samples)
    ours = trainer_with(tmp_path, model, compute_metrics=functions[1]).predict(samples)
    pairs = list(zip(_flat(ours.predictions), _flat(theirs.predictions), strict=True))
    pairs += zip(_flat(ours.label_ids), _flat(theirs.label_ids), strict=True)
    for own, their in pairs:
        assert own.dtype == their.dtype
        np.testing.assert_allclose(own, their, atol=1e-6)
    assert len(functions[0].predictions) == len(functions[1].predictions) == int(is_labelled)
    for name in ("test_loss", "test_mean"):
        assert ours.metrics.get(name) == pytest.approx(theirs.metrics.get(name)), name


def _flat(arrays: Any) -> tuple[Any, ...]:
    return () if arrays is None else arrays if isinstance(arrays, tuple) else (arrays,)


def test_label_names_choose_columns(tmp_path: Path) -> None:
    seen = Seen()
    trainer_with(tmp_path, Echo(), compute_metrics=seen, label_names=["labels", "sample_id"]).evaluate(ids(5, 6))
    assert [labels.tolist() for labels in seen.last.label_ids] == [[1, 0], [5, 6]]


class Bits(nn.Module):
    """Model with outputs of types that cannot hold -100, in half precision, and one scalar per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = self.weight * labels.float().mean()
        return {"loss": loss, "mask": input_ids > 2, "half": input_ids.bfloat16(), "scalar": loss.detach()}


def test_padding_and_types(tmp_path: Path) -> None:
    seen = Seen()
    trainer_with(tmp_path, Bits(), compute_metrics=seen).evaluate(ordered_samples(4))
    mask, half, scalar = seen.last.predictions
    assert mask.dtype == np.int64 and set(mask[:2, 3:].flatten()) == {-100} and mask[3].min() >= 0
    assert half.dtype == np.float32 and half[:, 0].tolist() == [0, 1, 2, 3]
    assert scalar.shape == (2,)


# --- what is asked for


def test_preprocessed_logits_are_all_that_is_collected(tmp_path: Path) -> None:
    seen, shapes = Seen(), []

    def best_tokens(logits: Tensor, labels: Tensor) -> Tensor:
        shapes.append((tuple(logits.shape), tuple(labels.shape)))
        return logits.argmax(-1)

    model = TokenModel()
    trainer = trainer_with(tmp_path, model, compute_metrics=seen, preprocess_logits_for_metrics=best_tokens)
    trainer.evaluate(ordered_samples(4))
    assert shapes == [((2, 3, 32), (2, 3)), ((2, 5, 32), (2, 5))]
    assert seen.last.predictions.shape == (4, 5) and seen.last.predictions.dtype == np.int64


@pytest.mark.parametrize("every", [None, 1, 2, 7])
def test_inputs_and_losses_on_request(tmp_path: Path, every: int | None) -> None:
    seen = Seen()
    options = {"include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": every}
    trainer = trainer_with(tmp_path, TokenModel(), compute_metrics=seen, **options)
    metrics = trainer.evaluate(ordered_samples(6))
    assert seen.last.inputs[:, 0].tolist() == list(range(6))
    assert seen.last.losses.shape == (6,) and seen.last.losses[0] == seen.last.losses[1] != seen.last.losses[2]
    weights = np.array([2, 2, 4, 4, 6, 6])
    assert np.average(seen.last.losses, weights=weights) == pytest.approx(metrics["eval_loss"])


@pytest.mark.parametrize("asked", [{}, {"compute_metrics": order_metrics, "prediction_loss_only": True}])
def test_nothing_is_collected_unless_asked_for(tmp_path: Path, asked: dict[str, Any]) -> None:
    trainer = trainer_with(tmp_path, TokenModel(), **asked)
    kept: list[Any] = []
    step = trainer._prediction_step
    vars(trainer)["_prediction_step"] = lambda *given: kept.append(step(*given)) or kept[-1]
    metrics = trainer.evaluate(ordered_samples(4))
    assert set(metrics) == {"eval_loss", "eval_tokens", "eval_runtime", "eval_samples_per_second"}
    assert [one["logits"] for one in kept] == [None, None]


def test_functions_may_change_between_evaluations(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, TokenModel(), compute_metrics=order_metrics)
    assert trainer.evaluate(ordered_samples(3))["eval_num_samples"] == 3
    trainer.compute_metrics = None
    assert "eval_num_samples" not in trainer.evaluate(ordered_samples(3))
    output = trainer.evaluator.predict_all(ordered_samples(3), prediction_loss_only=False)
    assert output.predictions.shape == (3, 5, 32) and output.num_samples == 3 and "eval_loss" in output.metrics
    trainer.compute_metrics = order_metrics
    assert trainer.evaluate(ordered_samples(4))["eval_num_samples"] == 4


def test_single_batches(tmp_path: Path) -> None:
    calls: list[tuple[list[int], bool]] = []

    def accumulate(prediction: Any, compute_result: bool) -> dict[str, Any]:
        assert isinstance(prediction.predictions, Tensor) and set(prediction.inputs) == {"input_ids", "labels"}
        calls.append((prediction.label_ids[:, 0].tolist(), compute_result))
        return {"num_batches": len(calls)} if compute_result else {}

    settings = {"batch_eval_metrics": True, "include_for_metrics": ["inputs"]}
    trainer = trainer_with(tmp_path, TokenModel(), compute_metrics=accumulate, **settings)
    assert trainer.evaluate(ordered_samples(5))["eval_num_batches"] == 3
    assert calls == [([0, 1], False), ([2, 3], False), ([4], True)]
    assert trainer.evaluator.predict_all(ordered_samples(5)).predictions is None
    assert trainer.predict(ordered_samples(5)).predictions.shape == (5, 7, 32)


# --- several datasets and prefixes


def test_datasets_by_name(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = trainer_with(tmp_path, TokenModel(), recorder, compute_metrics=order_metrics)
    metrics = trainer.evaluate({"a": ordered_samples(3), "b": ordered_samples(4)})
    assert metrics["eval_a_num_samples"] == 3 and metrics["eval_b_num_samples"] == 4
    assert {"eval_a_loss", "eval_b_loss"} < set(metrics) and "eval_loss" not in metrics
    assert [next(iter(told)) for told in recorder.details("on_evaluate", "metrics")] == ["eval_a_loss", "eval_b_loss"]
    assert trainer.evaluate(ordered_samples(2), metric_key_prefix="probe")["probe_num_samples"] == 2


def test_a_dict_of_columns_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of columns"):
        trainer_with(tmp_path, TokenModel()).evaluate({"input_ids": torch.zeros(3, 4)})


def test_prediction_tells_callbacks(tmp_path: Path) -> None:
    recorder = Recorder()
    output = trainer_with(tmp_path, TokenModel(), recorder).predict(ordered_samples(3))
    assert recorder.details("on_predict", "metrics") == [output.metrics]
    assert recorder.steps("on_evaluate") == [] and len(recorder.steps("on_prediction_step")) == 2


def test_a_loss_without_labels_is_reported(tmp_path: Path) -> None:
    class Scaled(ScalarModel):
        def forward(self, value: Tensor) -> dict[str, Tensor]:
            return {**super().forward(value), "logits": value * self.weight}

    output = trainer_with(tmp_path, Scaled()).predict(scalars(2, 4, 9))
    assert output.metrics["test_loss"] == 5.0 and output.predictions.tolist() == [2, 4, 9]


# --- errors


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "compute_metrics returned list, but it must return a dict"),
        ({"f1": [0.5, 1.0]}, "compute_metrics returned list as 'f1', but each metric must be one number"),
        ({"f1": np.zeros(2)}, "ndarray as 'f1'"),
        ({"f1": None}, "NoneType as 'f1'"),
        ({"name": "good"}, "str as 'name'"),
    ],
)
def test_metrics_that_are_no_numbers(tmp_path: Path, result: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message.replace("(", r"\(")):
        trainer_with(tmp_path, TokenModel(), compute_metrics=lambda _: result).evaluate(ordered_samples(2))


def test_numbers_become_python_numbers(tmp_path: Path) -> None:
    values = {"a": np.float32(0.5), "b": np.int64(3), "c": torch.tensor(2.0), "d": np.array([4.0]), "eval_e": True}
    metrics = trainer_with(tmp_path, TokenModel(), compute_metrics=lambda _: values).evaluate(ordered_samples(2))
    found = {name: metrics[f"eval_{name}"] for name in "abcde"}
    assert found == {"a": 0.5, "b": 3, "c": 2.0, "d": 4.0, "e": True}
    assert [type(value) for value in found.values()] == [float, int, float, float, bool]


class Uneven(nn.Module):
    """Model with another number of outputs for sequences of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        more = {"more": input_ids} if input_ids.shape[1] > 3 else {}
        return {"loss": self.weight * labels.float().mean(), "logits": input_ids, **more}


def test_predictions_that_cannot_be_joined(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="predictions of different structures"):
        trainer_with(tmp_path, Uneven(), compute_metrics=order_metrics).evaluate(ordered_samples(4))
    with pytest.raises(ValueError, match="of \\[1, 2\\] dimensions"):
        trainer_with(
            tmp_path,
            TokenModel(),
            compute_metrics=order_metrics,
            preprocess_logits_for_metrics=lambda logits, _: logits[:, 0, 0] if logits.shape[1] > 3 else logits[:, 0],
        ).evaluate(ordered_samples(4))
    with pytest.raises(TypeError, match=r"predictions\['text'\] is a str"):
        trainer_with(
            tmp_path,
            TokenModel(),
            compute_metrics=order_metrics,
            preprocess_logits_for_metrics=lambda logits, _: {"text": "x"},
        ).evaluate(ordered_samples(2))


def test_a_model_without_predictions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="returned none besides the loss"):
        trainer_with(tmp_path, ScalarModel(), compute_metrics=order_metrics).evaluate(scalars(1, 2))


def test_a_wrong_use_of_the_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no parameter 'compute_result'"):
        trainer_with(tmp_path, TokenModel(), compute_metrics=order_metrics, batch_eval_metrics=True).evaluate(
            ordered_samples(2)
        )
    with pytest.raises(ValueError, match=r"'labels' is unknown\. Choose from 'inputs', 'loss'"):
        trainer_with(tmp_path, TokenModel(), include_for_metrics=["labels"])
    with pytest.raises(ValueError, match="eval_accumulation_steps=0"):
        trainer_with(tmp_path, TokenModel(), eval_accumulation_steps=0)
    with pytest.raises(ValueError, match="compute_metrics='accuracy' cannot be used"):
        trainer_with(tmp_path, TokenModel(), compute_metrics="accuracy")


def test_an_own_loop_is_told_that_metrics_are_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class OwnLoop(Trainer[Any]):
        def _eval_loop(self) -> dict[str, Any]:
            return {"eval_loss": 1.0}

    options = {"compute_metrics": order_metrics}
    quiet_trainer(tmp_path, TokenModel(), None, trainer_class=OwnLoop, trainer_options=options).evaluate(
        ordered_samples(2)
    )
    assert "called: OwnLoop._eval_loop runs its own loop" in caplog.text
