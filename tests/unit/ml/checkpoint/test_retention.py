"""Retention policies and the ledger of best checkpoints, compared with a simple reference model."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgather.ml.checkpoint.retention import (
    AnyOf,
    BestCheckpoints,
    BestN,
    CheckpointInfo,
    EveryNSteps,
    LatestN,
    checkpoints_to_delete,
    default_greater_is_better,
    metric_value,
)

START = datetime(2024, 1, 1, tzinfo=UTC)

# Few distinct values, so that ties are frequent.
metric_sequences = st.lists(
    st.sampled_from([0.0, -0.0, 0.5, -1.0, 2.0, math.nan, math.inf, -math.inf]) | st.floats(-3, 3), max_size=12
)
limits = st.none() | st.integers(-1, 6)


def checkpoints(values: Sequence[float | None], steps: Sequence[int] | None = None) -> list[CheckpointInfo]:
    return [
        CheckpointInfo(
            path=f"/out/checkpoint-{step}",
            step=step,
            timestamp=START + timedelta(minutes=step),
            metrics={} if value is None else {"eval_loss": value},
        )
        for step, value in zip(steps or range(len(values)), values, strict=True)
    ]


def model_of_best(values: Sequence[float], n: int, greater_is_better: bool) -> set[int]:
    """Pick the best `n` one by one; the first of equal values wins."""
    remaining = [index for index, value in enumerate(values) if value == value]
    best: set[int] = set()
    while remaining and len(best) < n:
        winner = remaining[0]
        for index in remaining:
            better = values[index] > values[winner] if greater_is_better else values[index] < values[winner]
            winner = index if better else winner
        best.add(winner)
        remaining.remove(winner)
    return best


def model_of_deleted(values: Sequence[float], limit: int | None, n: int, greater_is_better: bool) -> list[int]:
    deleted = []
    for index in range(len(values)):
        num_newer = len(values) - 1 - index
        is_recent = not limit or limit < 0 or num_newer < limit
        if not is_recent and num_newer > 0 and index not in model_of_best(values, n, greater_is_better):
            deleted.append(index)
    return deleted


@given(metric_sequences, limits, st.integers(-1, 5), st.booleans())
def test_latest_and_best_match_the_reference_model(
    values: list[float], limit: int | None, n: int, greater_is_better: bool
) -> None:
    infos = checkpoints(values)
    policy = LatestN(limit) | BestN(n, "loss", greater_is_better)
    expected = [infos[index] for index in model_of_deleted(values, limit, n, greater_is_better)]
    assert checkpoints_to_delete(infos, policy) == expected


@given(metric_sequences, limits, st.integers(-1, 5), st.booleans())
def test_ledger_matches_the_reference_model_during_rotation(
    values: list[float], limit: int | None, n: int, greater_is_better: bool
) -> None:
    ledger = BestCheckpoints()
    infos = checkpoints(values)
    present: list[CheckpointInfo] = []
    for num_saved, info in enumerate(infos, start=1):
        best = model_of_best(values[:num_saved], n, greater_is_better)
        assert ledger.update(info.path, info.metrics, "loss", greater_is_better, n) == (num_saved - 1 in best)
        assert {path for path, _ in ledger.entries} == {infos[index].path for index in best}
        present.append(info)
        doomed = checkpoints_to_delete(present, LatestN(limit) | ledger)
        present = [one for one in present if one not in doomed]
        expected = model_of_deleted(values[:num_saved], limit, n, greater_is_better)
        assert present == [one for index, one in enumerate(infos[:num_saved]) if index not in expected]


@given(metric_sequences, st.integers(1, 5), st.booleans())
def test_ledger_entries_are_best_first(values: list[float], n: int, greater_is_better: bool) -> None:
    ledger = BestCheckpoints()
    for info in checkpoints(values):
        ledger.update(info.path, info.metrics, "loss", greater_is_better, n)
    ranked = [value for _, value in ledger.entries]
    assert ranked == sorted(ranked, reverse=greater_is_better)


@given(metric_sequences, st.integers(1, 4))
def test_newest_checkpoint_is_never_deleted(values: list[float], n: int) -> None:
    class KeepNothing:
        def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
            return set()

    infos = checkpoints(values)
    assert checkpoints_to_delete(infos, KeepNothing()) == infos[:-1]
    assert infos[-1:] == [info for info in infos if info not in checkpoints_to_delete(infos, LatestN(n))][-1:]


def test_two_lowest_losses_are_kept() -> None:
    ledger = BestCheckpoints()
    entered = [
        ledger.update(f"checkpoint-{step}", {"eval_loss": loss}, "loss", None, 2)
        for step, loss in enumerate([0.5, 0.1, 0.3, 0.2])
    ]
    assert ledger.entries == [("checkpoint-1", 0.1), ("checkpoint-3", 0.2)]
    assert entered == [True, True, True, True]
    infos = checkpoints([0.5, 0.1, 0.3, 0.2])
    assert BestN(2, "loss").keep(infos) == {infos[1].path, infos[3].path}


@pytest.mark.parametrize("limit", [None, 0, -1])
def test_no_limit_keeps_everything(limit: int | None) -> None:
    assert checkpoints_to_delete(checkpoints([1.0, 2.0, 3.0]), LatestN(limit)) == []


def test_metric_value_zero_is_ranked() -> None:
    ledger = BestCheckpoints()
    ledger.update("a", {"loss": 1.0}, "loss", False, 1)
    assert ledger.update("b", {"loss": 0.0}, "loss", False, 1)
    assert ledger.entries == [("b", 0.0)]


def test_nan_is_never_best_and_removes_a_listed_path() -> None:
    ledger = BestCheckpoints()
    assert not ledger.update("a", {"loss": math.nan}, "loss", None, 3)
    assert ledger.update("a", {"loss": 1.0}, "loss", None, 3)
    assert not ledger.update("a", {"loss": math.nan}, "loss", None, 3)
    assert ledger.entries == []


def test_earlier_checkpoint_wins_a_tie() -> None:
    ledger = BestCheckpoints()
    assert ledger.update("a", {"loss": 1.0}, "loss", None, 1)
    assert not ledger.update("b", {"loss": 1.0}, "loss", None, 1)
    assert ledger.entries == [("a", 1.0)]


def test_updating_a_listed_path_replaces_its_value() -> None:
    ledger = BestCheckpoints([("out/a", 0.1), ("out/b", 0.2)])
    assert ledger.update("./out/a/", {"loss": 0.3}, "loss", None, 2)
    assert ledger.entries == [("out/b", 0.2), ("out/a", 0.3)]


def test_metric_is_found_with_and_without_prefix_and_the_exact_key_wins() -> None:
    assert metric_value({"eval_loss": 1.0}, "loss") == 1.0
    assert metric_value({"loss": 2.0}, "eval_loss") == 2.0
    assert metric_value({"loss": 3.0, "eval_loss": 4.0}, "loss") == 3.0
    assert metric_value({"loss": 3.0, "eval_loss": 4.0}, "eval_loss") == 4.0


def test_missing_metric_error_lists_available_metrics() -> None:
    with pytest.raises(ValueError, match=r"'accuracy'.*eval_loss, eval_runtime"):
        BestCheckpoints().update("a", {"eval_runtime": 1.0, "eval_loss": 1.0}, "accuracy", None, 1)
    with pytest.raises(ValueError, match=r"'accuracy'.*eval_loss"):
        BestN(1, "accuracy").keep(checkpoints([1.0]))


def test_checkpoints_without_metrics_are_never_best() -> None:
    infos = checkpoints([None, 2.0, None, 1.0, None])
    assert BestN(1, "loss").keep(infos) == {infos[3].path}
    assert BestN(1, "loss").keep(checkpoints([None])) == set()


@pytest.mark.parametrize(
    ("key", "expected"),
    [("loss", False), ("eval_loss", False), ("eval_perplexity", False), ("accuracy", True), ("loss_scale", True)],
)
def test_metric_direction_follows_its_name(key: str, expected: bool) -> None:
    assert default_greater_is_better(key) is expected


def test_every_n_steps_keeps_multiples_and_composes() -> None:
    infos = checkpoints([None] * 6, steps=[50, 100, 150, 200, 250, 300])
    assert [info.step for info in checkpoints_to_delete(infos, EveryNSteps(100) | LatestN(2))] == [50, 150]
    assert checkpoints_to_delete(infos, AnyOf([EveryNSteps(100), LatestN(2)])) == checkpoints_to_delete(
        infos, LatestN(2) | EveryNSteps(100)
    )
    without_step = CheckpointInfo("/out/final", None, START)
    assert EveryNSteps(1).keep([without_step]) == set()
    with pytest.raises(ValueError, match="n must be 1 or more"):
        EveryNSteps(0)


def test_custom_policy_composes_on_either_side() -> None:
    class KeepFirst:
        def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
            return {checkpoints[0].path}

    infos = checkpoints([None] * 4)
    expected = infos[1:3]
    assert checkpoints_to_delete(infos, KeepFirst() | LatestN(1)) == expected
    assert checkpoints_to_delete(infos, LatestN(1) | KeepFirst()) == expected


def test_missing_paths_are_dropped(tmp_path: Path) -> None:
    there, gone = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
    there.mkdir()
    ledger = BestCheckpoints([(str(there), 1.0), (str(gone), 2.0)])
    assert ledger.drop_missing() == [str(gone)]
    assert ledger.entries == [(str(there), 1.0)]


def test_changed_metric_restarts_the_ranking(caplog: pytest.LogCaptureFixture) -> None:
    ledger = BestCheckpoints([("a", 0.1)], metric_key="loss")
    ledger.update("b", {"eval_loss": 0.2}, "eval_loss", None, 2)
    assert len(ledger.entries) == 2 and not caplog.records
    ledger.update("c", {"accuracy": 0.9}, "accuracy", None, 2)
    assert ledger.entries == [("c", 0.9)]
    assert "starts over" in caplog.text


def test_summary_lists_best_first() -> None:
    ledger = BestCheckpoints([("/out/checkpoint-2", 0.1), ("/out/checkpoint-4", 0.2)])
    assert ledger.summary("loss").splitlines() == [
        "Best checkpoints by loss:",
        "  1. checkpoint-2: 0.1",
        "  2. checkpoint-4: 0.2",
    ]
    assert "No best checkpoints" in BestCheckpoints().summary("loss")
