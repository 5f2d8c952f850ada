"""DDP runs with one or both ranks killed: the resumed run equals the uninterrupted one bit for bit on every rank."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.sampling import sampled, sampled_keys
from tests.support.train_job import Scenario, Start, Stop, run_scenarios

# 26 samples in rounds of 2 x 2 are 7 rounds, the last with an empty batch. Two rounds per step are 4 steps an epoch, 8 in all.
# Checkpoints: 3, 6, 8; evaluations: 4, 8.
BASE: dict[str, Any] = {"gradient_accumulation_steps": 2}
SHARDED: dict[str, Any] = {**BASE, "dispatch_batches": False}
ZERO: dict[str, Any] = {**BASE, "ddp": {"shard_optimizer": True}, "ema_decay": 0.9}
LOCAL_SGD: dict[str, Any] = {**BASE, "post_local_sgd": {"enabled": True, "start_step": 4, "period": 3}}

ONE_RANK = Stop("on_forward_backward_begin", step=5, nth=2, ranks=(1,))
THE_READING_RANK = Stop("on_optimizer_step", step=7)
BOTH_RANKS = Stop("on_optimizer_step", step=4, ranks=(0, 1))
IN_AN_EVALUATION = Stop("on_prediction_step", step=4, ranks=(1,))
IN_A_SAVE = Stop("fsync", step=6, nth=3)
RIGHT_AFTER_A_SAVE = Stop("on_save", step=3, ranks=(1,))

SETTINGS: dict[str, dict[str, Any]] = {
    "dispatched": {"settings": BASE},
    "dispatched, read ahead": {"settings": BASE, "data": "quiet map"},
    "dispatched, workers": {"settings": {**BASE, "dataloader_num_workers": 2}},
    "dispatched stream": {"settings": BASE, "data": "stream"},
    "sharded": {"settings": SHARDED},
    "sharded, workers": {"settings": {**SHARDED, "dataloader_num_workers": 2}},
    "sharded moments": {"settings": ZERO},
    "local sgd": {"settings": LOCAL_SGD},
    "accelerate": {"settings": BASE, "trainer": "accelerate"},
}
KILLS: dict[str, dict[str, tuple[Stop, ...]]] = {
    "dispatched": {
        "one rank": (ONE_RANK,),
        "both ranks": (BOTH_RANKS,),
        "in an evaluation": (IN_AN_EVALUATION,),
        "in a save": (IN_A_SAVE,),
        "twice": (RIGHT_AFTER_A_SAVE, THE_READING_RANK),
    },
    "dispatched, read ahead": {"one rank": (ONE_RANK,), "the reading rank": (THE_READING_RANK,)},
    "dispatched, workers": {"one rank": (ONE_RANK,)},
    "dispatched stream": {"one rank": (ONE_RANK,)},
    "sharded": {"one rank": (ONE_RANK,), "both ranks": (BOTH_RANKS,)},
    "sharded, workers": {"both ranks": (BOTH_RANKS,)},
    "sharded moments": {"one rank": (ONE_RANK,), "in a save": (IN_A_SAVE,)},
    "local sgd": {"before it starts": (BOTH_RANKS,), "after it started": (THE_READING_RANK,)},
    "accelerate": {"one rank": (ONE_RANK,), "in an evaluation": (IN_AN_EVALUATION,)},
}
# The settings that differ most, and kills in a step, an evaluation and a save.
PAIRS = sampled(
    [(setting, kill) for setting, kills in KILLS.items() for kill in kills],
    [
        ("dispatched", "twice"),
        ("dispatched, read ahead", "the reading rank"),
        ("sharded moments", "in a save"),
        ("local sgd", "after it started"),
        ("accelerate", "in an evaluation"),
    ],
)
SETTINGS = {name: options for name, options in SETTINGS.items() if name in dict(PAIRS)}
# Stop requests to one rank, or to the reading rank: at a step, in an evaluation and during a save.
REQUESTS: dict[str, Stop] = {
    "at a step of one rank": Stop("on_step_end", step=2, signal="SIGTERM", ranks=(1,)),
    "at a step of the reading rank": Stop("on_forward_backward_begin", step=4, signal="SIGUSR1"),
    "in an evaluation": Stop("on_prediction_step", step=4, signal="SIGTERM", ranks=(1,)),
    "in a save": Stop("fsync", step=6, nth=2, signal="SIGINT"),
}
REQUESTS = sampled_keys(REQUESTS, "in an evaluation")
PREEMPTED = "dispatched, read ahead"
Runs = dict[str, list[Start]]


@pytest.fixture(scope="module")
def exact_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory: Path = tmp_path_factory.mktemp("exact")
    common = {name: {"trainer": "ddp", "num_ranks": 2, **options} for name, options in SETTINGS.items()}
    straight = [Scenario(name, **options) for name, options in common.items()]
    killed = [Scenario(f"{name}, {kill}", stops=KILLS[name][kill], **common[name]) for name, kill in PAIRS]
    preempted = [Scenario(f"preempted {when}", stops=(stop,), **common[PREEMPTED]) for when, stop in REQUESTS.items()]
    return run_scenarios([*straight, *killed, *preempted], directory)


def end_of(starts: list[Start]) -> dict[str, Any]:
    facts = starts[-1].facts
    assert facts is not None and starts[-1].exit_code == 0, starts[-1].output
    return facts


@pytest.mark.parametrize(("setting", "kill"), PAIRS)
def test_killed_and_resumed_run_equals_uninterrupted_run(setting: str, kill: str, exact_runs: Runs) -> None:
    straight, resumed = end_of(exact_runs[setting]), end_of(exact_runs[f"{setting}, {kill}"])
    assert len(straight) > 20, "facts of two ranks"
    for part, expected in straight.items():
        assert resumed[part] == expected, part


@pytest.mark.parametrize(("setting", "kill"), PAIRS)
def test_kill_ends_every_rank_and_next_start_resumes(setting: str, kill: str, exact_runs: Runs) -> None:
    *killed, last = exact_runs[f"{setting}, {kill}"]
    for before, after in zip(killed, [*killed[1:], last], strict=True):
        assert before.exit_code != 0 and before.facts is None
        assert after.began_at == (before.saved[-1] if before.saved else before.began_at)
    assert [step for start in [*killed, last] for step in start.saved] == exact_runs[setting][0].saved


@pytest.mark.parametrize("when", REQUESTS)
def test_stop_signal_to_one_rank_saves_and_stops_all_ranks(when: str, exact_runs: Runs) -> None:
    stopped, resumed = exact_runs[f"preempted {when}"]
    assert stopped.exit_code == 0 and stopped.facts is None, stopped.output
    step = stopped.saved[-1]
    assert stopped.output.count(f"preempted by {REQUESTS[when].signal} at step {step}") == 2, stopped.output
    assert REQUESTS[when].step <= step <= REQUESTS[when].step + 2
    assert resumed.began_at == step
    straight, end = end_of(exact_runs[PREEMPTED]), end_of([resumed])
    for part, expected in straight.items():
        # The additional checkpoint changes which older ones were removed.
        if not part.startswith("checkpoints"):
            assert end[part] == expected, part


@pytest.mark.parametrize("setting", SETTINGS)
def test_ranks_share_weights_but_not_random_state(setting: str, exact_runs: Runs) -> None:
    facts = end_of(exact_runs[setting])
    for part in ("weights", "schedule", "log", "counters"):
        assert facts[f"{part} of rank 0"] == facts[f"{part} of rank 1"], part
    if setting == "sharded moments":
        assert not facts["moments of rank 0"].keys() & facts["moments of rank 1"].keys()
        together = {**facts["moments of rank 0"], **facts["moments of rank 1"]}
        assert together == end_of(exact_runs["dispatched"])["moments of rank 0"]
    else:
        assert facts["moments of rank 0"] == facts["moments of rank 1"]
    assert facts["random of rank 0"] != facts["random of rank 1"]
    assert facts["moments of rank 0"]


def test_each_setting_changes_the_result(exact_runs: Runs) -> None:
    assert exact_runs["dispatched"][0].saved == [3, 6, 8]
    weights = {name: str(end_of(exact_runs[name])["weights of rank 0"]) for name in SETTINGS}
    changing = {"dispatched, read ahead", "dispatched, workers", "dispatched stream", "local sgd"} & SETTINGS.keys()
    assert len(changing) >= 2
    for name in changing:
        assert weights[name] != weights["dispatched"], name
