"""Jobs that lose nodes by SIGKILL and get them back train like a job that kept its ranks (`make elastic`)."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.launch import CapturedProcess, free_port, kill_leftovers
from tests.unit.cli.program import write_tiny_run
from tests.unit.cli.test_launch import PROGRAM, start

SECONDS = 150
"""Time limit of each phase: a lost node is noticed after 15 s, and starting takes seconds on busy cores."""
NUM_STEPS = 60
TOLERANCE = 1e-6
CALLBACK = '[{"class_path": "tests.support.elastic_callback.NotesSteps"}]'
ARGUMENTS = {
    "global_batch_size": 8,
    "max_steps": NUM_STEPS,
    "save_steps": 1,
    "eval_strategy": "no",
    "seed": 7,
}

needs_elastic = pytest.mark.skipif("ELASTIC" not in os.environ, reason="takes minutes: make elastic")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    kill_leftovers()


def words(**arguments: Any) -> list[str]:
    options = {**ARGUMENTS, **arguments}
    return ["--callbacks", CALLBACK, *(f"--args.{name}={value}" for name, value in options.items())]


def node(folder: Path, number: int, endpoint: str, *more: str, **arguments: Any) -> CapturedProcess:
    place = ("--nproc", "1", "--nnodes", "2:4", "--node-rank", str(number), "--node-wait", "3")
    kind = () if "--trainer" in more else ("--trainer", "ddp")
    return start(folder, *PROGRAM, *kind, *place, "--rdzv-endpoint", endpoint, *words(**arguments), *more)


def notes(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all ranks that were written completely."""
    lines = [line for path in folder.glob("notes/*.jsonl") for line in path.read_text().split("\n")[:-1]]
    return [json.loads(line) for line in lines]


def wait_for_step(folder: Path, step: int, size: int, processes: list[CapturedProcess]) -> None:
    """Wait until all ranks of a job of `size` ranks have trained `step`."""
    deadline = time.monotonic() + SECONDS
    while len({note["rank"] for note in notes(folder) if note["size"] == size and note["step"] >= step}) < size:
        outputs = "\n---\n".join(one.output for one in processes)
        assert all(one.returncode is None for one in processes), outputs
        assert time.monotonic() < deadline, outputs
        time.sleep(0.1)


def samples_by_step(folder: Path) -> dict[int, set[str]]:
    """Return the samples of each step in global order, as one text for each execution of the step."""
    found: dict[tuple[int, int], dict[int, Any]] = {}
    for note in notes(folder):
        found.setdefault((note["step"], note["size"]), {}).setdefault(note["rank"], note["samples"])
    steps: dict[int, set[str]] = {}
    for (step, size), by_rank in found.items():
        if len(by_rank) == size:
            rounds = zip(*(by_rank[rank] for rank in range(size)), strict=True)
            order = [sample for one_round in rounds for micro_batch in one_round for sample in micro_batch]
            steps.setdefault(step, set()).add(" ".join(order))
    return steps


def losses(folder: Path) -> list[tuple[int, float]]:
    return [tuple(json.loads(line)) for line in (folder / "losses.jsonl").read_text().splitlines()]


def assert_like_reference(folder: Path, reference: Path) -> None:
    own, expected = samples_by_step(folder), samples_by_step(reference)
    assert own == expected and set(own) == set(range(NUM_STEPS))
    by_step = dict(losses(reference))
    assert {step for step, _ in losses(folder)} == set(by_step)
    for step, loss in losses(folder):
        assert loss == pytest.approx(by_step[step], rel=TOLERANCE), step
    weights, other = (
        load_file(one / f"out/checkpoints/checkpoint-{NUM_STEPS}/model.safetensors") for one in (folder, reference)
    )
    for name, tensor in weights.items():
        assert (tensor - other[name]).norm() <= TOLERANCE * tensor.norm(), name


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run on one device that was never interrupted."""
    folder = tmp_path_factory.mktemp("reference")
    write_tiny_run(folder)
    process = start(folder, *PROGRAM, *words(save_steps=NUM_STEPS))
    assert process.wait(SECONDS) == 0, process.output
    return folder


@needs_elastic
def test_job_of_4_3_2_and_4_nodes_trains_like_an_uninterrupted_job(reference: Path, tmp_path: Path) -> None:
    write_tiny_run(tmp_path)
    endpoint = f"localhost:{free_port()}"
    nodes = [node(tmp_path, number, endpoint) for number in range(4)]
    wait_for_step(tmp_path, 5, 4, nodes)
    nodes.pop(2).kill()
    wait_for_step(tmp_path, 10, 3, nodes)
    nodes.pop(1).kill()
    wait_for_step(tmp_path, 15, 2, nodes)
    nodes += [node(tmp_path, number, endpoint) for number in (1, 2)]
    outputs = []
    for one in nodes:
        assert one.wait(SECONDS) == 0, one.output
        outputs.append(one.output)
    assert {note["size"] for note in notes(tmp_path)} >= {4, 3, 2}
    assert max(note["step"] for note in notes(tmp_path) if note["size"] == 4) == NUM_STEPS - 1
    assert "a node joins: saving a checkpoint before the restart" in "".join(outputs)
    assert_like_reference(tmp_path, reference)


def hybrid_node(folder: Path, number: int, endpoint: str, *more: str) -> CapturedProcess:
    return node(folder, number, endpoint, "--trainer", "hybrid", *more, pp_size=2, max_steps=10)


@needs_elastic
def test_hybrid_job_on_three_ranks_keeps_a_spare_or_fails(tmp_path: Path) -> None:
    write_tiny_run(tmp_path)
    text = (tmp_path / "tiny.yaml").read_text()
    (tmp_path / "tiny.yaml").write_text(text.replace("num_hidden_layers: 1", "num_hidden_layers: 2"))
    endpoint = f"localhost:{free_port()}"
    nodes = [hybrid_node(tmp_path, number, endpoint) for number in range(3)]
    for one in nodes:
        assert one.wait(SECONDS) == 0, one.output
    outputs = "".join(one.output for one in nodes)
    assert outputs.count("1 of 3 ranks wait as spares: 1 pipeline(s) of 2 ranks train") == 1
    assert (tmp_path / "out/checkpoints/checkpoint-10").is_dir()
    endpoint = f"localhost:{free_port()}"
    fails = ("--args.elastic=fail", "--args.output_dir=other", "--max-restarts", "3")
    nodes = [hybrid_node(tmp_path, number, endpoint, *fails) for number in range(3)]
    codes = [one.wait(SECONDS) for one in nodes]
    assert 2 in codes and 0 not in codes, "".join(one.output for one in nodes)
    assert "does not fit the 3 ranks that are left" in "".join(one.output for one in nodes)
