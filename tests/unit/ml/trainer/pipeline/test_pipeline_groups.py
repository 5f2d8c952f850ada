"""Parameter groups in pipelines: one schedule for all stages, even if a stage lacks a group."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR, StepLR

from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import assert_same_training, run
from tests.support.pipelines import llama, trainer_of, whole_result
from tests.support.ranks import outcomes_on_ranks, run_on_ranks
from tests.support.tiny_models import token_samples

BUILD = functools.partial(llama, 2)
SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 3,
    "save_total_limit": None,
    "lr_scheduler_type": "linear",
    "momentum": 0.9,
}
GROUPS: dict[str, Any] = {
    "head": {"regex": "lm_head", "config": {"lr": 0.02}},
    "embedding": {"regex": "embed_tokens", "config": {"lr": 0.2}},
    "nothing": {"regex": "no such name"},
}


def warm_up_and_cosine(optimizer: Any) -> Any:
    """Build a warm-up followed by a cosine schedule; the cosine schedule does not scale with the base rate."""
    parts = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, T_max=6, eta_min=0.01)]
    return SequentialLR(optimizer, parts, milestones=[2])


class Constant:
    """Learning-rate factor with a state that is saved for each group."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        return 1.0


SCHEDULES: dict[str, Any] = {"closed form": None, "in turn": warm_up_and_cosine}


def trainer_for(trainer_class: type[Trainer], output_dir: Path, schedule: str, **settings: Any) -> Trainer:
    options = {"optimizer_groups": GROUPS, "lr_scheduler_factory": SCHEDULES[schedule]}
    merged = {**SETTINGS, **settings}
    return trainer_of(trainer_class, output_dir, BUILD, token_samples(24), trainer_options=options, **merged)


def on_stages(output_dir: Path, schedule: str) -> Any:
    straight = whole_result(trainer_for(PipelineTrainer, output_dir / "straight", schedule))
    where = {"resume_from_checkpoint": str(output_dir / "straight/checkpoints/checkpoint-3")}
    resumed = whole_result(trainer_for(PipelineTrainer, output_dir / "resumed", schedule, **where))
    assert resumed.losses == straight.losses[3:]
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in straight.weights.items())
    moved = trainer_for(
        PipelineTrainer,
        output_dir / "moved",
        schedule,
        resume_from_checkpoint=str(output_dir / "one/checkpoints/checkpoint-3"),
    )
    result = whole_result(moved)
    assert moved.lr_scheduler.get_last_lr() == [group["lr"] for group in moved.optimizer.param_groups]
    told: list[Any] = [None] * 2
    torch.distributed.all_gather_object(told, moved.lr_scheduler.get_last_lr())
    assert told[0] == told[1]
    # Every rank has the same groups in the same order, some without parameters.
    assert [len(group["params"]) > 0 for group in moved.optimizer.param_groups].count(True) == 2
    assert len(moved.optimizer.param_groups) == 3
    return straight, result


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups_on_some_stages_train_resume_and_move_like_a_single_device(schedule: str, tmp_path: Path) -> None:
    one = run(trainer_for(Trainer, tmp_path / "one", schedule))
    straight, moved = run_on_ranks(on_stages, 2, tmp_path, schedule)[0]
    assert_same_training(straight, one, tolerance=1e-5)
    assert moved.losses == pytest.approx(one.losses[3:], rel=1e-5)
    back = trainer_for(
        Trainer, tmp_path / "back", schedule, resume_from_checkpoint=str(tmp_path / "straight/checkpoints/checkpoint-3")
    )
    assert run(back).losses == pytest.approx(one.losses[3:], rel=1e-5)


def groups_of_its_own(output_dir: Path, schedule: Any) -> None:
    def factory(named: Any) -> Any:
        head = [one for one in named if one[0] == "lm_head.weight"]
        rest = [one for one in named if one[0] != "lm_head.weight"]
        groups = [{"params": members, "lr": rate} for members, rate in ((head, 0.5), (rest, 0.1)) if members]
        return torch.optim.SGD(groups)

    options: dict[str, Any] = {"optimizer_factory": factory, "optimizer_cls_and_kwargs": None}
    # A schedule of closed form is accepted.
    for number, one in enumerate((None, schedule)):
        options["lr_scheduler_factory"] = one
        settings = {"max_steps": 1, "per_device_train_batch_size": 4, "lr_scheduler_type": "linear"}
        trainer_of(
            PipelineTrainer, output_dir / str(number), BUILD, token_samples(8), trainer_options=options, **settings
        ).train()


@pytest.mark.parametrize(
    "schedule",
    [functools.partial(StepLR, step_size=2), functools.partial(LambdaLR, lr_lambda=Constant())],
    ids=["StepLR", "LambdaLR"],
)
def test_schedule_unsuitable_for_all_stages_is_rejected(schedule: Any, tmp_path: Path) -> None:
    name = schedule.func.__name__
    for outcome in outcomes_on_ranks(groups_of_its_own, 2, tmp_path, schedule):
        assert f"different learning rates (rank 0: [0.1]; rank 1: [0.5, 0.1]), but {name}" in outcome.error_message
