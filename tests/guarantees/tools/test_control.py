"""Requests to a running job: every rank acts after the same step, and training continues as if nobody had asked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forgather.tools.control import Change, Ended, Evaluation, Saved
from tests.support.control_job import KINDS, Ask, Facts, files_of, train_several
from tests.support.ranks import run_on_ranks
from tests.support.sampling import sampled

Runs = dict[str, list[Facts]]
# Files with the path and the time of a checkpoint.
OF_A_RUN = ("checkpoint_manifest.json", "checkpoint_metadata.json", "trainer_state.pt", "eval_metrics.json")
ASKS = {
    "quiet": [],
    "asked": [Ask(1, "save"), Ask(2, "evaluate"), Ask(4, "save"), Ask(4, "evaluate")],
    "set": [Ask(2, "set", {"logging_steps": 2, "save_steps": 5, "save_total_limit": 1, "eval_strategy": "no"})],
    "stopped": [Ask(2, "stop")],
    "aborted": [Ask(3, "abort")],
}
SETTINGS: dict[str, dict[str, Any]] = {"aborted": {"save_steps": 2}}


def multiples(number: int, first: int, last: int) -> list[int]:
    return [one for one in range(first, last + 1) if one % number == 0]


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Runs]]:
    known: dict[str, tuple[Path, Runs]] = {}

    def runs(kind: str) -> tuple[Path, Runs]:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            plan = {name: (str(folder / name), asks, SETTINGS.get(name, {})) for name, asks in ASKS.items()}
            ranks = run_on_ranks(train_several, KINDS[kind][1], kind, plan, timeout=120.0)
            known[kind] = folder, {name: [rank[name] for rank in ranks] for name in ASKS}
        return known[kind]

    return runs


@pytest.fixture(params=sampled(KINDS, ["ddp", "hybrid"]))
def runs(request: pytest.FixtureRequest, runs_of: Callable[[str], tuple[Path, Runs]]) -> tuple[Path, Runs]:
    return runs_of(request.param)


def test_requested_saves_and_evaluations_do_not_change_training(runs: tuple[Path, Runs]) -> None:
    folder, (quiet, asked) = runs[0], (runs[1]["quiet"], runs[1]["asked"])
    for before, after in zip(quiet, asked, strict=True):
        assert after.ended == "finished" and after.step == 8
        assert after.state == before.state
        assert after.logged == before.logged

    def is_compared(name: str) -> bool:
        return name not in OF_A_RUN

    files = [files_of(folder / name / "checkpoints" / "checkpoint-8", is_compared) for name in ("quiet", "asked")]
    assert files[0] == files[1] and len(files[0]) > 1


def test_all_ranks_save_and_evaluate_after_the_same_step(runs: tuple[Path, Runs]) -> None:
    folder, asked = runs[0], runs[1]["asked"]
    first, evaluation, second, cached = asked[0].answers
    assert isinstance(first, Saved) and isinstance(second, Saved) and isinstance(evaluation, Evaluation)
    assert first.step in (2, 3) and second.step in (5, 6)
    assert Path(first.checkpoint) == folder / "asked" / "checkpoints" / f"checkpoint-{first.step}"
    assert Path(first.checkpoint).is_dir() and Path(second.checkpoint).is_dir()
    assert evaluation.metrics["eval_loss"] > 0 and evaluation.step in (3, 4)
    assert isinstance(cached, Evaluation)
    for rank in asked:
        assert rank.saved == sorted({first.step, second.step, 6, 8})
        assert {evaluation.step, cached.step, 4, 8} <= {*rank.evaluated} or not rank.evaluated
        assert {*rank.evaluated} <= {evaluation.step, cached.step, 4, 8}


def test_all_ranks_change_settings_after_the_same_step(runs: tuple[Path, Runs]) -> None:
    changed = runs[1]["set"]
    (changes,) = changed[0].answers
    assert {(one.name, one.before, one.after) for one in changes} == {
        ("logging_steps", 3, 2),
        ("save_steps", 6, 5),
        ("save_total_limit", None, 1),
        ("eval_strategy", "steps", "no"),
    }
    assert isinstance(changes[0], Change)
    step = changes[0].step
    for rank in changed:
        assert rank.periods == [3] * step + [2] * (8 - step)
        # The last step, and the final record of the run.
        assert rank.logged == [*multiples(3, 1, step), *multiples(2, step + 1, 8), 8]
        assert rank.saved == [*multiples(6, 1, step), *multiples(5, step + 1, 7), 8]
        assert {*rank.evaluated} <= {*multiples(4, 1, step)}
    kept = sorted(path.name for path in (runs[0] / "set" / "checkpoints").iterdir() if path.name.startswith("check"))
    assert kept == ["checkpoint-8"]


def test_stop_saves_and_ends_all_ranks_after_the_same_step(runs: tuple[Path, Runs]) -> None:
    stopped = runs[1]["stopped"]
    (ended,) = stopped[0].answers
    assert isinstance(ended, Ended) and ended.step in (3, 4)
    assert ended.checkpoint is not None and Path(ended.checkpoint).name == f"checkpoint-{ended.step}"
    assert Path(ended.checkpoint).is_dir()
    for rank in stopped:
        assert (rank.ended, rank.step, rank.saved) == ("Preempted 0", ended.step, [ended.step])


def test_abort_ends_all_ranks_without_a_checkpoint_of_the_step(runs: tuple[Path, Runs]) -> None:
    aborted = runs[1]["aborted"]
    (ended,) = aborted[0].answers
    assert isinstance(ended, Ended) and ended.step in (4, 5)
    for rank in aborted:
        assert (rank.ended, rank.step) == ("Aborted 1", ended.step)
    # Scheduled saves of earlier steps stay.
    folder = runs[0] / "aborted" / "checkpoints"
    kept = {path.name for path in folder.iterdir() if path.name.startswith("check")}
    assert kept == {"checkpoint-2", *(["checkpoint-4"] if 4 in aborted[0].saved else [])}
    assert ended.checkpoint is not None and Path(ended.checkpoint).name == max(kept)


def test_socket_is_removed_at_the_end(runs: tuple[Path, Runs]) -> None:
    for name in ASKS:
        assert not list((runs[0] / name).glob(".forgather.sock*")), name
