"""Pipelines with a rank that is killed or asked to stop: the resumed run equals the uninterrupted one bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.pipeline_job import PipelineScenario
from tests.support.sampling import sampled, sampled_keys
from tests.support.train_job import Stop, run_scenarios

# 26 samples in batches of 4 are 7 batches, the last with two samples. Two batches per step are 4 steps an epoch, 8 in all.
# Checkpoints: 3, 6, 8, the first two in the middle of an epoch; evaluations: 4, 8.
NUM_STEPS = 8
HYBRID: dict[str, Any] = {"pp_size": 2, "per_device_train_batch_size": 2, "n_microbatches": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "three ranks, workers": {"settings": {"dataloader_num_workers": 2}, "num_ranks": 3},
    "zbv, tied": {"schedule": "zbv", "model": "gpt2"},
    "hybrid, tied": {"settings": HYBRID, "trainer": "hybrid", "num_ranks": 4, "model": "gpt2"},
    "hybrid, sharded": {
        "settings": {**HYBRID, "dispatch_batches": False},
        "trainer": "hybrid",
        "num_ranks": 4,
    },
    "hybrid, sharded stages, tied": {
        "settings": {**HYBRID, "dp_strategy": "shard", "ema_decay": 0.9},
        "trainer": "hybrid",
        "num_ranks": 4,
        "model": "gpt2",
    },
}
KILLS: dict[str, dict[str, Stop]] = {
    "1f1b": {
        "first rank in a step": Stop("on_forward_backward_begin", step=4, nth=2, ranks=(0,)),
        "last rank in an evaluation": Stop("on_prediction_step", step=4, ranks=(1,)),
        "last rank in a save": Stop("fsync", step=6, ranks=(1,)),
    },
    "three ranks, workers": {"middle rank in a step": Stop("on_optimizer_step", step=6, ranks=(1,))},
    "zbv, tied": {
        "last rank in a step": Stop("on_forward_backward_begin", step=6, nth=2, ranks=(1,)),
        "first rank in a save": Stop("fsync", step=6, nth=4, ranks=(0,)),
    },
    "hybrid, tied": {
        "last rank in a step": Stop("on_optimizer_step", step=4, ranks=(3,)),
        "middle rank in an evaluation": Stop("on_prediction_step", step=4, ranks=(2,)),
        "middle rank in a save": Stop("fsync", step=6, ranks=(1,)),
    },
    "hybrid, sharded": {"first rank of a pipeline in a step": Stop("on_forward_backward_begin", step=5, ranks=(2,))},
    "hybrid, sharded stages, tied": {
        "first rank in accumulation": Stop("on_forward_backward_begin", step=5, nth=2, ranks=(0,)),
        "last rank in a save": Stop("fsync", step=6, ranks=(3,)),
    },
}
# One and two pipelines with whole and sharded stages, and every kind of kill.
PAIRS = sampled(
    [(setting, kill) for setting, kills in KILLS.items() for kill in kills],
    [
        ("1f1b", "first rank in a step"),
        ("hybrid, tied", "middle rank in an evaluation"),
        ("hybrid, sharded stages, tied", "last rank in a save"),
    ],
)
SETTINGS = {name: options for name, options in SETTINGS.items() if name in dict(PAIRS)}
REQUESTS: dict[str, Stop] = {
    "1f1b": Stop("on_prediction_step", step=4, signal="SIGTERM", ranks=(1,)),
    "hybrid, tied": Stop("on_step_end", step=2, signal="SIGTERM", ranks=(2,)),
}
REQUESTS = sampled_keys(REQUESTS, "1f1b")
# Files with the path and the time of a checkpoint. All other files must not depend on interruptions.
OF_A_RUN = ("checkpoint_manifest.json", "checkpoint_metadata.json", "trainer_state.pt", "eval_metrics.json")
JOB = "tests.support.pipeline_job"


class Runs:
    """All runs by name."""

    def __init__(self, directory: Path) -> None:
        straight = [PipelineScenario(name, **options) for name, options in SETTINGS.items()]
        killed = [
            PipelineScenario(f"{name}, {kill}", stops=(KILLS[name][kill],), **SETTINGS[name]) for name, kill in PAIRS
        ]
        preempted = [
            PipelineScenario(f"{name}, preempted", stops=(stop,), **SETTINGS[name]) for name, stop in REQUESTS.items()
        ]
        self._directory = directory
        self.starts = run_scenarios([*straight, *killed, *preempted], directory, JOB)

    def end(self, name: str) -> dict[str, Any]:
        last = self.starts[name][-1]
        assert last.facts is not None and last.exit_code == 0, last.output
        return last.facts

    def last_checkpoint(self, name: str) -> dict[str, bytes]:
        checkpoint = self._directory / name / "output" / "checkpoints" / f"checkpoint-{NUM_STEPS}"
        return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name not in OF_A_RUN}

    def assert_same_end(self, name: str, straight: str, *, but_for: tuple[str, ...] = ()) -> None:
        """Assert equal results on every rank; samples are compared for the steps of the last start only."""
        expected, found = self.end(straight), self.end(name)
        assert found.keys() == expected.keys()
        for part, fact in expected.items():
            if part.startswith("samples"):
                assert found[part] == {step: fact[step] for step in found[part]}, part
            elif not part.startswith(but_for):
                assert found[part] == fact, part
        one, other = self.last_checkpoint(straight), self.last_checkpoint(name)
        assert one.keys() == other.keys()
        assert [file for file in one if one[file] != other[file]] == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("exact"))


@pytest.mark.parametrize(("setting", "kill"), PAIRS)
def test_killed_and_resumed_pipeline_equals_uninterrupted_run(setting: str, kill: str, runs: Runs) -> None:
    runs.assert_same_end(f"{setting}, {kill}", setting, but_for=("checkpoints ",))


@pytest.mark.parametrize(("setting", "kill"), PAIRS)
def test_kill_ends_every_rank_and_next_start_resumes(setting: str, kill: str, runs: Runs) -> None:
    killed, resumed = runs.starts[f"{setting}, {kill}"]
    assert killed.exit_code != 0 and killed.facts is None
    assert killed.saved, "the kill must follow the first checkpoint"
    assert resumed.began_at == killed.saved[-1]
    assert [*killed.saved, *resumed.saved] == runs.starts[setting][0].saved == [3, 6, NUM_STEPS]


@pytest.mark.parametrize("setting", REQUESTS)
def test_stop_signal_to_one_rank_saves_and_stops_all_ranks(setting: str, runs: Runs) -> None:
    stop, num_ranks = REQUESTS[setting], SETTINGS[setting].get("num_ranks", 2)
    stopped, resumed = runs.starts[f"{setting}, preempted"]
    assert stopped.exit_code == 0 and stopped.facts is None, stopped.output
    step = stopped.saved[-1]
    assert stopped.output.count(f"preempted by SIGTERM at step {step}") == num_ranks, stopped.output
    assert stop.step <= step <= stop.step + 2
    assert resumed.began_at == step
    # The additional checkpoint changes which older ones were removed.
    runs.assert_same_end(f"{setting}, preempted", setting, but_for=("checkpoints ",))


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_sample_is_seen_once_in_an_epoch(setting: str, runs: Runs) -> None:
    facts = runs.end(setting)
    num_ranks = SETTINGS[setting].get("num_ranks", 2)
    # All ranks of a pipeline see the same samples; a second pipeline, if present, sees the rest.
    first_ranks = (0, 2) if num_ranks == 4 else (0,)
    for steps in (range(1, 5), range(5, 9)):
        seen = [number for rank in first_ranks for step in steps for number in samples_of(facts, rank, step)]
        assert sorted(seen) == list(range(26))


def samples_of(facts: dict[str, Any], rank: int, step: int) -> list[int]:
    samples: list[int] = facts[f"samples of rank {rank}"][str(step)]
    return samples


@pytest.mark.parametrize("setting", SETTINGS)
def test_random_state_differs_between_ranks(setting: str, runs: Runs) -> None:
    facts = runs.end(setting)
    drawn = {str(facts[f"random of rank {rank}"]) for rank in range(SETTINGS[setting].get("num_ranks", 2))}
    assert len(drawn) == SETTINGS[setting].get("num_ranks", 2)


@pytest.mark.parametrize("setting", sampled(["hybrid, tied", "hybrid, sharded"], ["hybrid, tied"]))
def test_pipelines_of_a_hybrid_run_have_equal_state(setting: str, runs: Runs) -> None:
    facts = runs.end(setting)
    for place in (0, 1):
        for part in ("weights", "moments"):
            assert facts[f"{part} of rank {place}"] == facts[f"{part} of rank {place + 2}"] != {}
