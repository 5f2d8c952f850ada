"""TensorBoard logger: every step once, also after a resume."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.callbacks import TBLogger
from tests.support.wrong_values import assert_refuses
from tests.unit.ml.trainer.callbacks.run import Run


def start(output_dir: Path, state_dict: dict[str, Any] | None = None, **attributes: Any) -> Run:
    callback = TBLogger()
    if state_dict is not None:
        callback.load_state_dict(json.loads(json.dumps(state_dict)))
    run = Run(output_dir, callback, **attributes)
    run.send("on_train_begin")
    return run


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def only_run(output_dir: Path) -> Path:
    (directory,) = (output_dir / "runs").iterdir()
    return directory


def test_records_are_written_under_train_and_eval(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.train([3.0, 2.0])
    run.evaluate(eval_loss=2.5)
    run.log(loss=1.0, peak_mem_allocated=[10, 20])
    directory = only_run(tmp_path)
    assert scalars(directory, "train/loss") == [(1, 3.0), (2, 2.0), (2, 1.0)]
    assert scalars(directory, "eval/loss") == [(2, 2.5)]
    assert scalars(directory, "train/peak_mem_allocated/1") == [(2, 20.0)]


def test_resumed_run_continues_in_its_directory_without_duplicates(tmp_path: Path) -> None:
    run = start(tmp_path / "old")
    run.train([5.0, 4.0])
    state = run.callbacks[0].state_dict()
    run.train([3.0, 2.0])
    # The checkpoint's directory may be moved. Event files are ordered by the second in their names.
    (tmp_path / "old").rename(tmp_path / "new")
    time.sleep(1.1)
    resumed = start(tmp_path / "new", state, global_step=2)
    resumed.train([30.0])
    resumed.send("on_train_end")
    assert scalars(only_run(tmp_path / "new"), "train/loss") == [(1, 5.0), (2, 4.0), (3, 30.0)]


def test_logging_dir_of_the_user_is_used(tmp_path: Path) -> None:
    run = Run(tmp_path / "out", TBLogger())
    run.args.logging_dir = str(tmp_path / "boards")
    run.send("on_train_begin")
    run.train([1.0])
    assert scalars(tmp_path / "boards", "train/loss") == [(1, 1.0)]
    assert not (tmp_path / "out").exists()


def test_generated_logging_dir_does_not_split_a_resumed_run(tmp_path: Path) -> None:
    first = Run(tmp_path, TBLogger())
    first.args.logging_dir = str(tmp_path / "runs" / "monday")
    first.send("on_train_begin")
    second_callback = TBLogger()
    second_callback.load_state_dict(first.callbacks[0].state_dict())
    second = Run(tmp_path, second_callback, global_step=2)
    second.args.logging_dir = str(tmp_path / "runs" / "tuesday")
    second.send("on_train_begin")
    assert only_run(tmp_path).name == "monday"


def test_records_are_written_after_the_end_of_training(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.train([1.0])
    run.send("on_train_end")
    run.evaluate(eval_loss=0.5)
    assert scalars(only_run(tmp_path), "eval/loss") == [(1, 0.5)]


def test_only_rank_zero_writes(tmp_path: Path) -> None:
    run = start(tmp_path, is_world_process_zero=False)
    run.train([1.0])
    assert not list(tmp_path.iterdir())


STATE = {"directory": "runs/2024-01-01T00-00-00_host"}


def test_malformed_state_is_rejected_by_name() -> None:
    callback = TBLogger()
    assert_refuses(callback, STATE, "callbacks.TBLogger", {"directory": ["none"]})
    with pytest.raises(CheckpointLoadError, match=r"callbacks\.TBLogger in the checkpoint.*train without the callback"):
        callback.load_state_dict([])  # type: ignore[arg-type]
    callback.load_state_dict({**STATE, "added": object()})
    assert callback.state_dict() == STATE


OUTSIDE = ["../x", "/tmp/x", "runs/../../x", "runs", "runs/", "checkpoints/x", "runs//x", "runs/\0"]


@pytest.mark.parametrize("directory", OUTSIDE)
def test_directory_outside_the_run_is_rejected(directory: str) -> None:
    with pytest.raises(CheckpointLoadError, match=r"callbacks\.TBLogger\.directory"):
        TBLogger().load_state_dict({"directory": directory})
