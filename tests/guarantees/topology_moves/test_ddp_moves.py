"""Data position at another world size: no sample is repeated or skipped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import ddp_trainer, environment
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCAB_SIZE, Stream, TokenModel, quiet_trainer, sgd

NUM_SAMPLES = 45
STEPS_BEFORE = 3
BATCH = 2


class Identified:
    """Dataset with the sample index in the first two tokens."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.tensor([*divmod(index, VOCAB_SIZE), index % 7, 3])
        return {"input_ids": tokens, "labels": tokens.clone()}


class Noting(Trainer):
    """Trainer that records the samples of each micro-batch; an empty batch has none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.samples: list[list[int]] = []

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        batch = self.window.batches[self.window.number]
        ids = (
            [] if isinstance(batch, EmptyBatch) else (batch["input_ids"] @ torch.tensor([VOCAB_SIZE, 1, 0, 0])).tolist()
        )
        self.samples.append(ids)
        return super()._forward_backward_step(input_dict, labels)


class NotingDDP(Noting, DDPTrainer):
    pass


def train(output_dir: Path, max_steps: int, **settings: Any) -> tuple[list[list[int]], int]:
    parallel = torch.distributed.is_initialized()
    options: dict[str, Any] = {"distributed_env": environment()} if parallel else {}
    trainer = quiet_trainer(
        output_dir,
        TokenModel(),
        Identified(),
        trainer_class=NotingDDP if parallel else Noting,
        trainer_options={"optimizer_cls_and_kwargs": sgd(0.1, 0.9), **options},
        **{
            "shuffle": True,
            "per_device_train_batch_size": BATCH,
            "max_steps": max_steps,
            "num_train_epochs": 1,
            "save_strategy": "steps",
            **settings,
        },
    )
    trainer.train()
    assert isinstance(trainer, Noting)
    return trainer.samples, trainer.state.global_step


def in_order(results: list[tuple[list[list[int]], int]]) -> list[int]:
    """Return the samples of all ranks in single-process order."""
    per_rank = [samples for samples, _ in results]
    assert len({len(samples) for samples in per_rank}) == 1, "every rank takes part in every step"
    return [sample for batches in zip(*per_rank, strict=True) for batch in batches for sample in batch]


def run(world_size: int, output_dir: Path, max_steps: int, **settings: Any) -> list[int]:
    if world_size == 1:
        return in_order([train(output_dir, max_steps, **settings)])
    return in_order(run_on_ranks(_train, world_size, output_dir, max_steps, settings))


def _train(output_dir: Path, max_steps: int, settings: dict[str, Any]) -> tuple[list[list[int]], int]:
    return train(output_dir, max_steps, **settings)


@pytest.fixture(scope="module")
def whole_order(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    order = run(1, tmp_path_factory.mktemp("whole"), -1)
    assert sorted(order) == list(range(NUM_SAMPLES)) != order
    return order


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (2, 4), (1, 2)])
def test_dispatched_run_resumes_with_another_world_size(
    before: int, after: int, whole_order: list[int], tmp_path: Path
) -> None:
    first = run(before, tmp_path, STEPS_BEFORE)
    assert first == whole_order[: STEPS_BEFORE * BATCH * before]
    rest = run(after, tmp_path, -1)
    assert first + rest == whole_order


def test_second_epoch_has_another_order(whole_order: list[int], tmp_path: Path) -> None:
    first = run(2, tmp_path, STEPS_BEFORE)
    rest = run(4, tmp_path, -1, num_train_epochs=2)
    both = first + rest
    assert both[:NUM_SAMPLES] == whole_order
    assert sorted(both[NUM_SAMPLES:]) == list(range(NUM_SAMPLES))
    assert both[NUM_SAMPLES:] != whole_order


@pytest.mark.parametrize(
    "after", [{"dispatch_batches": False}, {"dispatch_batches": False, "dataloader_num_workers": 2}]
)
def test_sharded_run_resumes_a_dispatched_run_in_order(
    after: dict[str, Any], whole_order: list[int], tmp_path: Path
) -> None:
    """A global position also works for sharded reading, because both follow one order."""
    first = run(2, tmp_path, STEPS_BEFORE)
    assert first + run(2, tmp_path, -1, **after) == whole_order


def test_per_rank_positions_are_rejected_at_another_world_size(tmp_path: Path) -> None:
    run(2, tmp_path, STEPS_BEFORE, dispatch_batches=False)
    for message in run_on_ranks(_refused, 4, tmp_path):
        for part in (
            "'dataset'",
            "per_rank",
            "2 ranks",
            'skip_checkpoint_components=["dataset"]',
            "dispatch_batches=True",
        ):
            assert part in message
    assert run(4, tmp_path, STEPS_BEFORE + 1, dispatch_batches=False, skip_checkpoint_components=["dataset"])


def _refused(output_dir: Path) -> str:
    with pytest.raises(CheckpointLoadError) as refusal:
        train(output_dir, -1, dispatch_batches=False)
    return str(refusal.value)


def _train_on_streams(output_dir: Path, dispatches: bool) -> str | None:
    trainer = ddp_trainer(
        output_dir,
        TokenModel(),
        Stream([Identified()[index] for index in range(environment().rank, NUM_SAMPLES, 2)]),
        dispatch_batches=dispatches,
        per_device_train_batch_size=BATCH,
        save_strategy="steps",
        max_steps=STEPS_BEFORE if dispatches else STEPS_BEFORE + 1,
    )
    if dispatches:
        trainer.train()
        return None
    with pytest.raises(CheckpointLoadError) as refusal:
        trainer.train()
    return str(refusal.value)


def test_dispatched_stream_position_is_rejected_by_sharded_streams(tmp_path: Path) -> None:
    run_on_ranks(_train_on_streams, 2, tmp_path, True)
    for message in run_on_ranks(_train_on_streams, 2, tmp_path, False):
        assert "part 0 of 1" in message and "of 2" in message and "skip_checkpoint_components" in message
