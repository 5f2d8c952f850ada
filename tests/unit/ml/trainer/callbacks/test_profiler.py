"""Profiler traces of a few steps."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from forgather.ml.trainer.callbacks import ProfilerCallback
from tests.unit.ml.trainer.callbacks.run import Run


def train(run: Run, num_steps: int) -> None:
    run.send("on_train_begin")
    for _ in range(num_steps):
        torch.ones(10, 10) @ torch.ones(10, 10)
        run.step()
    run.send("on_train_end")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_one_trace_per_cycle_with_the_operations(tmp_path: Path) -> None:
    train(Run(tmp_path, ProfilerCallback(wait=1, warmup=1, active=2, repeat=2)), 10)
    traces = sorted((tmp_path / "profile").iterdir())
    assert [path.name for path in traces] == ["rank0_step4.json.gz", "rank0_step8.json.gz"]
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::matmul" for event in events)


def test_run_that_ends_early_stops_the_profiler(tmp_path: Path) -> None:
    train(Run(tmp_path, ProfilerCallback(wait=1, warmup=1, active=5)), 4)
    train(Run(tmp_path, ProfilerCallback(wait=0, warmup=1, active=1)), 3)


def test_other_ranks_are_not_profiled(tmp_path: Path) -> None:
    train(Run(tmp_path, ProfilerCallback(), is_world_process_zero=False), 8)
    assert not list(tmp_path.iterdir())


def test_empty_cycle_is_rejected() -> None:
    with pytest.raises(ValueError, match="active=0"):
        ProfilerCallback(active=0)
