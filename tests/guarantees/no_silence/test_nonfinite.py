"""Non-finite gradients: `nonfinite_grad` makes all ranks stop, skip the update or continue."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.retention import CheckpointInfo, LatestN, checkpoints_to_delete
from forgather.ml.distributed.environment import get_rank
from forgather.ml.trainer import (
    DDPTrainingArguments,
    HybridTrainer,
    NonFiniteError,
    PipelineTrainer,
    Trainer,
    TrainingArguments,
)
from forgather.ml.trainer.loop.nonfinite import GradientWatch, nonfinite_weights
from tests.support.data_parallel import ddp_trainer, fsdp2_trainer
from tests.support.pipelines import llama, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, TokenModel, quiet_trainer, saved_steps, token_samples, weights

BAD = 6
"""Number of the batch with a NaN loss, counted from 1."""


class Spoiling:
    """Loss that is NaN at some calls, on one rank."""

    def __init__(self, *bad: int, rank: int | None = None) -> None:
        self.bad = bad
        self.rank = rank
        self.calls = 0

    def num_targets(self, labels: Tensor) -> int:
        return labels.numel()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.calls += logits.requires_grad
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten().clamp(min=0))
        is_bad = self.calls in self.bad and (self.rank is None or self.rank == get_rank())
        return loss * math.nan if is_bad else loss


def trainer_with(output_dir: Path, *bad: int, model: nn.Module | None = None, **settings: Any) -> Trainer:
    options = {"compute_loss_func": Spoiling(*bad), **settings.pop("trainer_options", {})}
    defaults = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "steps", "logging_steps": 4}
    return quiet_trainer(
        output_dir,
        TokenModel() if model is None else model,
        token_samples(16),
        trainer_options=options,
        **{**defaults, **settings},
    )


def fused(**options: Any) -> dict[str, Any]:
    return {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.1, "fused": True, **options})}


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": None, "fuse_optim_with_backward": True}])
def test_nan_gradient_stops_training_by_default(tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = trainer_with(tmp_path, BAD, save_total_limit=1, **settings)
    with pytest.raises(
        NonFiniteError, match=rf"step {BAD} are not finite \(its loss: nan\).*checkpoint-4.*'skip'"
    ) as stop:
        trainer.train()
    error = stop.value
    names = [name for name, _ in TokenModel().named_parameters()]
    assert (error.step, error.rank, sorted(error.parameters)) == (BAD, 0, sorted(names))
    assert error.checkpoint == str(tmp_path / "checkpoints" / "checkpoint-4")
    assert saved_steps(tmp_path) == [4]


def test_error_names_the_parameters_with_nonfinite_gradients(tmp_path: Path) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.bad = nn.Linear(1, 2), nn.Linear(1, 2)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            spoiled = self.bad(x) * (math.inf if int(labels[0]) == 3 else 1.0)
            return {"loss": self.good(x).sum() + spoiled.sum()}

    data = [{"x": torch.ones(1), "labels": torch.tensor(number)} for number in range(6)]
    with pytest.raises(NonFiniteError) as stop:
        quiet_trainer(tmp_path, Half(), data, max_grad_norm=1.0).train()
    assert (stop.value.step, stop.value.parameters) == (4, ["bad.weight", "bad.bias"])
    assert stop.value.checkpoint is None and "no sound checkpoint" in str(stop.value)


@pytest.mark.parametrize("is_fused", [True, False])
def test_skip_omits_the_update_and_counts_it(tmp_path: Path, is_fused: bool) -> None:
    """The gradients of the skipped step have no effect on weights and moments."""
    options = fused(fused=is_fused)
    trainer = trainer_with(tmp_path / "a", BAD, nonfinite_grad="skip", trainer_options=options)
    output = trainer.train()
    logs = {record["step"]: record for record in trainer.state.log_history}
    assert logs[8]["skipped_steps"] == 1 and "skipped_steps" not in logs[4]
    assert math.isfinite(logs[8]["loss"]) and math.isfinite(output.metrics["train_loss"])
    others = [sample for number, sample in enumerate(token_samples(16), start=1) if number != BAD]
    straight = quiet_trainer(tmp_path / "b", TokenModel(), others, trainer_options={**options, **plain_loss()})
    straight.train()
    for name, weight in weights(straight.unwrapped_model()).items():
        assert torch.equal(weight, weights(trainer.unwrapped_model())[name])
    assert all(state["step"] == 15 for state in trainer.optimizer.state.values())


def plain_loss() -> dict[str, Any]:
    return {"compute_loss_func": Spoiling()}


def test_ten_skipped_steps_in_a_row_stop_even_across_a_resume(tmp_path: Path) -> None:
    bad = range(3, 17)
    with pytest.raises(NonFiniteError, match=r"last 10 steps, up to step 12.*'skip' skipped their updates") as stop:
        trainer_with(tmp_path / "a", *bad, nonfinite_grad="skip").train()
    assert stop.value.step == 12
    trainer_with(tmp_path / "b", *bad, nonfinite_grad="skip", max_steps=6, save_steps=6).train()
    with pytest.raises(NonFiniteError) as stop:
        trainer_with(tmp_path / "b", *range(1, 11), nonfinite_grad="skip", save_steps=6).train()
    assert stop.value.step == 12
    trainer_with(tmp_path / "c", *range(1, 10), *range(11, 16), nonfinite_grad="skip").train()


def test_interval_with_only_skipped_steps_has_no_loss(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, 5, 6, 7, 8, nonfinite_grad="skip")
    trainer.train()
    (record,) = [record for record in trainer.state.log_history if record["step"] == 8]
    assert record["skipped_steps"] == 4 and "loss" not in record


def test_ignore_continues_training_and_keeps_finite_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="forgather"):
        trainer = trainer_with(tmp_path, BAD, nonfinite_grad="ignore", save_total_limit=2)
        trainer.train()
    assert saved_steps(tmp_path) == [2, 4, 14, 16]
    (warning,) = [text for text in caplog.messages if "not finite" in text]
    assert "from step 6 on" in warning
    assert trainer.checkpoint_manager is not None
    assert trainer.checkpoint_manager.newest_sound_checkpoint() == str(tmp_path / "checkpoints" / "checkpoint-4")


def test_nonfinite_weights_are_not_saved(tmp_path: Path) -> None:
    class Breaking(Recorder):
        def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
            if state.global_step == 4:
                with torch.no_grad():
                    next(model.parameters()).view(-1)[0] = math.inf

    trainer = trainer_with(tmp_path)
    trainer.add_callback(Breaking())
    with pytest.raises(NonFiniteError, match=r"weights are not finite after step 4: .*checkpoint-2"):
        trainer.train()
    assert saved_steps(tmp_path) == [2]


def test_retention_prefers_checkpoints_with_finite_weights() -> None:
    from datetime import UTC, datetime

    infos = [CheckpointInfo(str(n), n, datetime(2020, 1, n, tzinfo=UTC), is_sound=n in (1, 2, 4)) for n in range(1, 8)]
    assert [one.path for one in checkpoints_to_delete(infos, LatestN(2))] == ["1", "3", "5"]
    assert checkpoints_to_delete(infos, LatestN(None)) == []


def test_nonfinite_gradients_stop_before_the_evaluation(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = trainer_with(
        tmp_path, BAD, eval_strategy="steps", eval_steps=1, trainer_options={"eval_dataset": token_samples(2)}
    )
    trainer.add_callback(recorder)
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert recorder.steps("on_evaluate") == [1, 2, 3, 4, 5]


def test_nonfinite_weights_are_found_in_all_dtypes() -> None:
    good = [torch.ones(3), torch.full((2,), 60000.0, dtype=torch.float16), torch.zeros(0), torch.ones(2).long()]
    bad = [torch.tensor([1.0, math.nan]), torch.tensor([-math.inf]).bfloat16(), torch.tensor([complex(0, math.nan)])]
    assert nonfinite_weights(good) == []
    assert [id(one) for one in nonfinite_weights([*good, *bad])] == [id(one) for one in bad]


def test_gradient_watch_counts_consecutive_nonfinite_norms() -> None:
    watch = GradientWatch("skip", has_loss_scale=False)
    assert watch.judge([math.nan] * 9 + [1.0] + [math.inf] * 9, 19) is None
    assert watch.judge([math.nan, 1.0], 21) == 20
    assert GradientWatch("ignore", has_loss_scale=False).judge([math.nan] * 99, 99) is None


def test_skip_is_rejected_where_it_cannot_work() -> None:
    for options in ({"nonfinite_grad": "raise"}, {"nonfinite_grad": "skip", "fuse_optim_with_backward": True}):
        with pytest.raises(ValueError, match="nonfinite_grad"):
            TrainingArguments(output_dir="x", max_grad_norm=None, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="post_local_sgd"):
        DDPTrainingArguments(output_dir="x", nonfinite_grad="skip", post_local_sgd={"enabled": True})  # type: ignore[arg-type]


# --- mixed_precision="fp16": GradScaler skips steps itself


def test_step_skipped_by_grad_scaler_does_not_count(tmp_path: Path) -> None:
    """The step is no reason to stop, does not advance the schedule, and is not in the mean loss."""
    settings: dict[str, Any] = {"lr_scheduler_type": "linear", "logging_steps": 1, "mixed_precision": "fp16"}
    trainer = trainer_with(tmp_path / "a", 3, 4, **settings)
    trainer.train()
    logs = {record["step"]: record for record in trainer.state.log_history if "learning_rate" in record}
    rates = [logs[step]["learning_rate"] for step in range(1, 17)]
    assert rates[1] == rates[2] == rates[3] > rates[4]
    assert rates[4:] == pytest.approx([0.1 * (1 - step / 16) for step in range(3, 15)])
    assert all("loss" not in logs[step] and logs[step]["skipped_steps"] == 1 for step in (3, 4))
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
    assert trainer.lr_scheduler.last_epoch == 14


def test_resumed_schedule_accounts_for_skipped_steps(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr_scheduler_type": "linear", "mixed_precision": "fp16", "save_steps": 8}
    whole = trainer_with(tmp_path / "a", 3, 4, **settings)
    whole.train()
    trainer_with(tmp_path / "b", 3, 4, **settings, max_steps=8).train()
    resumed = trainer_with(tmp_path / "b", **settings)
    resumed.train()
    assert resumed.lr_scheduler.last_epoch == whole.lr_scheduler.last_epoch == 14


def test_grad_scaler_that_skips_every_step_is_an_error(tmp_path: Path) -> None:
    data = token_samples(60)
    trainer = quiet_trainer(
        tmp_path,
        TokenModel(),
        data,
        mixed_precision="fp16",
        trainer_options={"compute_loss_func": Spoiling(*range(4, 99))},
    )
    with pytest.raises(NonFiniteError, match=r"last 50 steps, up to step 53.*GradScaler.*bf16"):
        trainer.train()


# --- multiple ranks


def _stop_together(output_dir: Path, kind: str, action: str) -> tuple[Any, ...]:
    settings: dict[str, Any] = {"nonfinite_grad": action, "save_strategy": "steps", "save_steps": 4}
    if kind in DATA_PARALLEL:
        options = {"compute_loss_func": Spoiling(3, rank=1), **fused()}
        build, more = DATA_PARALLEL[kind]
        trainer: Trainer = build(
            output_dir, TokenModel(), token_samples(24), trainer_options=options, max_grad_norm=1.0, **settings, **more
        )
    else:
        hybrid = {"hybrid": {"dp_size": 2}, "sharded": {"dp_size": 2, "dp_strategy": "shard"}}
        # Three micro-batches per step: the loss of step 6 is NaN on the last stage.
        options = {"compute_loss_func": Spoiling(11), **fused()}
        trainer = trainer_of(
            HybridTrainer if kind in hybrid else PipelineTrainer,
            output_dir,
            lambda: llama(4),
            token_samples(48),
            trainer_options=options,
            per_device_train_batch_size=2,
            n_microbatches=2,
            max_grad_norm=None,
            max_steps=10,
            **hybrid.get(kind, {}),
            **settings,
        )
    try:
        trainer.train()
    except NonFiniteError as error:
        return error.step, error.rank, error.parameters, error.checkpoint, trainer.state.global_step
    return trainer.state.global_step, {float(entry["step"]) for entry in trainer.optimizer.state.values()}


KINDS = pytest.mark.parametrize(
    ("kind", "world_size"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4), ("pipeline", 2), ("hybrid", 4), ("sharded", 4)]
)
DATA_PARALLEL: dict[str, tuple[Callable[..., Trainer], dict[str, Any]]] = {
    "ddp": (ddp_trainer, {}),
    "fsdp2": (fsdp2_trainer, {}),
    "hsdp": (fsdp2_trainer, {"fsdp2": {"replicate_size": 2}}),
}


@KINDS
def test_all_ranks_stop_at_the_same_step(tmp_path: Path, kind: str, world_size: int) -> None:
    results = run_on_ranks(_stop_together, world_size, tmp_path, kind, "stop")
    assert all(result == results[0] for result in results[1:])
    step, rank, parameters, checkpoint, stopped_at = results[0]
    assert step == (3 if kind in DATA_PARALLEL else 6) and step <= stopped_at <= step + 2
    assert parameters and rank == (world_size - 1 if kind in ("ddp", "fsdp2", "pipeline") else rank)
    assert checkpoint == (None if kind in DATA_PARALLEL else str(tmp_path / "checkpoints" / "checkpoint-4"))


@KINDS
def test_all_ranks_skip_the_same_update(tmp_path: Path, kind: str, world_size: int) -> None:
    results = run_on_ranks(_stop_together, world_size, tmp_path, kind, "skip")
    assert len({step for step, _ in results}) == 1
    for step, updates in results:
        assert updates == {float(step - 1)}


class SpoiledRow(torch.autograd.Function):
    """Identity with NaN gradients at some positions."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, positions: Tensor) -> Tensor:
        context.save_for_backward(positions)
        return hidden.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (positions,) = context.saved_tensors
        return gradient.masked_fill(positions[..., None], math.nan), None


class OneBadRow(TokenModel):
    """Model with a NaN gradient in the last row of the embedding only, from the third step on."""

    num_calls = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.num_calls += torch.is_grad_enabled()
        bad = (input_ids == self.embedding.num_embeddings - 1) & (self.num_calls > 2)
        logits: Tensor = self.head(torch.tanh(SpoiledRow.apply(self.embedding(input_ids), bad)))
        return logits


def _stop_at_row(output_dir: Path) -> tuple[Any, ...]:
    samples = token_samples(24)
    for sample in samples:
        sample["input_ids"][2] = sample["labels"][2] = 31
    trainer = fsdp2_trainer(output_dir, OneBadRow, samples, per_device_train_batch_size=2)
    with pytest.raises(NonFiniteError) as stop:
        trainer.train()
    return stop.value.step, stop.value.rank, stop.value.parameters, str(stop.value)


def test_bad_row_in_the_shard_of_one_rank_is_named_on_all_ranks(tmp_path: Path) -> None:
    results = run_on_ranks(_stop_at_row, 2, tmp_path)
    assert results[0] == results[1]
    step, rank, parameters, _ = results[0]
    assert (step, rank) == (3, 1)
    assert [getattr(one, "name", one) for one in parameters] == ["embedding.weight"]
