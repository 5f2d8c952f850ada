"""FSDP2 and HSDP runs that are killed or preempted: the resumed run equals the uninterrupted one on every rank."""

from typing import Any

import pytest

from tests.support.sampling import long_search, sampled, sampled_keys
from tests.support.train_job import Scenario, Start, Stop, run_scenarios

# 26 samples in rounds of 2 x 2 are 7 rounds, the last with an empty batch. Two rounds per step are 4 steps an epoch, 8 in
# all. Four ranks have 4 rounds an epoch, the last with three empty batches. Checkpoints: 3, 6, 8; evaluations: 4, 8.
BASE: dict[str, Any] = {"gradient_accumulation_steps": 2}
BEST: dict[str, Any] = {
    "eval_steps": 3,
    "load_best_model_at_end": True,
    "preserve_best_model": True,
    "ema_decay": 0.9,
    "eval_ema": True,
}
HSDP: dict[str, Any] = {**BASE, "num_train_epochs": 4, "fsdp2": {"replicate_size": 2}}
SETTINGS: dict[str, dict[str, Any]] = {
    "shards": {"settings": BASE},
    "shards, every rank reads": {"settings": {**BASE, "dispatch_batches": False}, "data": "stream"},
    "shards, best": {"settings": {**BASE, **BEST}},
    "shards in bf16": {"settings": {**BASE, "mixed_precision": "bf16"}},
    "replicas": {"settings": HSDP, "num_ranks": 4, "data": "quiet map"},
}
ONE_RANK = Stop("on_forward_backward_begin", step=5, nth=2, ranks=(1,))
IN_A_SAVE = Stop("fsync", step=6, nth=3, ranks=(1,))
KILLS: dict[str, dict[str, tuple[Stop, ...]]] = {
    "shards": {"one rank": (ONE_RANK,), "in an evaluation": (Stop("on_prediction_step", step=4, ranks=(1,)),)},
    "shards, every rank reads": {"one rank": (ONE_RANK,)},
    "shards, best": {"in a save": (IN_A_SAVE,), "after the best": (Stop("on_step_begin", step=7),)},
    "shards in bf16": {"one rank": (ONE_RANK,)},
    "replicas": {"one rank": (Stop("on_optimizer_step", step=5, ranks=(2,)),), "in a save": (IN_A_SAVE,)},
}
# Shards and replicas, killed in an evaluation and in a save.
PAIRS = sampled(
    [(setting, kill) for setting, kills in KILLS.items() for kill in kills],
    [("shards", "in an evaluation"), ("replicas", "in a save")],
)
SETTINGS = {name: options for name, options in SETTINGS.items() if name in dict(PAIRS)}
REQUESTS: dict[str, tuple[str, Stop]] = {
    "shards at a step": ("shards", Stop("on_step_end", step=2, signal="SIGTERM", ranks=(1,))),
    "shards in an evaluation": ("shards", Stop("on_prediction_step", step=4, signal="SIGTERM", ranks=(1,))),
    "replicas at a step": ("replicas", Stop("on_forward_backward_begin", step=4, signal="SIGTERM", ranks=(3,))),
}
REQUESTS = sampled_keys(REQUESTS, "shards at a step")
Runs = dict[str, list[Start]]


@pytest.fixture(scope="module")
def exact_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    common = {name: {"trainer": "fsdp2", "num_ranks": 2, **options} for name, options in SETTINGS.items()}
    straight = [Scenario(name, **options) for name, options in common.items()]
    killed = [Scenario(f"{name}, {kill}", stops=KILLS[name][kill], **common[name]) for name, kill in PAIRS]
    preempted = [
        Scenario(f"preempted {when}", stops=(stop,), **common[name]) for when, (name, stop) in REQUESTS.items()
    ]
    return run_scenarios([*straight, *killed, *preempted], tmp_path_factory.mktemp("exact"))


def end_of(starts: list[Start]) -> dict[str, Any]:
    facts = starts[-1].facts
    assert facts is not None and starts[-1].exit_code == 0, starts[-1].output
    return facts


@pytest.mark.parametrize(("setting", "kill"), PAIRS)
def test_killed_and_resumed_run_equals_uninterrupted_run(setting: str, kill: str, exact_runs: Runs) -> None:
    straight, resumed = end_of(exact_runs[setting]), end_of(exact_runs[f"{setting}, {kill}"])
    for part, expected in straight.items():
        assert resumed[part] == expected, part


@pytest.mark.parametrize(("setting", "kill"), PAIRS)
def test_kill_ends_every_rank_and_next_start_resumes(setting: str, kill: str, exact_runs: Runs) -> None:
    killed, last = exact_runs[f"{setting}, {kill}"]
    assert killed.exit_code != 0 and killed.facts is None
    assert last.began_at == killed.saved[-1]
    assert killed.saved + last.saved == exact_runs[setting][0].saved


@pytest.mark.parametrize("when", REQUESTS)
def test_stop_signal_to_one_rank_saves_and_stops_all_ranks(when: str, exact_runs: Runs) -> None:
    stopped, resumed = exact_runs[f"preempted {when}"]
    assert stopped.exit_code == 0 and stopped.facts is None, stopped.output
    setting, stop = REQUESTS[when]
    step, num_ranks = stopped.saved[-1], SETTINGS[setting].get("num_ranks", 2)
    assert stopped.output.count(f"preempted by SIGTERM at step {step}") == num_ranks, stopped.output
    assert stop.step <= step <= stop.step + 2 and resumed.began_at == step
    straight, end = end_of(exact_runs[setting]), end_of([resumed])
    for part, expected in straight.items():
        # The additional checkpoint changes which older ones were removed.
        if not part.startswith("checkpoints"):
            assert end[part] == expected, part


def test_ranks_hold_different_shards_and_replicas_hold_equal_ones(exact_runs: Runs) -> None:
    shards, replicas = end_of(exact_runs["shards"]), end_of(exact_runs["replicas"])
    for part in ("weights", "moments"):
        assert shards[f"{part} of rank 0"] != shards[f"{part} of rank 1"]
        assert replicas[f"{part} of rank 0"] == replicas[f"{part} of rank 2"] != replicas[f"{part} of rank 1"]
        assert replicas[f"{part} of rank 1"] == replicas[f"{part} of rank 3"]
    assert shards["log of rank 0"] == shards["log of rank 1"]


@long_search
def test_best_model_is_the_same_on_all_ranks(exact_runs: Runs) -> None:
    facts = end_of(exact_runs["shards, best"])
    assert facts["best of rank 0"] == facts["best of rank 1"] and "checkpoint-" in facts["best of rank 0"]
    assert facts["weights of rank 0"] != end_of(exact_runs["shards"])["weights of rank 0"]
