"""Saved loop state: all values are checked before any is loaded."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forgather.ml.checkpoint.encoding.codec import decode_state, encode_state
from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.loop.cadence import Cadence
from forgather.ml.trainer.loop.loop_state import LoopState
from forgather.ml.trainer.loop.metrics import IntervalMetrics
from forgather.ml.trainer.loop.nonfinite import GradientWatch
from forgather.ml.trainer.setup.step_plan import StepPlan
from forgather.ml.trainer.step_loss.model_loss import ModelLoss
from forgather.ml.trainer.trainer import TrainerState, TrainingArguments
from forgather.ml.trainer.trainer_types import TrainerControl
from tests.support.wrong_values import AMOUNT, COUNT, FLAG, INTEGER, NUMBER, assert_refuses, replaced, with_none


def loop_state(output_dir: Path) -> LoopState:
    state = TrainerState(
        logging_steps=1,
        eval_steps=1,
        train_batch_size=1,
        max_steps=9,
        num_train_epochs=1,
        max_eval_steps=1,
        epoch_train_steps=5,
    )
    args, control = TrainingArguments(output_dir=str(output_dir)), TrainerControl()
    return LoopState(
        checkpoints=str(output_dir / "checkpoints"),
        state=state,
        control=control,
        cadence=Cadence(args, state, control, StepPlan(args, None), evaluates=False),
        amp=AMPContext(None),
        loss=ModelLoss(None, token_weighted=True),
        watch=GradientWatch("skip", has_loss_scale=False),
        interval=IntervalMetrics(),
    )


def advanced(output_dir: Path) -> LoopState:
    one = loop_state(output_dir)
    one.state.epoch, one.state.global_step, one.state.epoch_start_step, one.state.epoch_train_steps = 1.4, 7, -3, 8
    one.state.raw_epoch, one.state.best_metric = 1, math.inf
    one.state.num_input_tokens_seen, one.state.total_flos = 900, 2**80
    one.state.best_model_checkpoint = str(output_dir / "checkpoints" / "checkpoint-3")
    one.state.log_history = [{"loss": 2.5, "own": torch.ones(2), "step": 3}, {"note": "by hand"}]
    one.best_saved_metric, one.evaluated_step, one.evaluation_is_pending = 0.5, 3, True
    one.control.should_epoch_stop = np.bool_(True)
    one.interval.add(torch.tensor(1.0), 3, torch.tensor(0.5), 4, 2)
    one.interval.settle(lambda sums: sums)
    one.watch.judge([math.nan, math.nan], 7)
    one.totals.add(3.5, 30.0, 40, 4)
    one.loss.load_state_dict({"own": True, "first_counts": False, "unit": "rows", "is_sum": True})
    return one


def saved(one: LoopState) -> dict[str, Any]:
    return decode_state(encode_state(one.state_dict()))


def test_state_round_trips(tmp_path: Path) -> None:
    before, after = advanced(tmp_path), loop_state(tmp_path)
    after.load_state_dict(saved(before))
    assert repr(saved(after)) == repr(saved(before))
    assert after.state.best_model_checkpoint == before.state.best_model_checkpoint
    assert after.control.should_epoch_stop is True and after.saved_step == 7


ACCEPTED: dict[str, Any] = {
    "state": (),
    "state.epoch": AMOUNT,
    "state.global_step": COUNT,
    "state.raw_epoch": COUNT,
    "state.epoch_start_step": INTEGER,
    "state.epoch_train_steps": COUNT,
    "state.log_history": ("list",),
    "state.log_history.0": ("dict",),
    "state.log_history.0.step": COUNT,
    "state.best_metric": with_none(NUMBER),
    "state.num_input_tokens_seen": COUNT,
    "state.total_flos": AMOUNT,
    "best_model_checkpoint": with_none(["text"]),
    "interval": (),
    "interval.loss_sum": NUMBER,
    "interval.targets": AMOUNT,
    "interval.tokens": COUNT,
    "interval.samples": COUNT,
    "interval.num_steps": COUNT,
    "interval.norms": (),
    "totals": (),
    "totals.loss_sum": NUMBER,
    "totals.targets": AMOUNT,
    "totals.tokens": COUNT,
    "totals.samples": COUNT,
    "best_saved_metric": with_none(NUMBER),
    "should_epoch_stop": FLAG,
    "evaluated_step": INTEGER,
    "evaluation_is_pending": FLAG,
    "loss": ("none",),
    "loss.own": FLAG,
    "loss.first_counts": FLAG,
    "loss.unit": (),
    "loss.is_sum": FLAG,
}


@pytest.mark.parametrize("path", ACCEPTED)
def test_wrong_value_is_rejected_by_name_and_changes_nothing(tmp_path: Path, path: str) -> None:
    assert_refuses(loop_state(tmp_path), saved(advanced(tmp_path)), "trainer", {path: ACCEPTED[path]})


def test_epoch_without_steps_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointLoadError, match=r"trainer\.state\.epoch_train_steps.*1 or more"):
        loop_state(tmp_path).check_state_dict(replaced(saved(advanced(tmp_path)), "state.epoch_train_steps", 0))


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "..", ".hidden", "a/b", ""])
def test_best_checkpoint_outside_the_run_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointLoadError, match=r"trainer\.best_model_checkpoint.*plain file name"):
        loop_state(tmp_path).load_state_dict({**saved(advanced(tmp_path)), "best_model_checkpoint": name})


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    state, one = saved(advanced(tmp_path)), loop_state(tmp_path)
    for part in (state, state["state"], state["interval"], state["totals"]):
        part.update(max_steps=1, add=1, is_world_process_zero=False, __class__="x")
    one.load_state_dict(state)
    assert one.state.max_steps == 9 and one.state.is_world_process_zero is True
    assert callable(one.totals.add) and callable(one.interval._settled.add)


def test_older_checkpoint_without_newer_keys_is_accepted(tmp_path: Path) -> None:
    state, one = saved(advanced(tmp_path)), loop_state(tmp_path)
    one.best_saved_metric, one.control.should_epoch_stop = 9.0, True
    del state["best_saved_metric"], state["should_epoch_stop"], state["state"]["epoch_train_steps"], state["loss"]
    one.load_state_dict(state)
    assert one.best_saved_metric is None and one.control.should_epoch_stop is False
    assert one.state.epoch_train_steps == 5 and one.state.global_step == 7


@pytest.mark.parametrize("path", ["evaluated_step", "interval", "amp", "state.global_step", "totals.tokens"])
def test_missing_required_keys_are_rejected(tmp_path: Path, path: str) -> None:
    state = saved(advanced(tmp_path))
    *outer, last = path.split(".")
    del (state[outer[0]] if outer else state)[last]
    with pytest.raises(CheckpointLoadError, match=f"the key '{last}'"):
        loop_state(tmp_path).load_state_dict(state)
