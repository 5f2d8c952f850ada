"""Hooks for logging, saving, the end of a run and evaluation, overridden with and without super()."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forgather.ml.trainer.base_trainer import (
    logits_from_outputs,
    loss_and_logits_from_outputs,
    loss_from_outputs,
)
from forgather.ml.trainer.periodic_function import PeriodicFunction
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import TrainOutput
from tests.guarantees.trainer_contract.step_hooks import causal_mean
from tests.support.tiny_models import Recorder, TokenModel, quiet_trainer, saved_steps, token_samples, weights

SAMPLES = token_samples(8)
SETTINGS: dict[str, Any] = {
    "max_steps": 4,
    "logging_strategy": "steps",
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}


def build(output_dir: Path, trainer_class: Any = Trainer, *callbacks: Any, **settings: Any) -> Any:
    return quiet_trainer(
        output_dir,
        TokenModel(),
        SAMPLES,
        *callbacks,
        trainer_class=trainer_class,
        trainer_options={"eval_dataset": SAMPLES[:3]},
        **{**SETTINGS, **settings},
    )


# --- logs


def test_log_step_override_replaces_the_default(tmp_path: Path) -> None:
    logged: list[tuple[int, int, int]] = []

    class Own(Trainer):
        def _log_step(self, loss_log: list[Tensor], total_norm_log: list[Tensor], tokens_log: list[Any]) -> None:
            logged.append((len(loss_log), len(total_norm_log), len(tokens_log)))
            self.log({"mine": torch.stack([torch.as_tensor(one) for one in loss_log]).mean().item()})

    recorder = Recorder()
    build(tmp_path, Own, recorder).train()
    assert logged == [(2, 2, 2), (2, 2, 2)]
    assert [step for step, record in recorder.logs if "mine" in record] == [2, 4]
    assert not [record for _, record in recorder.logs if "loss" in record]


def test_log_step_override_with_super_extends_the_default(tmp_path: Path) -> None:
    class Adding(Trainer):
        def _log_step(self, loss_log: Any, total_norm_log: Any, tokens_log: Any) -> None:
            super()._log_step(loss_log, total_norm_log, tokens_log)
            self.log({"extra": 1.0})

    recorder = Recorder()
    build(tmp_path, Adding, recorder).train()
    assert [set(record) & {"loss", "extra"} for _, record in recorder.logs] == [{"loss"}, {"extra"}] * 2


def test_totals_are_exact_with_a_log_step_override(tmp_path: Path) -> None:
    class Silent(Trainer):
        def _log_step(self, loss_log: Any, total_norm_log: Any, tokens_log: Any) -> None:
            pass

    own = build(tmp_path / "own", Silent).train().metrics
    expected = build(tmp_path / "expected").train().metrics
    assert own["train_loss"] == expected["train_loss"] and own["total_tokens"] == expected["total_tokens"]


def test_maybe_log_save_evaluate_can_be_replaced(tmp_path: Path) -> None:
    seen: list[tuple[int, tuple[bool, ...]]] = []

    class Own(Trainer):
        def _maybe_log_save_evaluate(
            self,
            loss_log: Any,
            total_norm_log: Any,
            tokens_log: Any,
            periodic_log: PeriodicFunction,
            periodic_eval: PeriodicFunction,
            periodic_save: PeriodicFunction,
        ) -> None:
            due = tuple(one.step() for one in (periodic_log, periodic_eval, periodic_save))
            seen.append((self.state.global_step, due))
            if periodic_log.due(self.state.global_step):
                self._log_step(loss_log, total_norm_log, tokens_log)

    recorder = Recorder()
    build(tmp_path, Own, recorder, save_strategy="no").train()
    assert seen == [(1, (False,) * 3), (2, (True,) * 2 + (False,)), (3, (False,) * 3), (4, (True,) * 2 + (False,))]
    assert [step for step, _ in recorder.logs] == [2, 4]
    assert recorder.steps("on_evaluate") == []


def test_maybe_log_save_evaluate_can_be_extended(tmp_path: Path) -> None:
    class Adding(Trainer):
        def _maybe_log_save_evaluate(self, *given: Any) -> None:
            super()._maybe_log_save_evaluate(*given)
            if self.state.global_step == 3:
                self.save_checkpoint()

    recorder = Recorder()
    build(tmp_path, Adding, recorder, save_total_limit=5).train()
    assert recorder.steps("on_save") == [2, 3, 4]
    assert saved_steps(tmp_path) == [2, 3, 4]


def test_periodic_functions_can_be_replaced(tmp_path: Path) -> None:
    class Own(Trainer):
        def _setup_periodic_functions(self) -> Any:
            return tuple(PeriodicFunction(0, "steps", period, 1) for period in (1, 3, 4))

    recorder = Recorder()
    build(tmp_path, Own, recorder).train()
    assert [step for step, _ in recorder.logs] == [1, 2, 3, 4]
    assert recorder.steps("on_evaluate") == [3]
    assert recorder.steps("on_save") == [4]


def test_number_of_steps_can_be_replaced(tmp_path: Path) -> None:
    class Short(Trainer):
        def _update_training_steps(self) -> None:
            self.max_steps, self.epoch_train_steps = 3, 8

    class Shorter(Trainer):
        def _update_training_steps(self) -> None:
            super()._update_training_steps()
            self.max_steps = 2

    class Longer(Trainer):
        def _update_training_steps(self) -> None:
            super()._update_training_steps()
            self.max_steps = 11

    for trainer_class, num_steps in ((Short, 3), (Shorter, 2), (Longer, 11)):
        trainer = build(tmp_path / trainer_class.__name__, trainer_class, max_steps=-1, num_train_epochs=1)
        assert trainer.train().global_step == num_steps
        assert trainer.state.max_steps == num_steps


# --- the end of a run


def test_final_log_record_can_be_replaced(tmp_path: Path) -> None:
    given: list[Any] = []

    class Own(Trainer):
        def _end_train_loop(self, start_time: float, train_steps: int) -> dict[str, Any]:
            given.append((start_time > 0, train_steps))
            return {"train_loss": 1.5}

    recorder = Recorder()
    output = build(tmp_path, Own, recorder).train()
    assert given == [(True, 4)]
    assert output.global_step == 4 and output.metrics["train_loss"] == 1.5
    assert recorder.events[-2][0] == "on_log" and recorder.events[-2][2]["logs"]["train_loss"] == 1.5


def test_end_of_training_can_be_replaced(tmp_path: Path) -> None:
    class Own(Trainer):
        def _finalize_training(self, start_time: float, speed_metrics_steps: int) -> TrainOutput:
            return TrainOutput(self.state.global_step, {"train_loss": 0.25, "steps": speed_metrics_steps})

    recorder = Recorder()
    output = build(tmp_path, Own, recorder, save_steps=3).train()
    assert output == TrainOutput(4, {"train_loss": 0.25, "steps": 4})
    assert recorder.names[-1] == "on_train_end"


def test_load_best_model_can_be_replaced(tmp_path: Path) -> None:
    loaded: list[str] = []

    class Own(Trainer):
        def load_best_model(self) -> None:
            loaded.append(self.state.best_model_checkpoint)

    build(tmp_path, Own, load_best_model_at_end=True).train()
    assert len(loaded) == 1 and loaded[0].startswith(str(tmp_path))


def test_statistics_hooks_are_used(tmp_path: Path) -> None:
    class Own(Trainer):
        def _calculate_effective_batch_size(self) -> int:
            return 1234

        def _compute_flops_per_token(self) -> float:
            return 10.0

        def _distributed_loss(self, loss: Tensor) -> Tensor:
            return loss * 3

        def _distributed_tokens(self, tokens: Tensor) -> Tensor:
            return tokens * 5

        def _distributed_peak_mem(self, local_peak: int) -> list[int]:
            return [7]

    recorder, expected = Recorder(), Recorder()
    trainer = build(tmp_path / "own", Own, recorder)
    metrics = trainer.train().metrics
    plain = build(tmp_path / "expected", Trainer, expected).train().metrics
    assert metrics["effective_batch_size"] == 1234 and trainer._flops_per_token == 10.0
    assert recorder.logs[0][1]["loss"] == pytest.approx(3 * expected.logs[0][1]["loss"])
    assert recorder.logs[0][1]["tokens"] == 5 * expected.logs[0][1]["tokens"]
    assert recorder.logs[0][1]["peak_mem_allocated"] == [7]
    assert metrics["total_tokens"] == 5 * plain["total_tokens"]


# --- evaluation


def test_eval_loop_override_is_used_everywhere(tmp_path: Path) -> None:
    class Own(Trainer):
        def _eval_loop(self) -> dict[str, Any]:
            assert not self.model.training and not torch.is_grad_enabled()
            batches = [self._prepare_batch(batch) for batch in self.eval_dataloader]
            losses = [self.loss_fn(self.model(**inputs), labels) for inputs, labels in batches]
            return {"eval_loss": torch.stack(losses).mean().item(), "eval_mine": len(losses)}

    recorder = Recorder()
    trainer = build(tmp_path, Own, recorder)
    trainer.train()
    assert recorder.steps("on_evaluate") == [2, 4]
    by_hand = trainer.evaluate()
    assert by_hand["eval_mine"] == 3
    assert recorder.details("on_evaluate", "metrics")[1]["eval_loss"] == by_hand["eval_loss"]
    assert recorder.steps("on_evaluate") == [2, 4, 4]


@pytest.mark.parametrize("announces", [True, False])
def test_on_evaluate_fires_once_per_evaluation(announces: bool, tmp_path: Path) -> None:
    class Own(Trainer):
        def _eval_loop(self) -> dict[str, Any]:
            metrics = super()._eval_loop()
            if announces:
                self._dispatch_event("on_evaluate", metrics=metrics)
            return metrics

    recorder = Recorder()
    trainer = build(tmp_path, Own, recorder)
    trainer.train()
    trainer.evaluate()
    assert recorder.steps("on_evaluate") == [2, 4, 4]


def test_prediction_step_override_is_used_everywhere(tmp_path: Path) -> None:
    calls: list[int] = []

    class Own(Trainer):
        def _prediction_step(self, input_dict: dict[str, Any], labels: Tensor) -> dict[str, Any]:
            calls.append(self.state.global_step)
            logits = self.model(**input_dict)
            mean = self.loss_fn(logits, labels)
            torch.testing.assert_close(mean, torch.nan_to_num(causal_mean(logits, labels)))
            assert self._distributed_loss(mean) is mean
            return {"loss": mean, "logits": logits, "labels": labels}

    shown: list[tuple[int, ...]] = []

    def show(logits: Tensor, labels: Tensor, **_: Any) -> None:
        shown.append((*logits.shape, *labels.shape))

    trainer = build(tmp_path / "own", Own, Recorder(on_prediction_step=show))
    trainer.train()
    assert calls == [2] * 3 + [4] * 3
    own = trainer.evaluate()["eval_loss"]
    assert calls[6:] == [4] * 3
    assert shown == [(1, 6, 32, 1, 6)] * 9
    plain = build(tmp_path / "plain")
    plain.train()
    assert own == pytest.approx(plain.evaluate()["eval_loss"])


def test_prediction_may_be_a_number_without_logits(tmp_path: Path) -> None:
    class Number(Trainer):
        def _prediction_step(self, input_dict: dict[str, Any], labels: Tensor) -> dict[str, Any]:
            return {"loss": 2.0}

    assert build(tmp_path, Number).evaluate()["eval_loss"] == 2.0


def test_gradient_norm_may_be_a_number_or_none(tmp_path: Path) -> None:
    class Number(Trainer):
        def _clip_grad_norm(self, max_grad_norm: Any, norm_type: float = 2.0) -> Any:
            return 1.25 if self.state.global_step < 2 else None

    recorder = Recorder()
    build(tmp_path, Number, recorder, logging_steps=1).train()
    assert [record.get("grad_norm") for _, record in recorder.logs][:2] == [1.25, 1.25]


def test_prediction_step_with_super_returns_logits_and_labels(tmp_path: Path) -> None:
    shapes: list[Any] = []

    class Looking(Trainer):
        def _prediction_step(self, input_dict: dict[str, Any], labels: Tensor) -> dict[str, Any]:
            prediction = super()._prediction_step(input_dict, labels)
            shapes.append((set(prediction), tuple(prediction["logits"].shape), prediction["labels"] is labels))
            return prediction

    build(tmp_path, Looking).evaluate()
    assert shapes == [({"loss", "logits", "labels"}, (1, 6, 32), True)] * 3


def test_evaluation_counts_targets_of_prepared_batches(tmp_path: Path) -> None:
    class Labelling(Trainer):
        """Trainer that makes labels from the inputs."""

        def _prepare_batch(self, batch: Any) -> Any:
            labels = batch["input_ids"].clone()
            labels[:, : int(batch["num_masked"])] = -100
            return {"input_ids": batch["input_ids"]}, labels

    data = [
        {"input_ids": one["input_ids"], "num_masked": torch.tensor(number)} for number, one in enumerate(SAMPLES[:4])
    ]
    trainer = build(tmp_path, Labelling)
    metrics = trainer.evaluate(data)
    counts = [5 - max(number - 1, 0) for number in range(4)]
    model = TokenModel()
    prepared = [Labelling._prepare_batch(trainer, {**one, "input_ids": one["input_ids"][None]}) for one in data]
    means = [causal_mean(model(**inputs), labels).item() for inputs, labels in prepared]
    expected = sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)
    assert metrics["eval_tokens"] == sum(counts)
    assert metrics["eval_loss"] == pytest.approx(expected)


def test_message_for_an_empty_evaluation_can_be_replaced(tmp_path: Path) -> None:
    class Short(Trainer):
        def _zero_eval_batches_message(self) -> str:
            return "nothing to evaluate"

    class Formatting(Trainer):
        def _format_zero_eval_batches_diagnostic(self, header: str, settings: Any, explanation: str) -> str:
            return f"{header[:14]} | {sorted(settings)[-1]} | {bool(explanation)}"

    with pytest.raises(RuntimeError, match=r"^nothing to evaluate$"):
        build(tmp_path, Short).evaluate([])
    with pytest.raises(RuntimeError, match=r"^The evaluation \| .* \| True$"):
        build(tmp_path, Formatting).evaluate([])
    assert build(tmp_path)._dispatch_eval_batches() is False


def test_evaluate_keeps_the_weights_and_prepares_once(tmp_path: Path) -> None:
    prepared: list[Any] = []

    class Noting(Trainer):
        def _prepare(self, train_dataset: Any, eval_dataset: Any) -> None:
            prepared.append((train_dataset, eval_dataset))
            super()._prepare(train_dataset, eval_dataset)

    trainer = build(tmp_path, Noting)
    before = weights(trainer.model)
    first = trainer.evaluate(SAMPLES[:2])
    assert prepared == [(None, SAMPLES[:2])]
    assert trainer.evaluate(SAMPLES[:2])["eval_loss"] == first["eval_loss"]
    assert len(prepared) == 1
    assert all(torch.equal(before[name], value) for name, value in weights(trainer.model).items())
    assert trainer.evaluate(SAMPLES[:3])["eval_loss"] != first["eval_loss"]


def test_loaded_checkpoint_can_be_evaluated_and_continued(tmp_path: Path) -> None:
    straight = build(tmp_path / "straight", save_total_limit=5)
    straight.train()
    path = str(tmp_path / "straight" / "checkpoints" / "checkpoint-2")
    recorder = Recorder()
    trainer = build(tmp_path / "other", Trainer, recorder)
    assert trainer.load_checkpoint(checkpoint_path=path) == path
    then = [one["eval_loss"] for one in straight.state.log_history if one.get("step") == 2 and "eval_loss" in one]
    assert [trainer.evaluate()["eval_loss"]] == then
    assert trainer.train().global_step == 4
    assert recorder.steps("on_step_end") == [3, 4]
    pairs = zip(weights(straight.model).values(), weights(trainer.model).values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


# --- model outputs


@pytest.mark.parametrize("kind", [dict, tuple])
def test_loss_and_logits_are_extracted_from_outputs(kind: Any) -> None:
    loss, logits = torch.tensor(1.0), torch.zeros(2, 3, 4)
    outputs = {"loss": loss, "logits": logits} if kind is dict else (loss, logits)
    assert loss_from_outputs(outputs) is loss
    assert logits_from_outputs(outputs) is logits
    assert loss_and_logits_from_outputs(outputs) == (loss, logits)
    assert logits_from_outputs(logits) is logits
