"""Trainer misuse: each mistake raises an error that names it, and existing checkpoints stay."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError
from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.trainer import Trainer
from tests.support.tiny_models import (
    ScalarModel,
    Stream,
    TokenModel,
    quiet_trainer,
    saved_steps,
    scalars,
    token_samples,
)

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1.0}


@pytest.fixture
def earlier_run(tmp_path: Path) -> Path:
    """Output directory with the checkpoints of a successful run, which ended with the weight 4."""
    quiet_trainer(tmp_path, ScalarModel(10.0), scalars(1, 2, 3), **SAVING).train()
    assert saved_steps(tmp_path) == [2, 3]
    return tmp_path


def assert_nothing_lost(output_dir: Path) -> None:
    """Assert that the earlier run can still be resumed from its end."""
    model = ScalarModel(0.0)
    output = quiet_trainer(output_dir, model, scalars(1, 2, 3), max_steps=3, **SAVING).train()
    assert (output.global_step, model.weight.item()) == (3, 4.0)
    assert saved_steps(output_dir) == [2, 3]


@pytest.mark.parametrize("dataset", [[], Stream([])], ids=["map-style", "stream"])
def test_empty_training_set_is_rejected(earlier_run: Path, dataset: Any) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"is empty|had no batches"):
        quiet_trainer(earlier_run, ScalarModel(), dataset, resume_from_checkpoint=False, **SAVING).train()
    assert_nothing_lost(earlier_run)


def test_training_set_smaller_than_a_dropped_batch_is_rejected(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "dataloader_drop_last": True}
    with pytest.raises(ValueError, match=r"3 samples, fewer than one batch of 4.*dataloader_drop_last=True"):
        quiet_trainer(tmp_path, ScalarModel(), scalars(1, 2, 3), **settings).train()


def test_dropped_window_longer_than_the_epoch_is_an_error(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 4, "dataloader_drop_last": True}
    with pytest.raises(RuntimeError, match=r"had no batches.*gradient_accumulation_steps=4"):
        quiet_trainer(tmp_path, ScalarModel(), scalars(1, 2, 3), **settings).train()


def test_train_without_a_training_set_is_rejected(earlier_run: Path) -> None:
    with pytest.raises(ValueError, match=r"train\(\) needs a train_dataset"):
        quiet_trainer(earlier_run, ScalarModel(), None, **SAVING).train()
    assert_nothing_lost(earlier_run)


class Silent(nn.Module):
    """Model with neither logits nor a loss in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"hidden": input_ids * self.weight.sum()}


@pytest.mark.parametrize(
    ("model", "with_labels", "words"),
    [
        (Silent(), True, ["Silent computes no loss from labels", "compute_loss_func"]),
        (Silent(), False, ["Silent got a batch without 'labels'", "Put 'labels' into the batches"]),
        (TokenModel(), False, ["TokenModel got a batch without 'labels'"]),
    ],
)
def test_training_without_a_loss_is_rejected(
    earlier_run: Path, model: nn.Module, with_labels: bool, words: list[str]
) -> None:
    samples = token_samples(4)
    if not with_labels:
        samples = [{"input_ids": sample["input_ids"]} for sample in samples]
    trainer = quiet_trainer(earlier_run, model, samples, resume_from_checkpoint=False, **SAVING)
    with pytest.raises(ValueError, match="There is no loss to train on") as error:
        trainer.train()
    assert all(word in str(error.value) for word in words), error.value
    assert_nothing_lost(earlier_run)


def test_batch_without_labels_for_the_loss_function_is_rejected(tmp_path: Path) -> None:
    samples = [{"input_ids": sample["input_ids"]} for sample in token_samples(2)]
    options: dict[str, Any] = {"compute_loss_func": lambda logits, labels: logits.mean()}
    with pytest.raises(ValueError, match="a batch without 'labels', which the loss function needs"):
        quiet_trainer(tmp_path, TokenModel(), samples, trainer_options=options).train()


def test_later_batch_without_labels_is_rejected(tmp_path: Path) -> None:
    samples = token_samples(2)
    del samples[1]["labels"]
    with pytest.raises(ValueError, match="There is no loss to train on: TokenModel got a batch without 'labels'"):
        quiet_trainer(tmp_path, TokenModel(), samples).train()


def test_evaluation_without_batches_shows_the_settings(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path, ScalarModel(), None, per_device_eval_batch_size=8, dataloader_drop_last=True, max_eval_steps=5
    )
    with pytest.raises(RuntimeError) as error:
        trainer.evaluate(scalars(1, 2, 3))
    rows = [line.split() for line in str(error.value).splitlines()]
    for row in (["per_device_eval_batch_size", "8"], ["dataloader_drop_last", "True"], ["max_eval_steps", "5"]):
        assert row in rows
    assert ["samples", "in", "the", "dataset", "3"] in rows
    assert "What to change" in str(error.value)


def test_evaluation_of_an_empty_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="had no batches"):
        quiet_trainer(tmp_path, ScalarModel(), None).evaluate([])


@pytest.mark.parametrize(
    "settings", [{"eval_strategy": "steps"}, {"eval_strategy": "epoch"}, {"eval_on_save": True}], ids=str
)
def test_evaluation_settings_without_a_dataset_are_rejected(tmp_path: Path, settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=f"^{name}=.*needs an eval_dataset"):
        quiet_trainer(tmp_path, ScalarModel(), scalars(1), **settings)


def test_evaluate_without_a_dataset_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs an eval_dataset"):
        quiet_trainer(tmp_path, ScalarModel(), scalars(1)).evaluate()


def test_evaluation_request_of_a_callback_needs_a_dataset(tmp_path: Path) -> None:
    class Asks:
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_evaluate = True

    with pytest.raises(ValueError, match="needs an eval_dataset"):
        quiet_trainer(tmp_path, ScalarModel(), scalars(1), Asks()).train()


@pytest.mark.parametrize("missing", ["nowhere", "checkpoints/checkpoint-7"])
def test_missing_checkpoint_is_an_error(earlier_run: Path, missing: str) -> None:
    model = ScalarModel(7.0)
    trainer = quiet_trainer(earlier_run, model, scalars(1), **SAVING)
    with pytest.raises(CheckpointError, match=missing):
        trainer.train(resume_from_checkpoint=str(earlier_run / missing))
    assert model.weight.item() == 7.0
    assert_nothing_lost(earlier_run)


def test_model_without_trainable_parameters_is_rejected(earlier_run: Path) -> None:
    model = ScalarModel()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="No parameter of the model requires a gradient"):
        quiet_trainer(earlier_run, model, scalars(1), **SAVING).train()
    assert_nothing_lost(earlier_run)


def test_trainer_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Trainer needs a model, or model_init"):
        Trainer(args={"output_dir": str(tmp_path)}, default_callbacks=False)


def test_error_in_a_step_keeps_the_checkpoints(earlier_run: Path) -> None:
    class Fails:
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise OSError("the disk of the callback is full")

    trainer = quiet_trainer(earlier_run, ScalarModel(), scalars(1, 2, 3), Fails(), max_steps=9, **SAVING)
    with pytest.raises(OSError, match="the disk of the callback is full"):
        trainer.train()
    assert_nothing_lost(earlier_run)


def test_unknown_best_model_metric_is_rejected(earlier_run: Path) -> None:
    trainer = quiet_trainer(
        earlier_run,
        ScalarModel(),
        scalars(1, 2),
        trainer_options={"eval_dataset": scalars(1)},
        resume_from_checkpoint=False,
        preserve_best_model=True,
        best_model_metric="accuracy",
        eval_strategy="steps",
        eval_steps=1,
        **SAVING,
    )
    with pytest.raises(ValueError, match=r"No metric 'accuracy'.*eval_loss"):
        trainer.train()
    assert_nothing_lost(earlier_run)


@pytest.mark.parametrize("loss", [None, CausalLoss()], ids=["default loss", "given loss"])
def test_batch_must_be_a_mapping(tmp_path: Path, loss: Any) -> None:
    pairs = [(torch.ones(3, dtype=torch.long), torch.ones(3, dtype=torch.long))]
    options: dict[str, Any] = {"compute_loss_func": loss}
    trainer = quiet_trainer(tmp_path, TokenModel(), pairs, trainer_options=options)
    for run in (trainer.train, lambda: trainer.evaluate(pairs)):
        with pytest.raises(ValueError, match=r"A batch is a list, but must be a mapping.*pass a data_collator"):
            run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fused_loss_factory": "LinearCrossEntropyLoss"},
            "fused_loss_factory='LinearCrossEntropyLoss' cannot be used",
        ),
        ({"optimizer_factory": 3}, "optimizer_factory=3 cannot be used: it must be a function"),
        ({"optimizer_groups": ["bias"]}, r"optimizer_groups=\['bias'\] cannot be used: pass a mapping"),
        ({"optimizer_groups": {"a": {"regex": "("}}}, "is not a regular expression"),
    ],
)
def test_factories_and_groups_of_the_wrong_type_are_rejected(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        quiet_trainer(tmp_path, ScalarModel(), scalars(1), trainer_options=options)


def test_unknown_schedule_options_are_rejected(tmp_path: Path) -> None:
    settings = {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"power": 2}}
    with pytest.raises(ValueError, match=r"lr_scheduler_type='linear' cannot be made with .*'power': 2"):
        quiet_trainer(tmp_path, ScalarModel(), scalars(1), **settings).train()


def run_with_groups(output_dir: Path, max_steps: int, groups: Any, schedule: Any, **others: Any) -> Trainer:
    settings = {**SAVING, "lr_scheduler_type": "constant", "max_steps": max_steps, **others}
    options = {"lr_scheduler_factory": schedule, "optimizer_groups": groups}
    trainer = quiet_trainer(output_dir, TokenModel(), token_samples(8), trainer_options=options, **settings)
    trainer.train()
    return trainer


def test_schedule_with_changed_parameter_groups_works_or_is_rejected(tmp_path: Path) -> None:
    groups = {"embedding": {"regex": "embedding", "config": {"lr": 0.5}}}
    for kind in ("constant", "cosine_with_min_lr"):
        settings = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": {"min_lr_rate": 1.0} if "min" in kind else None}
        run_with_groups(tmp_path / kind, 2, None, None, **settings)
        resumed = run_with_groups(tmp_path / kind, 4, groups, None, **settings)
        assert [group["lr"] for group in resumed.optimizer.param_groups] == [0.5, 1.0]

    halved = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    for name, schedule in {"StepLR": halved, "SequentialLR": warm_up_and_halve}.items():
        run_with_groups(tmp_path / name, 2, None, schedule)
        with pytest.raises(
            CheckpointError, match=f"{name} schedule .* has 1 parameter groups, but the optimizer has 2 now"
        ):
            run_with_groups(tmp_path / name, 4, groups, schedule)


def warm_up_and_halve(optimizer: Any) -> Any:
    schedules = torch.optim.lr_scheduler
    parts = [schedules.LinearLR(optimizer, 0.25, total_iters=2), schedules.StepLR(optimizer, 1, 0.5)]
    return schedules.SequentialLR(optimizer, parts, milestones=[2])


def test_changed_learning_rate_takes_effect_in_composed_schedules(tmp_path: Path) -> None:
    straight = run_with_groups(tmp_path / "straight", 4, None, warm_up_and_halve, learning_rate=0.5)
    run_with_groups(tmp_path / "changed", 2, None, warm_up_and_halve, learning_rate=1.0)
    changed = run_with_groups(tmp_path / "changed", 4, None, warm_up_and_halve, learning_rate=0.5)
    assert changed.lr_scheduler.get_last_lr() == straight.lr_scheduler.get_last_lr() == [0.125]


class Rates:
    """Callback that records the learning rate of every step."""

    def __init__(self) -> None:
        self.noted: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
        self.noted.append(optimizer.param_groups[0]["lr"])


def test_schedule_resumes_after_a_change_of_batch_size(tmp_path: Path) -> None:
    def trainer(noted: Rates, batch_size: int, **settings: Any) -> Trainer:
        warm_up = functools.partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=2)
        options = {"lr_scheduler_factory": warm_up}
        merged = {**SAVING, "per_device_train_batch_size": batch_size, "num_train_epochs": 2, **settings}
        return quiet_trainer(tmp_path, TokenModel(), token_samples(8), noted, trainer_options=options, **merged)

    before, after = Rates(), Rates()
    trainer(before, 4, max_steps=2).train()
    trainer(after, 2).train()
    assert before.noted == pytest.approx([0.1, 0.55])
    assert after.noted == pytest.approx([1.0] * len(after.noted)) and len(after.noted) == 4


def test_samples_of_different_lengths_need_a_collator(tmp_path: Path) -> None:
    samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2]}]
    trainer = quiet_trainer(tmp_path, TokenModel(), samples, per_device_train_batch_size=2)
    with pytest.raises(ValueError, match=r"different lengths of 'input_ids': 2, 3\..*pass a data_collator"):
        trainer.train()


class DeeperModel(TokenModel):
    """`TokenModel` with one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.extra(torch.tanh(self.embedding(input_ids))))
        return logits


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: TokenModel(width=4), "belongs to a parameter of shape"),
        (DeeperModel, "1 tensors of the model are not in the checkpoint: extra.weight"),
    ],
    ids=["another width", "one more layer"],
)
def test_resume_of_another_model_is_an_error_and_not_called_damage(
    model: Callable[[], nn.Module], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "momentum": 0.9}
    quiet_trainer(tmp_path, TokenModel(), token_samples(8), **settings).train()
    resumed = quiet_trainer(tmp_path, model(), token_samples(8), **settings | {"max_steps": 4})
    with pytest.raises(CheckpointLoadError, match=message):
        resumed.train()
    assert "damaged" not in caplog.text and saved_steps(tmp_path) == [1, 2]
