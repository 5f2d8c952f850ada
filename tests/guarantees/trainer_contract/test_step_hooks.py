"""Step hooks on one device: overrides without super() train exactly like the default."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forgather.ml.loss import LinearCrossEntropyLoss, RescaleLoss
from forgather.ml.trainer.trainer import Trainer
from tests.guarantees.trainer_contract.step_hooks import (
    STEP_HOOKS,
    ByRange,
    MaskingCollator,
    OwnBatches,
    OwnLossModel,
    Printed,
    Rescaled,
    RescaledOwnLoss,
    UntilSync,
    Unweighed,
    causal_mean,
    with_hooks,
)
from tests.support.data_parallel import Result, assert_same_training, run
from tests.support.tiny_models import TokenModel, quiet_trainer, token_samples

# Nine batches and windows of four: the last window of an epoch is short.
SETTINGS: dict[str, Any] = {
    "momentum": 0.9,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_train_epochs": 2,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
}


def train(output_dir: Path, trainer_class: Any = Trainer, model: Any = None, **settings: Any) -> Result:
    trainer = quiet_trainer(
        output_dir, model or TokenModel(), token_samples(17), trainer_class=trainer_class, **{**SETTINGS, **settings}
    )
    return run(trainer)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Result:
    result = train(tmp_path_factory.mktemp("expected"))
    assert len(result.losses) == 6
    return result


@pytest.mark.parametrize("hook", [one for one in STEP_HOOKS if one is not ByRange])
def test_override_trains_like_the_default(hook: type, tmp_path: Path, expected: Result) -> None:
    result = train(tmp_path, with_hooks(Trainer, hook))
    assert_same_training(result, expected)
    assert result.metrics["total_tokens"] == expected.metrics["total_tokens"]


def test_overrides_can_be_combined(tmp_path: Path, expected: Result) -> None:
    assert_same_training(train(tmp_path, with_hooks(Trainer, UntilSync, Printed)), expected)


@pytest.mark.parametrize("hook", [Printed, Rescaled])
def test_override_keeps_the_mean_of_means(hook: type, tmp_path: Path) -> None:
    settings = {"token_weighted_loss": False, "trainer_options": {"compute_loss_func": zero_safe}}
    expected = train(tmp_path / "expected", **settings)
    assert_same_training(train(tmp_path / "own", with_hooks(Trainer, hook), **settings), expected)


def zero_safe(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nan_to_num(causal_mean(logits, labels))


@pytest.mark.parametrize("hook", [Printed, Rescaled])
def test_micro_batch_without_targets_has_no_weight(hook: type, tmp_path: Path) -> None:
    expected = train(tmp_path / "expected", per_device_train_batch_size=1)
    assert_same_training(train(tmp_path / "own", with_hooks(Trainer, hook), per_device_train_batch_size=1), expected)


# --- windows


def test_step_with_a_fixed_range_drops_the_short_last_window(
    tmp_path: Path, expected: Result, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result = train(tmp_path, with_hooks(Trainer, ByRange), num_train_epochs=1)
    assert result.metrics["step"] == 2
    assert result.losses == expected.losses[:2]
    (message,) = (record.getMessage() for record in caplog.records if "StopIteration" in record.getMessage())
    assert "after 1 of 1 micro-batches" in message and "gradients are dropped" in message


def test_dropped_gradients_do_not_enter_the_next_epoch(tmp_path: Path) -> None:
    dropped = train(tmp_path / "dropped", with_hooks(Trainer, ByRange), lr_scheduler_type="constant")
    whole = train(tmp_path / "whole", dataloader_drop_last=True, lr_scheduler_type="constant")
    assert_same_training(dropped, whole)


def test_micro_batch_index_and_sync_flag_follow_the_window(tmp_path: Path) -> None:
    seen: list[tuple[int | None, bool, int]] = []

    class Watching(Trainer):
        def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
            fetched = getattr(self.train_dataloader, "num_fetched", 0)
            seen.append((self.gradient_accumulation_step, self._should_sync_gradients(), fetched))
            return super()._forward_backward_step(input_dict, labels)

    train(tmp_path, Watching, num_train_epochs=1)
    numbers = [number for number, _, _ in seen]
    assert numbers == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert [is_last for _, is_last, _ in seen] == [False, False, False, True] * 2 + [True]


def test_step_with_too_few_micro_batches_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class OnlyFirst(Trainer):
        def _train_step(self, data_iterator: Any) -> Any:
            input_dict, labels = self._prepare_batch(next(data_iterator))
            loss = self._forward_backward_step(input_dict, labels)
            self.optimizer.step()
            self.lr_scheduler.step()
            self.optimizer.zero_grad()
            return loss, None, 0

    with caplog.at_level(logging.WARNING):
        result = train(tmp_path, OnlyFirst, num_train_epochs=1, logging_strategy="no")
    assert result.metrics["step"] == 3
    assert any("took 1 of the 4 micro-batches" in record.getMessage() for record in caplog.records)


def test_step_with_too_many_micro_batches_is_an_error(tmp_path: Path) -> None:
    class Greedy(Trainer):
        def _train_step(self, data_iterator: Any) -> Any:
            for batch in data_iterator:
                self._forward_backward_step(*self._prepare_batch(batch))

    with pytest.raises(RuntimeError, match="micro-batch 5 of a step, but with gradient_accumulation_steps=4"):
        train(tmp_path, Greedy)


@pytest.mark.parametrize(("result", "error"), [(None, TypeError), ((1.0, None, 0), TypeError)])
def test_step_with_a_wrong_return_value_is_an_error(result: Any, error: Any, tmp_path: Path) -> None:
    class Wrong(Trainer):
        def _train_step(self, data_iterator: Any) -> Any:
            super()._train_step(data_iterator)
            return result

    with pytest.raises(error, match=r"Wrong\._train_step returned .*\(loss, grad_norm, tokens\)"):
        train(tmp_path, Wrong)


def test_unsynchronised_gradients_are_an_error(tmp_path: Path) -> None:
    class Never(Trainer):
        def _should_sync_gradients(self) -> bool:
            return False

    model = TokenModel()
    before = model.head.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"Never\._should_sync_gradients\(\) is False"):
        train(tmp_path, Never, model)
    assert torch.equal(before, model.head.weight)


# --- batches


def test_override_prepares_each_batch_once(tmp_path: Path) -> None:
    expected = train(tmp_path / "expected", trainer_options={"data_collator": MaskingCollator()})
    own = with_hooks(Trainer, OwnBatches)
    result = train(tmp_path / "own", own)
    assert_same_training(result, expected)
    assert own.prepared == [int(one["input_ids"][0]) for one in token_samples(17)[::2]] * 2


def test_step_receives_the_prepared_batch(tmp_path: Path, expected: Result) -> None:
    handed: list[Any] = []

    class Noting(Trainer):
        def _prepare_batch(self, batch: Any) -> Any:
            handed.append(super()._prepare_batch(batch))
            return handed[-1]

        def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
            assert any(input_dict is inputs and labels is own for inputs, own in handed)
            return super()._forward_backward_step(input_dict, labels)

    assert_same_training(train(tmp_path, Noting), expected)
    assert len(handed) == 18


# --- the loss


def test_loss_function_is_a_rescale_loss(tmp_path: Path) -> None:
    seen: list[tuple[float, float, float]] = []

    class Comparing(Trainer):
        def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
            logits = self.model(**input_dict)
            with self.loss_fn.no_rescale():
                plain = self.loss_fn(logits, labels)
            loss = self.loss_fn(logits, labels)
            if not torch.isnan(mean := causal_mean(logits, labels)):
                seen.append((plain.item(), mean.item(), loss.item()))
            self._backward(loss)
            return loss.detach()

        def _prediction_step(self, input_dict: dict[str, Any], labels: Any) -> dict[str, Any]:
            logits = self.model(**input_dict)
            loss = self.loss_fn(logits, labels)
            torch.testing.assert_close(loss, causal_mean(logits, labels))
            return {"loss": loss, "logits": logits, "labels": labels}

    samples = token_samples(17)
    trainer = quiet_trainer(tmp_path, TokenModel(), samples, trainer_class=Comparing, **SETTINGS)
    run(trainer)
    assert isinstance(trainer.loss_fn, RescaleLoss)
    assert all(plain == pytest.approx(mean) for plain, mean, _ in seen)
    assert sum(loss < 0.9 * plain for plain, _, loss in seen) > len(seen) / 2
    expected = quiet_trainer(tmp_path / "expected", trainer.model, [])
    counted = [one for one in samples if (one["labels"][1:] >= 0).any()]
    assert trainer.evaluate(counted)["eval_loss"] == pytest.approx(expected.evaluate(counted)["eval_loss"])


def test_step_without_loss_function_and_rescale_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(tmp_path, with_hooks(Trainer, Unweighed))
    messages = [record.getMessage() for record in caplog.records if "self.loss_fn.rescale" in record.getMessage()]
    assert len(messages) == 1


def test_single_micro_batch_needs_no_rescale(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(tmp_path, with_hooks(Trainer, Unweighed), gradient_accumulation_steps=1)
    assert not [record for record in caplog.records if "rescale" in record.getMessage()]


def test_later_step_without_rescale_warns_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Changing(with_hooks(Trainer, Unweighed)):  # type: ignore[misc]
        def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
            if self.state.global_step == 0:
                return Printed._forward_backward_step(self, input_dict, labels)  # type: ignore[arg-type]
            return super()._forward_backward_step(input_dict, labels)  # type: ignore[no-any-return]

    with caplog.at_level(logging.WARNING):
        train(tmp_path, Changing)
    assert len([record for record in caplog.records if "self.loss_fn.rescale" in record.getMessage()]) == 1


def classes(num_samples: int) -> list[dict[str, Tensor]]:
    return [{**one, "labels": torch.tensor(number % 4)} for number, one in enumerate(token_samples(num_samples))]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_calling_loss_fn_for_a_model_with_its_own_loss_is_an_error(accumulation: int, tmp_path: Path) -> None:
    settings = {**SETTINGS, "gradient_accumulation_steps": accumulation}
    own = with_hooks(Trainer, Printed)
    trainer = quiet_trainer(tmp_path, OwnLossModel(), classes(17), trainer_class=own, **settings)
    with pytest.raises(RuntimeError, match=r"trains on the model's own loss.*self\.loss_fn\.rescale"):
        trainer.train()


def test_model_loss_can_be_rescaled(tmp_path: Path) -> None:
    def result(trainer_class: Any, name: str) -> Result:
        data = classes(17)
        return run(quiet_trainer(tmp_path / name, OwnLossModel(), data, trainer_class=trainer_class, **SETTINGS))

    assert_same_training(result(with_hooks(Trainer, RescaledOwnLoss), "own"), result(Trainer, "expected"))


class HiddenModel(TokenModel):
    """Model that can return hidden states instead of logits."""

    can_return_hidden_states = True

    def forward(self, input_ids: Tensor, return_hidden_states: bool = False) -> Tensor:
        hidden = torch.tanh(self.embedding(input_ids))
        return hidden if return_hidden_states else self.head(hidden)  # type: ignore[no-any-return]

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def test_fused_loss_works_in_the_printed_step(tmp_path: Path, expected: Result) -> None:
    options = {"fused_loss_factory": LinearCrossEntropyLoss}
    result = train(tmp_path, with_hooks(Trainer, Printed), HiddenModel(), trainer_options=options)
    assert_same_training(result, expected, tolerance=1e-5)


def test_passed_rescale_loss_is_not_weighted_twice(tmp_path: Path, expected: Result) -> None:
    def result(loss: Any, name: str) -> Result:
        return train(tmp_path / name, with_hooks(Trainer, Printed), trainer_options={"loss_fn": loss})

    assert_same_training(result(causal_mean, "plain"), expected)
    assert_same_training(result(RescaleLoss(causal_mean, 1.0), "wrapped"), expected)
    doubled = result(RescaleLoss(causal_mean, 2.0), "doubled")
    assert doubled.losses[0] == pytest.approx(2 * expected.losses[0])


def test_counted_tokens_affect_only_statistics(tmp_path: Path, expected: Result) -> None:
    class Counting(Trainer):
        def _count_batch_tokens(self, input_dict: dict[str, Any], labels: Any) -> int:
            return 1000

    result = train(tmp_path, Counting)
    assert_same_training(result, expected)
    assert result.metrics["total_tokens"] == 18_000
