"""Exact resume: a killed and resumed run ends like an uninterrupted one, bit for bit, and with the same log.

The fixture `exact_runs` makes all runs of this file at once. Each setting has an uninterrupted run, named after the
setting, and runs that are killed once or twice with SIGKILL.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.sampling import sampled
from tests.support.train_job import Scenario, Start, Stop, run_scenarios

# 5 steps an epoch, 10 in all. Checkpoints of the base setting: 3, 6, 9, 10; evaluations: 4, 8; logs: 4, 8, 10.
INSIDE_AN_EPOCH = Stop("on_forward_backward_begin", step=7, nth=3)
BEFORE_THE_FIRST_SAVE = Stop("on_optimizer_step", step=1)
END_OF_EPOCH = Stop("on_epoch_end", step=5)
PARTIAL_WINDOW = Stop("on_forward_backward_end", step=4)
RIGHT_AFTER_A_SAVE = Stop("on_save", step=6)
IN_AN_EVALUATION = Stop("on_prediction_step", step=4, nth=2)
IN_A_LATER_EVALUATION = Stop("on_prediction_step", step=8, nth=3)
IN_A_SAVE = Stop("fsync", step=6, nth=4)
AFTER_THE_LAST_SAVE = Stop("on_save", step=10)

KILLS: dict[str, tuple[Stop, ...]] = {
    "inside an epoch": (INSIDE_AN_EPOCH,),
    "before the first save": (BEFORE_THE_FIRST_SAVE,),
    "at the end of an epoch": (END_OF_EPOCH,),
    "in a partial window": (PARTIAL_WINDOW,),
    "right after a save": (RIGHT_AFTER_A_SAVE,),
    "in an evaluation": (IN_AN_EVALUATION,),
    "in a save": (IN_A_SAVE,),
    "after the last save": (AFTER_THE_LAST_SAVE,),
    "twice": (IN_AN_EVALUATION, IN_A_LATER_EVALUATION),
    "twice before the next save": (INSIDE_AN_EPOCH, INSIDE_AN_EPOCH),
}
WITH_WORKERS = ("inside an epoch", "in an evaluation", "in a save", "twice")

SETTINGS: dict[str, dict[str, Any]] = {
    "base": {},
    "workers": {"settings": {"dataloader_num_workers": 2}},
    "bf16": {"settings": {"mixed_precision": "bf16"}},
    "fp16": {"settings": {"mixed_precision": "fp16"}},
    "two optimizers": {"optimizer": "multiopt"},
    "built on the device": {"settings": {"construct_model_on": "device"}},
    "built on meta": {"settings": {"construct_model_on": "meta"}},
    "saves at the epoch's end": {"settings": {"save_steps": 5}},
    "epoch strategies": {
        "settings": {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_strategy": "epoch"},
    },
    "evaluation by epoch": {"settings": {"eval_strategy": "epoch", "save_steps": 5}},
    "best model": {"settings": {"eval_steps": 3, "load_best_model_at_end": True, "preserve_best_model": True}},
    "ends inside an epoch": {"settings": {"max_steps": 8, "eval_strategy": "epoch"}},
    "dropped rest": {"settings": {"dataloader_drop_last": True}},
    "long log interval": {"settings": {"logging_steps": 100}},
    "stream": {"data": "stream"},
    "stream with workers": {"data": "stream", "settings": {"dataloader_num_workers": 2}},
    "stream, saves at the epoch's end": {"data": "stream", "settings": {"save_steps": 5}},
}

VARIANTS: dict[str, dict[str, tuple[Stop, ...]]] = {
    "base": KILLS,
    "workers": {name: KILLS[name] for name in WITH_WORKERS},
    **{name: {"inside an epoch": (INSIDE_AN_EPOCH,)} for name in ("bf16", "fp16", "two optimizers")},
    **{name: {"inside an epoch": (INSIDE_AN_EPOCH,)} for name in ("built on the device", "built on meta")},
    "saves at the epoch's end": {
        "right after that save": (Stop("on_save", step=5),),
        "in the next epoch": (Stop("on_optimizer_step", step=5),),
    },
    "epoch strategies": {
        "inside an epoch": (INSIDE_AN_EPOCH,),
        "right after the save": (Stop("on_save", step=5),),
        "in the last evaluation": (Stop("on_prediction_step", step=10),),
    },
    "evaluation by epoch": {
        "in an evaluation": (Stop("on_prediction_step", step=5),),
        "in the last evaluation": (Stop("on_prediction_step", step=10),),
    },
    "best model": {"inside an epoch": (INSIDE_AN_EPOCH,), "right after a save": (RIGHT_AFTER_A_SAVE,)},
    "ends inside an epoch": {"in the last evaluation": (Stop("on_prediction_step", step=8),)},
    "dropped rest": {"inside an epoch": (Stop("on_optimizer_step", step=6),)},
    "long log interval": {"inside an epoch": (INSIDE_AN_EPOCH,)},
    "stream": {"inside an epoch": (INSIDE_AN_EPOCH,), "in an evaluation": (IN_AN_EVALUATION,)},
    "stream with workers": {"inside an epoch": (INSIDE_AN_EPOCH,)},
    "stream, saves at the epoch's end": {"right after that save": (Stop("on_save", step=5),)},
}
# Every kind of setting and every kind of kill at least once.
PAIRS = sampled(
    [(setting, kill) for setting, kills in VARIANTS.items() for kill in kills],
    [
        *(
            ("base", kill)
            for kill in KILLS
            if kill not in ("inside an epoch", "in an evaluation", "right after a save")
        ),
        *((setting, "inside an epoch") for setting in ("workers", "fp16", "two optimizers", "built on meta", "stream")),
        ("epoch strategies", "in the last evaluation"),
        ("best model", "right after a save"),
    ],
)
UNKILLED = ("bf16", "dropped rest")
SETTINGS = {name: options for name, options in SETTINGS.items() if name in (*dict(PAIRS), *UNKILLED)}
Runs = dict[str, list[Start]]


def all_scenarios() -> list[Scenario]:
    straight = [Scenario(setting, **options) for setting, options in SETTINGS.items()]
    killed = [
        Scenario(f"{setting}, {kill}", stops=VARIANTS[setting][kill], **SETTINGS[setting]) for setting, kill in PAIRS
    ]
    return straight + killed


@pytest.fixture(scope="module")
def exact_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory: Path = tmp_path_factory.mktemp("exact")
    return run_scenarios(all_scenarios(), directory)


def end_of(starts: list[Start]) -> dict[str, Any]:
    facts = starts[-1].facts
    assert facts is not None and starts[-1].exit_code == 0, starts[-1].output
    return facts


@pytest.mark.parametrize("setting", SETTINGS)
def test_uninterrupted_run_has_moments_logs_and_checkpoints(setting: str, exact_runs: Runs) -> None:
    """Without this state, the comparison with killed runs would prove nothing."""
    facts = end_of(exact_runs[setting])
    assert len(facts["moments"]) >= len(facts["weights"]) - 1  # The tied head has no separate moments.
    assert any("loss" in record for record in facts["log"])
    assert any("eval_loss" in record for record in facts["log"])
    assert exact_runs[setting][0].saved


@pytest.mark.parametrize(("setting", "kill"), PAIRS)
def test_killed_and_resumed_run_equals_uninterrupted_run(setting: str, kill: str, exact_runs: Runs) -> None:
    straight, resumed = end_of(exact_runs[setting]), end_of(exact_runs[f"{setting}, {kill}"])
    for part, expected in straight.items():
        assert resumed[part] == expected, part


@pytest.mark.parametrize(("setting", "kill"), PAIRS)
def test_kill_is_sigkill_and_next_start_resumes(setting: str, kill: str, exact_runs: Runs) -> None:
    *killed, last = exact_runs[f"{setting}, {kill}"]
    assert [start.exit_code for start in killed] == [-9] * len(killed), killed[-1].output
    for before, after in zip(killed, [*killed[1:], last], strict=True):
        saved = before.saved[-1] if before.saved else before.began_at
        assert after.began_at == saved


@pytest.mark.parametrize(("setting", "kill"), PAIRS)
def test_resumed_run_saves_and_evaluates_at_the_same_steps(setting: str, kill: str, exact_runs: Runs) -> None:
    straight = exact_runs[setting][0]
    starts = exact_runs[f"{setting}, {kill}"]
    assert [step for start in starts for step in start.saved] == straight.saved
    assert sorted({step for start in starts for step in start.evaluated}) == straight.evaluated


@pytest.mark.parametrize("setting", sampled(["built on the device", "built on meta"], ["built on meta"]))
def test_construction_device_does_not_change_the_result(setting: str, exact_runs: Runs) -> None:
    assert end_of(exact_runs[setting]) == end_of(exact_runs["base"])


def test_each_setting_changes_the_result(exact_runs: Runs) -> None:
    """A setting without effect would only repeat the comparison of the base setting."""
    for setting in ("workers", "bf16", "fp16", "two optimizers", "dropped rest", "stream"):
        assert end_of(exact_runs[setting])["weights"] != end_of(exact_runs["base"])["weights"], setting
    assert end_of(exact_runs["fp16"])["loss scale"] != end_of(exact_runs["base"])["loss scale"]


def test_incomplete_window_is_a_step_unless_dropped(exact_runs: Runs) -> None:
    """13 batches in windows of three are 5 steps. The last has one batch, and is dropped on request."""
    assert exact_runs["base"][0].saved == [3, 6, 9, 10]
    assert exact_runs["base"][0].evaluated == [4, 8]
    assert exact_runs["dropped rest"][0].saved == [3, 6, 8]
