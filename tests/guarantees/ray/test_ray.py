"""Trainers inside Ray Train: they train as without Ray, and go on exactly after lost workers and nodes.

`make test-ray` installs Ray and runs these tests.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="needs Ray: make test-ray")

from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer
from safetensors.torch import load_file

from forgather.ml.trainer.callbacks import RayReportCallback
from forgather.ml.trainer.callbacks.ray_report import REFERENCE_FILE_NAME
from tests.guarantees.elastic.test_lost_nodes import notes, samples_by_step
from tests.guarantees.ray.ray_jobs import (
    KINDS,
    NUM_STEPS,
    POLL_SECONDS,
    SAVE_STEPS,
    build_trainer,
    train,
    train_on_rank,
    two_nodes,
)
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import saved_steps

SECONDS = 180
TOLERANCE = 1e-6
HELD_STEP = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        # Ray may try once to start as many workers as before, if a worker fails before Ray misses its node.
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "30")
        with two_nodes() as cluster:
            yield cluster


def fit(folder: Path, kind: str, num_workers: Any = None, max_failures: int = 0, **settings: Any) -> Result:
    """Run a job of Ray with its storage in `ray/` and the output directory in `out/`."""
    checkpoints, callbacks = settings.pop("checkpoints", CheckpointConfig()), settings.pop("callbacks", [])
    trainer = TorchTrainer(
        train,
        train_loop_config={"kind": kind, "output_dir": str(folder / "out"), **settings},
        scaling_config=ScalingConfig(
            num_workers=KINDS[kind][1] if num_workers is None else num_workers, elastic_resize_monitor_interval_s=2
        ),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=max_failures),
            checkpoint_config=checkpoints,
            callbacks=callbacks,
        ),
    )
    return trainer.fit()


class NotesReports(UserCallback):
    """Callback of Ray's controller that writes the step of each report, and whether it had a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([metrics[0]["step"], checkpoint is not None]) + "\n")


@contextlib.contextmanager
def running(*words: Any, **settings: Any) -> Iterator[Future[Result]]:
    """Run a job in a thread; the block disturbs it, since Ray starts nodes only in the main thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(fit, *words, **settings)


def wait_for_held(folder: Path, size: int, job: Future[Result]) -> int:
    """Return the process id of the worker that waits at its step."""
    path, deadline = folder / f"held-{size}", time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline and not job.done(), f"no worker of {size} waits"
        time.sleep(POLL_SECONDS)
    return int(path.read_text())


def release(folder: Path, size: int) -> None:
    (folder / f"released-{size}").touch()


def state_files(folder: Path, step: int = NUM_STEPS) -> dict[str, bytes]:
    """Return the state of a checkpoint by file: model, optimizer, random state, counters."""
    checkpoint = folder / "out" / "checkpoints" / f"checkpoint-{step}"
    kept = (path for path in checkpoint.rglob("*") if path.suffix in (".safetensors", ".pt"))
    return {str(path.relative_to(checkpoint)): _state(path) for path in kept}


def _state(path: Path) -> bytes:
    # The bytes of counters differ after a resume: pickle stores a repeated string once if it is the same object.
    return repr(torch.load(path)).encode() if path.name == "trainer_state.pt" else path.read_bytes()


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
    with running(tmp_path, "ddp", max_failures=1, hold={2: HELD_STEP}) as job:
        os.kill(wait_for_held(tmp_path, 2, job), signal.SIGKILL)
        release(tmp_path, 2)
        result = job.result(SECONDS)
    assert result.error is None and result.metrics is not None and result.metrics["step"] == NUM_STEPS
    # Each process writes a file. The second attempt starts at the last save before the kill, step 5.
    first_steps = [json.loads(path.read_text().splitlines()[0])["step"] for path in tmp_path.glob("notes/*.jsonl")]
    assert sorted(first_steps) == [0, 0, SAVE_STEPS, SAVE_STEPS]
    assert state_files(tmp_path) == state_files(straight[0])
    assert samples_by_step(tmp_path) == samples_by_step(straight[0])


def test_elastic_job_loses_a_node_and_gets_one_back(
    cluster: Any, straight: tuple[Path, Result], tmp_path: Path
) -> None:
    hold = {2: HELD_STEP, 1: 2 * HELD_STEP}
    with running(tmp_path, "ddp", num_workers=(1, 2), max_failures=2, hold=hold) as job:
        wait_for_held(tmp_path, 2, job)
        (node,) = cluster.worker_nodes
        cluster.remove_node(node, allow_graceful=False)
        release(tmp_path, 2)
        wait_for_held(tmp_path, 1, job)
        cluster.add_node(num_cpus=1)
        result = job.result(SECONDS)
    assert result.error is None and result.metrics is not None and result.metrics["step"] == NUM_STEPS
    steps = {size: {note["step"] for note in notes(tmp_path) if note["size"] == size} for size in (1, 2)}
    # Two workers, one from the save at step 5, and two from the save at step 15. The worker of the lost node may live for
    # some steps more, until the save at step 10.
    first = min(steps[1])
    assert first in (SAVE_STEPS, 2 * SAVE_STEPS)
    assert steps[1] == set(range(first, 2 * HELD_STEP)) and NUM_STEPS - 1 in steps[2]
    assert samples_by_step(tmp_path) == samples_by_step(straight[0])
    weights, expected = (
        load_file(one / f"out/checkpoints/checkpoint-{NUM_STEPS}/model.safetensors") for one in (tmp_path, straight[0])
    )
    for name, tensor in weights.items():
        assert (tensor - expected[name]).norm() <= TOLERANCE * tensor.norm(), name


def test_result_has_metrics_and_refers_to_checkpoints(straight: tuple[Path, Result]) -> None:
    folder, result = straight
    newest = folder / "out" / "checkpoints" / f"checkpoint-{NUM_STEPS}"
    assert result.metrics is not None and result.metrics["checkpoint_path"] == str(newest)
    assert result.metrics["train_loss"] > 0 and result.metrics["step"] == NUM_STEPS
    assert result.checkpoint is not None and os.listdir(result.checkpoint.path) == [REFERENCE_FILE_NAME]
    reference = Path(result.checkpoint.path, REFERENCE_FILE_NAME)
    assert json.loads(reference.read_text()) == {"checkpoint_path": str(newest)}
    # The last report, at the end of training, has the metrics of the whole run.
    steps = [metrics["step"] for _, metrics in result.best_checkpoints]
    assert steps == [*range(SAVE_STEPS, NUM_STEPS, SAVE_STEPS), NUM_STEPS, NUM_STEPS]


def test_copies_resume_and_retention_of_ray_keeps_own_checkpoints(cluster: Any, tmp_path: Path) -> None:
    reports = tmp_path / "reports.jsonl"
    result = fit(
        tmp_path,
        "single",
        report={"copy_checkpoints": True, "report_logs": True},
        checkpoints=CheckpointConfig(num_to_keep=1),
        callbacks=[NotesReports(reports)],
        arguments={"max_steps": SAVE_STEPS + 1},
    )
    saved, last = [[SAVE_STEPS, True], [SAVE_STEPS + 1, True]], [SAVE_STEPS + 1, False]
    logged = [[step, False] for step in range(1, SAVE_STEPS + 2)]
    # The record of the whole run and the end of training are the last two.
    found = [json.loads(line) for line in reports.read_text().splitlines()]
    assert sorted(found) == sorted([*logged, *saved, last, last])
    assert saved_steps(tmp_path / "out") == [SAVE_STEPS, SAVE_STEPS + 1] and len(result.best_checkpoints) == 1
    assert result.checkpoint is not None
    trainer = build_trainer("single", str(tmp_path / "moved" / "out"))
    trainer.train(resume_from_checkpoint=result.checkpoint.path)
    build_trainer("single", str(tmp_path / "plain" / "out")).train()
    model = f"out/checkpoints/checkpoint-{NUM_STEPS}/model.safetensors"
    assert trainer.resume_path == result.checkpoint.path
    assert (tmp_path / "moved" / model).read_bytes() == (tmp_path / "plain" / model).read_bytes()


def test_callback_outside_of_ray_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="this process is not a worker of it"):
        build_trainer("single", str(tmp_path), RayReportCallback()).train()


def test_relative_output_directory_is_refused(cluster: Any, tmp_path: Path) -> None:
    trainer = TorchTrainer(
        train,
        train_loop_config={"kind": "single", "output_dir": "out"},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    )
    with pytest.raises(Exception, match="output_dir='out' is a relative path"):
        trainer.fit()
