"""Trainers inside Ray Train: they train as without Ray, and go on exactly after lost workers and nodes.

`make test-ray` installs Ray and runs these tests.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray: make test-ray")

from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from safetensors.torch import load_file

from forgather.ml.trainer.callbacks import RayReportCallback
from tests.guarantees.elastic.test_lost_nodes import notes, samples_by_step
from tests.guarantees.ray.ray_jobs import KINDS, NUM_STEPS, POLL_SECONDS, SAVE_STEPS, train, train_on_rank, two_nodes
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import saved_steps

SECONDS = 180
TOLERANCE = 1e-6
HELD_STEP = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        with two_nodes() as cluster:
            yield cluster


def fit(folder: Path, kind: str, num_workers: Any = None, max_failures: int = 0, **settings: Any) -> Result:
    """Run a job of Ray with its storage in `ray/` and the output directory in `out/`."""
    checkpoints = settings.pop("checkpoints", CheckpointConfig())
    trainer = TorchTrainer(
        train,
        train_loop_config={"kind": kind, "output_dir": str(folder / "out"), **settings},
        scaling_config=ScalingConfig(num_workers=num_workers or KINDS[kind][1], elastic_resize_monitor_interval_s=2),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=max_failures),
            checkpoint_config=checkpoints,
        ),
    )
    return trainer.fit()


def beside(work: Callable[[], None]) -> threading.Thread:
    """Start work that disturbs a job while `fit` waits for it in the main thread."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def wait_for_held(folder: Path, size: int) -> int:
    """Return the process id of the worker that waits at its step."""
    path, deadline = folder / f"held-{size}", time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"no worker of {size} waits"
        time.sleep(POLL_SECONDS)
    return int(path.read_text())


def release(folder: Path, size: int) -> None:
    (folder / f"released-{size}").touch()


def state_files(folder: Path, step: int = NUM_STEPS) -> dict[str, bytes]:
    """Return the files of a checkpoint that contain tensors: model, optimizer and random state."""
    checkpoint = folder / "out" / "checkpoints" / f"checkpoint-{step}"
    kept = (path for path in checkpoint.rglob("*") if path.suffix in (".safetensors", ".pt"))
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in kept}


@pytest.fixture(scope="module")
def straight(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Folder and result of a DDP job on two workers that was not disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, fit(folder, "ddp")


def assert_as_without_ray(folder: Path, kind: str, plain: Path) -> None:
    if KINDS[kind][1] == 1:
        train_on_rank(kind, str(plain / "out"))
    else:
        run_on_ranks(train_on_rank, KINDS[kind][1], kind, str(plain / "out"))
    files = state_files(folder)
    assert len(files) > 1 and files == state_files(plain)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ddp"])
def test_trainer_trains_bit_equal_inside_ray(cluster: Any, kind: str, tmp_path: Path) -> None:
    result = fit(tmp_path / "ray", kind)
    assert result.metrics is not None and result.metrics["step"] == NUM_STEPS
    assert_as_without_ray(tmp_path / "ray", kind, tmp_path / "plain")


def test_ddp_trains_bit_equal_inside_ray(straight: tuple[Path, Result], tmp_path: Path) -> None:
    assert {(note["rank"], note["size"]) for note in notes(straight[0])} == {(0, 2), (1, 2)}
    assert_as_without_ray(straight[0], "ddp", tmp_path)


def test_job_resumes_exactly_after_a_killed_worker(straight: tuple[Path, Result], tmp_path: Path) -> None:
    def kill_worker() -> None:
        os.kill(wait_for_held(tmp_path, 2), signal.SIGKILL)
        release(tmp_path, 2)

    killer = beside(kill_worker)
    result = fit(tmp_path, "ddp", max_failures=1, hold={2: HELD_STEP})
    killer.join()
    assert result.error is None and result.metrics is not None and result.metrics["step"] == NUM_STEPS
    # Each process writes a file. The second attempt starts at the last save before the kill, step 5.
    first_steps = [json.loads(path.read_text().splitlines()[0])["step"] for path in tmp_path.glob("notes/*.jsonl")]
    assert sorted(first_steps) == [0, 0, SAVE_STEPS, SAVE_STEPS]
    assert state_files(tmp_path) == state_files(straight[0])
    assert samples_by_step(tmp_path) == samples_by_step(straight[0])


def test_elastic_job_loses_a_node_and_gets_one_back(
    cluster: Any, straight: tuple[Path, Result], tmp_path: Path
) -> None:
    def move() -> None:
        wait_for_held(tmp_path, 2)
        (node,) = cluster.worker_nodes
        cluster.remove_node(node, allow_graceful=False)
        release(tmp_path, 2)
        wait_for_held(tmp_path, 1)
        cluster.add_node(num_cpus=1)

    mover = beside(move)
    result = fit(tmp_path, "ddp", num_workers=(1, 2), max_failures=2, hold={2: HELD_STEP, 1: 2 * HELD_STEP})
    mover.join()
    assert result.error is None and result.metrics is not None and result.metrics["step"] == NUM_STEPS
    steps = {size: {note["step"] for note in notes(tmp_path) if note["size"] == size} for size in (1, 2)}
    # Two workers, one from the save at step 5, and two from the save at step 15.
    assert steps[1] == set(range(SAVE_STEPS, 2 * HELD_STEP)) and NUM_STEPS - 1 in steps[2]
    assert samples_by_step(tmp_path) == samples_by_step(straight[0])
    weights, expected = (
        load_file(one / f"out/checkpoints/checkpoint-{NUM_STEPS}/model.safetensors") for one in (tmp_path, straight[0])
    )
    for name, tensor in weights.items():
        assert (tensor - expected[name]).norm() <= TOLERANCE * tensor.norm(), name
