"""Preemption: a signalled run saves once, reports "preempted", exits 0, and later resumes exactly.

The fixture `runs` makes all runs of this file at once. Each run sends the signals to itself, at exactly the point under
test.
"""

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from forgather.ml.checkpoint.rotation import CheckpointRotation
from forgather.ml.trainer.loop.signals import StopSignals
from tests.support import interruptions
from tests.support.sampling import sampled_keys
from tests.support.train_job import Scenario, Start, Stop, run_scenarios

BASE: dict[str, Any] = {}
WORKERS = {"dataloader_num_workers": 2}
BY_EPOCH = {"eval_strategy": "epoch", "save_steps": 5}
BEST = {"eval_steps": 3, "load_best_model_at_end": True, "preserve_best_model": True}
EVAL_ON_SAVE = {"eval_strategy": "no", "eval_on_save": True}
STRAIGHT = {
    "straight": BASE,
    "straight with workers": WORKERS,
    "straight by epoch": BY_EPOCH,
    "straight with best": BEST,
    "straight with evaluation on save": EVAL_ON_SAVE,
}


@dataclass(frozen=True)
class Request:
    """Stop request, with the step that the run must save because of it."""

    stops: tuple[Stop, ...]
    saves_at: int
    straight: str = "straight"
    saves_again: bool = False
    """Whether the resumed run writes that checkpoint again, with the missing evaluation."""
    signal_name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "signal_name", self.stops[-1].signal)


def in_a_step(signal_name: str, step: int = 6, **options: Any) -> Stop:
    """Return a signal in the second micro-batch of the step after `step`."""
    return Stop("on_forward_backward_begin", step=step, nth=2, signal=signal_name, **options)


def in_an_evaluation(signal_name: str, step: int = 4, **options: Any) -> Stop:
    return Stop("on_prediction_step", step=step, nth=2, signal=signal_name, **options)


def in_a_save(signal_name: str, step: int = 6) -> Stop:
    return Stop("fsync", step=step, nth=4, signal=signal_name)


REQUESTS = {
    **{f"{name} in a step": Request((in_a_step(name),), 7) for name in ("SIGTERM", "SIGUSR1", "SIGINT")},
    **{f"{name} in an evaluation": Request((in_an_evaluation(name),), 4) for name in ("SIGTERM", "SIGUSR1")},
    **{f"{name} in a save": Request((in_a_save(name),), 6) for name in ("SIGTERM", "SIGINT")},
    "in the step before an evaluation": Request((in_a_step("SIGTERM", step=3),), 4),
    "in the last step of an epoch": Request((Stop("on_optimizer_step", step=4, signal="SIGTERM"),), 5),
    "in the last step": Request((Stop("on_optimizer_step", step=9, signal="SIGTERM"),), 10),
    "twice": Request((in_an_evaluation("SIGTERM"), in_a_step("SIGTERM")), 7),
    "again during the repeated evaluation": Request((in_an_evaluation("SIGTERM"), in_an_evaluation("SIGTERM")), 4),
    "in the evaluation of an epoch": Request((in_an_evaluation("SIGTERM", step=5),), 5, straight="straight by epoch"),
    "in the evaluation of the last epoch": Request(
        (in_an_evaluation("SIGTERM", step=10),), 10, straight="straight by epoch"
    ),
    "in an evaluation for the best model": Request(
        (in_an_evaluation("SIGTERM", step=9),), 9, straight="straight with best", saves_again=True
    ),
    "in the save after the repeated evaluation": Request(
        (in_an_evaluation("SIGUSR1", step=9), Stop("on_save", step=9, signal="SIGUSR1")),
        9,
        straight="straight with best",
        saves_again=True,
    ),
    "in the step before an evaluation on save": Request(
        (in_a_step("SIGTERM", step=5),), 6, straight="straight with evaluation on save", saves_again=True
    ),
    "in an evaluation on save": Request(
        (in_an_evaluation("SIGTERM", step=6),), 6, straight="straight with evaluation on save", saves_again=True
    ),
    **{
        f"{name} to the workers as well": Request(
            (in_a_step(name, to_group=True),), 7, straight="straight with workers"
        )
        for name in ("SIGTERM", "SIGUSR1", "SIGINT")
    },
}
REQUESTS = sampled_keys(
    REQUESTS,
    "SIGTERM in a step",
    "SIGUSR1 in an evaluation",
    "SIGINT in a save",
    "in the last step",
    "in the save after the repeated evaluation",
    "SIGTERM to the workers as well",
)
STRAIGHT = {name: STRAIGHT[name] for name in STRAIGHT if name in {request.straight for request in REQUESTS.values()}}
Runs = dict[str, list[Start]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    scenarios = [Scenario(name, settings=settings) for name, settings in STRAIGHT.items()]
    scenarios += [
        Scenario(name, settings=STRAIGHT[request.straight], stops=request.stops, default_callbacks=True)
        for name, request in REQUESTS.items()
    ]
    scenarios.append(Scenario("Ctrl-C twice", stops=(in_a_step("SIGINT", times=2),), default_callbacks=True))
    return run_scenarios(scenarios, tmp_path_factory.mktemp("preemption"))


def ends(starts: list[Start]) -> dict[str, Any]:
    facts = starts[-1].facts
    assert facts is not None and starts[-1].exit_code == 0, starts[-1].output
    return facts


@pytest.mark.parametrize("name", REQUESTS)
def test_preempted_run_exits_0_and_reports_preemption(name: str, runs: Runs) -> None:
    request = REQUESTS[name]
    stopped = runs[name][-2]
    assert stopped.exit_code == 0, stopped.output
    assert stopped.facts is None, "the run must stop before its end"
    assert f"preempted by {request.signal_name} at step {request.saves_at}" in stopped.output
    assert "Traceback" not in stopped.output


@pytest.mark.parametrize("name", REQUESTS)
def test_preempted_run_saves_once(name: str, runs: Runs) -> None:
    """The run saves when stopped, and otherwise like the uninterrupted run. A second save only adds a missing evaluation."""
    request, starts = REQUESTS[name], runs[name]
    saved = [step for start in starts for step in start.saved]
    again = [request.saves_at] if request.saves_again else []
    assert saved == sorted([*{*runs[request.straight][0].saved, *_stop_steps(name, runs)}, *again])
    assert starts[-1].began_at == request.saves_at


@pytest.mark.parametrize("name", REQUESTS)
def test_preempted_and_resumed_run_equals_uninterrupted_run(name: str, runs: Runs) -> None:
    straight, resumed = ends(runs[REQUESTS[name].straight]), ends(runs[name])
    for part, expected in straight.items():
        assert resumed[part] == expected, part


@pytest.mark.parametrize("name", REQUESTS)
def test_interrupted_evaluation_is_repeated_after_resume(name: str, runs: Runs) -> None:
    evaluated = [step for start in runs[name] for step in start.evaluated]
    assert evaluated == runs[REQUESTS[name].straight][0].evaluated


@pytest.mark.parametrize("name", REQUESTS)
def test_next_start_reports_the_resumed_step(name: str, runs: Runs) -> None:
    assert f"resumed at step {REQUESTS[name].saves_at} " in runs[name][-1].output


def test_second_ctrl_c_ends_at_once(runs: Runs) -> None:
    interrupted, last = runs["Ctrl-C twice"]
    assert interrupted.exit_code != 0
    assert "KeyboardInterrupt" in interrupted.output
    assert "preempted" not in interrupted.output
    assert interrupted.saved == [3, 6], "the step in progress is not saved"
    assert last.began_at == 6
    assert ends(runs["Ctrl-C twice"]) == ends(runs["straight"])


def test_second_ctrl_c_interrupts_after_another_signal() -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


# Settings and callback of a run -> events and steps that send it a signal, one run for each. All but the first event of
# each list once led to other weights, another best checkpoint, or a final checkpoint without its evaluation.
INTERRUPTIONS: dict[tuple[str, str], list[tuple[str, int]]] = {
    ("4, 5", "none"): [("on_step_end", 3), ("on_prediction_step 3", 5), ("on_evaluate", 5)],
    ("4, 5", "asks on_evaluate"): [("on_save", 5), ("on_prediction_step 2", 5)],
    ("4, 5", "stops on_evaluate"): [("on_save", 4), ("on_prediction_step 3", 5)],
    ("4, 4", "none"): [("on_save", 8), ("on_prediction_step 2", 8)],
    ("epochs", "none"): [("on_save", 5), ("on_step_end", 5), ("on_step_end", 10)],
    ("epochs, 8", "none"): [("on_save", 8), ("on_evaluate", 8)],
}


@pytest.mark.parametrize(("settings", "habit"), INTERRUPTIONS)
def test_interruption_changes_neither_weights_nor_best_checkpoint(settings: str, habit: str, tmp_path: Path) -> None:
    expected = interruptions.outcome(
        interruptions.run(str(tmp_path / "straight"), interruptions.SETTINGS[settings], interruptions.Habit(habit))
    )
    for event, step in INTERRUPTIONS[settings, habit]:
        found = interruptions.interrupted(
            str(tmp_path), interruptions.SETTINGS[settings], habit, [(event, step, "SIGUSR1")]
        )
        assert found is not None, f"no {event} at step {step}"
        assert found == expected, f"{event} at step {step}"


def test_best_checkpoint_is_listed_after_death_before_its_entry(tmp_path: Path) -> None:
    """The resumed run keeps the checkpoint, and loads it at the end."""
    settings = {**interruptions.SETTINGS["4, 4"], "max_steps": 12}
    expected = interruptions.outcome(interruptions.run(str(tmp_path / "straight"), settings))
    best = expected["best"][1]
    folder = str(tmp_path / "killed")
    child = os.fork()
    if child == 0:
        rank = CheckpointRotation.rank_checkpoint

        def die(self: Any, path: str, *rest: Any) -> bool:
            if os.path.basename(path) == best:
                os._exit(0)
            return rank(self, path, *rest)

        CheckpointRotation.rank_checkpoint = die  # type: ignore[method-assign]
        interruptions.run(folder, settings)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert interruptions.outcome(interruptions.run(folder, settings)) == expected


def _stop_steps(name: str, runs: Runs) -> list[int]:
    """Return the steps where a scenario was stopped: the first steps of its later starts."""
    return [start.began_at for start in runs[name][1:] if start.began_at is not None]
