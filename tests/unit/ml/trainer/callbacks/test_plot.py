"""Loss plot of a run."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.callbacks import PlotCallback
from forgather.ml.trainer.callbacks.plot import Curve, draw_png, smooth
from tests.support.wrong_values import COUNT, NUMBER, assert_refuses
from tests.unit.ml.trainer.callbacks.run import Run


def test_plot_exists_after_training(tmp_path: Path) -> None:
    run = Run(tmp_path / "out", PlotCallback())
    run.send("on_train_begin")
    run.train([3.0, 2.0, math.nan, 1.0])
    run.evaluate(eval_loss=2.0)
    run.send("on_train_end")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["training.png"]
    height, width, _ = imread(tmp_path / "out" / "training.png").shape
    assert width > height > 600


def test_plot_is_drawn_at_most_every_min_seconds(tmp_path: Path) -> None:
    run = Run(tmp_path, PlotCallback(min_seconds=1000))
    run.send("on_train_begin")
    run.train([1.0] * 20)
    assert not (tmp_path / "training.png").exists()
    run.send("on_train_end")
    assert (tmp_path / "training.png").exists()


def test_plot_is_updated_during_training(tmp_path: Path) -> None:
    run = Run(tmp_path, PlotCallback(min_seconds=0))
    run.send("on_train_begin")
    run.train([1.0])
    assert (tmp_path / "training.png").exists()


def test_history_survives_a_resume(tmp_path: Path) -> None:
    before = PlotCallback(min_seconds=1000)
    run = Run(tmp_path, before)
    run.train([3.0, 2.0])
    run.evaluate(eval_loss=2.5)
    after = PlotCallback(min_seconds=1000)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    resumed = Run(tmp_path, after, global_step=2)
    resumed.send("on_train_begin")
    resumed.train([1.0])
    assert after.state_dict()["loss"] == {"steps": [1, 2, 3], "values": [3.0, 2.0, 1.0]}
    assert after.state_dict()["eval_loss"] == {"steps": [2], "values": [2.5]}


def test_history_is_taken_from_the_trainer_if_there_is_no_own_state(tmp_path: Path) -> None:
    history = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.0},
        {"step": 2, "eval_loss": 2.5},
        {"step": 3, "loss": 9.0},
    ]
    callback = PlotCallback(min_seconds=1000)
    run = Run(tmp_path, callback, global_step=2, log_history=history)
    run.send("on_train_begin")
    assert callback.state_dict()["loss"]["values"] == [3.0, 2.0]
    assert callback.state_dict()["eval_loss"]["values"] == [2.5]


def test_fresh_run_forgets_the_previous_history(tmp_path: Path) -> None:
    callback = PlotCallback(min_seconds=1000)
    Run(tmp_path, callback).train([3.0, 2.0])
    Run(tmp_path, callback).send("on_train_begin")
    assert callback.state_dict()["loss"]["steps"] == []


def test_long_curves_are_thinned_and_keep_both_ends() -> None:
    curve = Curve()
    for step in range(1, 50_001):
        curve.add(step, float(step))
    assert len(curve.steps) <= 4000
    assert curve.steps[0] == 1 and curve.steps[-1] == 50_000
    assert curve.steps == sorted(curve.steps)


def test_smoothing_does_not_lag() -> None:
    line = [float(value) for value in range(100)]
    assert smooth(line) == pytest.approx(line)
    assert smooth([*line[:50], math.nan, *line[51:]]) == pytest.approx(line, abs=0.6)
    assert smooth([5.0, 1.0, 3.0]) == [5.0, 1.0, 3.0]
    assert smooth([]) == []


def test_run_without_records_can_be_drawn() -> None:
    assert imread(io.BytesIO(draw_png({}))).ndim == 3


def test_pyplot_is_not_used() -> None:
    program = (
        "import sys\nfrom forgather.ml.trainer.callbacks.plot import draw_png\n"
        "draw_png({})\nprint('matplotlib.pyplot' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_only_rank_zero_draws(tmp_path: Path) -> None:
    run = Run(tmp_path, PlotCallback(min_seconds=0), is_world_process_zero=False)
    run.send("on_train_begin")
    run.train([1.0])
    run.send("on_train_end")
    assert not list(tmp_path.iterdir())


STATE = {"loss": {"steps": [1, 2], "values": [0.5, math.inf]}}


def test_malformed_state_is_rejected_by_name() -> None:
    callback = PlotCallback()
    assert_refuses(
        callback,
        STATE,
        "callbacks.PlotCallback",
        {
            "loss": (),
            "loss.steps.0": COUNT,
            "loss.values": (),
            "loss.values.1": NUMBER,
        },
    )
    with pytest.raises(
        CheckpointLoadError, match=r"callbacks\.PlotCallback in the checkpoint.*train without the callback"
    ):
        callback.load_state_dict([])  # type: ignore[arg-type]
    callback.load_state_dict({**STATE, "added": object()})
    assert callback.state_dict() == STATE


def test_curve_with_unequal_or_too_many_values_is_rejected() -> None:
    too_long = {"steps": [1] * 4001, "values": [1.0] * 4001}
    for curve in ({"steps": [1, 2], "values": [0.5]}, {"steps": "text", "values": []}, too_long):
        with pytest.raises(CheckpointLoadError, match=r"callbacks\.PlotCallback\.loss\.(values|steps)"):
            PlotCallback().load_state_dict({"loss": curve})


def test_non_numeric_history_records_are_not_drawn(tmp_path: Path) -> None:
    callback = PlotCallback(min_seconds=1000)
    history = [{"loss": "text", "step": 1}, {"loss": [1], "step": 2}, {"loss": 2.0, "step": 3}]
    Run(tmp_path, callback, log_history=history, global_step=3).send("on_train_begin")
    assert callback.state_dict() == {"loss": {"steps": [3], "values": [2.0]}}
