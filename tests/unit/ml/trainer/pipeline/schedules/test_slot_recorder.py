"""Measured pipeline steps: each schedule records exactly the slots of its plan, and training is not changed."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forgather.ml.trainer.callbacks import RunRecorder
from forgather.ml.trainer.callbacks.support.record_file import read_lines
from forgather.ml.trainer.pipeline.schedules import SCHEDULES
from forgather.tools.report import read_run
from tests.support.pipelines import llama, pipeline_trainer
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import token_samples

NAMES = [traits.name for traits in SCHEDULES.values()]


def _train(folder: Path, names: list[str]) -> list[dict[str, list[float]]]:
    losses = []
    for name in names:
        found = {}
        for at_step in (2, 0):
            trainer = pipeline_trainer(
                folder / f"{name}-{at_step}",
                lambda: llama(4),
                token_samples(24),
                RunRecorder(),
                schedule=name,
                per_device_train_batch_size=8,
                n_microbatches=4,
                max_steps=3,
                logging_strategy="steps",
                logging_steps=1,
                record_schedule_step=at_step,
            )
            trainer.train()
            found[str(at_step)] = [one["loss"] for one in trainer.state.log_history if "loss" in one]
        losses.append(found)
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    path = tmp_path_factory.mktemp("schedules")
    return path, run_on_ranks(_train, 2, path, NAMES, timeout=240.0)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_slots_are_the_planned_ones(folder: tuple[Path, list[Any]], name: str) -> None:
    (step,) = read_run(str(folder[0] / f"{name}-2")).pipelines
    assert step.step == 2 and step.planned is not None and len(step.measured) == 1
    for planned, measured in zip(step.planned.slots, step.measured[0].slots, strict=True):
        assert Counter(_kinds(planned)) == Counter(_kinds(measured))
        ends = [slot.end for slot in measured]
        assert ends == sorted(ends) and all(slot.end >= slot.begin >= 0 for slot in measured)
    assert 0 <= step.measured[0].bubble_share < 1 and step.slowest_stage in step.busy_by_stage


def _kinds(slots: Any) -> list[tuple[int, str, int]]:
    return [(slot.stage, slot.work, slot.microbatch) for slot in slots]


def test_recording_changes_no_loss_and_can_be_turned_off(folder: tuple[Path, list[Any]]) -> None:
    for name, losses in zip(NAMES, folder[1][0], strict=True):
        assert losses["2"] == losses["0"] and len(losses["0"]) == 3
        kinds = [line["kind"] for line in read_lines(str(folder[0] / f"{name}-0" / "run_record.jsonl"))]
        assert "schedule" not in kinds and "log" in kinds


def test_memory_of_every_rank_is_recorded(folder: tuple[Path, list[Any]]) -> None:
    lines = read_lines(str(folder[0] / "gpipe-2" / "run_record.jsonl"))
    memory = [line["memory"] for line in lines if line["kind"] == "log" and "memory" in line]
    assert memory and all(len(one) == 2 and min(one) > 2**20 for one in memory)
