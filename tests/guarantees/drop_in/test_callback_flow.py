"""Callbacks of transformers that decide on logs, evaluations and saves: the run is that of transformers."""

import os
from pathlib import Path
from typing import Any

import pytest
import transformers

import forgather.hf
from tests.guarantees.drop_in.programs import collate, rows
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import tiny_llama


class Watching(transformers.TrainerCallback):
    """Note the events of a run with their steps."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("epoch_end", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("save", state.global_step))


class EverySecondEpoch(Watching):
    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_epoch_end(args, state, control)
        if round(state.epoch) % 2:
            control.should_evaluate = control.should_save = False


class LateSteps(Watching):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step < 5:
            control.should_evaluate = control.should_log = control.should_save = False
        return control


CASES: dict[str, tuple[type[Watching], dict[str, Any]]] = {
    "order": (Watching, {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}),
    "epochs": (EverySecondEpoch, {"eval_strategy": "epoch", "save_strategy": "epoch"}),
    "steps": (LateSteps, {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}),
    "last_step": (Watching, {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}),
    "max_steps": (Watching, {"max_steps": 6, "save_strategy": "no"}),
}


def flow_of(library: Any, output_dir: str, case: str) -> dict[str, Any]:
    callback, settings = CASES[case][0](), CASES[case][1]
    options = {"num_train_epochs": 2.5, "learning_rate": 0.01, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    # Two processes have the same steps as one.
    size = 2 // int(os.environ.get("WORLD_SIZE", "1"))
    options |= {"per_device_train_batch_size": size, "train_sampling_strategy": "sequential", "logging_steps": 2}
    if case != "max_steps":
        options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    args = library.TrainingArguments(output_dir, **{**options, **settings})
    trainer = library.Trainer(tiny_llama(), args, collate, rows(), rows(4), callbacks=[callback])
    trainer.train()
    state = trainer.state
    logged = [(one["step"], one["grad_norm"]) for one in state.log_history if "grad_norm" in one]
    return {
        "events": callback.events,
        "epochs": state.num_train_epochs,
        "best_step": state.best_global_step if case != "max_steps" else None,
        "logged_steps": [step for step, _ in logged],
        "norms": [norm for _, norm in logged],
    }


@pytest.mark.parametrize("case", CASES)
def test_callbacks_decide_as_in_transformers(tmp_path: Path, case: str) -> None:
    theirs, ours = (flow_of(one, str(tmp_path / one.__name__), case) for one in (transformers, forgather.hf))
    assert ours["events"] == theirs["events"]
    assert ours["logged_steps"] == theirs["logged_steps"]
    assert (ours["epochs"], ours["best_step"]) == (theirs["epochs"], theirs["best_step"])
    assert len(ours["norms"]) > 0


def flow_on_ranks(output_dir: str, case: str) -> dict[str, Any]:
    return flow_of(forgather.hf, output_dir, case)


def test_all_ranks_skip_what_callbacks_cancel(tmp_path: Path) -> None:
    one, other = run_on_ranks(flow_on_ranks, 2, str(tmp_path / "ranks"), "steps")
    alone = flow_of(forgather.hf, str(tmp_path / "one"), "steps")
    assert one["events"] == other["events"] == alone["events"]
    assert ("evaluate", 6) in one["events"] and ("evaluate", 4) not in one["events"]


def test_logged_norm_is_that_of_the_last_step(tmp_path: Path) -> None:
    norms = []
    for logging_steps in (1, 2):
        args = forgather.hf.TrainingArguments(
            str(tmp_path), max_steps=4, logging_steps=logging_steps, use_cpu=True, report_to=[], save_strategy="no"
        )
        trainer = forgather.hf.Trainer(tiny_llama(), args, collate, rows())
        trainer.train()
        norms.append({one["step"]: one["grad_norm"] for one in trainer.state.log_history if "grad_norm" in one})
    assert norms[1] == {step: norms[0][step] for step in (2, 4)}


class AfterSave(transformers.TrainerCallback):
    """Find the checkpoint of a save as callbacks of transformers do: by the step of the state."""

    def __init__(self) -> None:
        self.found: list[tuple[int, bool, int]] = []

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.newest = state

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        self.found.append((state.global_step, os.path.isdir(path), state.log_history[-1]["step"]))


def test_background_saves_show_callbacks_the_saved_step(tmp_path: Path) -> None:
    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "fg_strategy": "single"}
    options |= {"max_steps": 9, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "fg_async_save": True}
    callback = AfterSave()
    args = forgather.hf.TrainingArguments(str(tmp_path), **options)
    trainer = forgather.hf.Trainer(tiny_llama(), args, collate, rows(), callbacks=[callback])
    trainer.train()
    assert callback.found == [(step, True, step) for step in (2, 4, 6, 8, 9)]
    assert trainer.state.global_step == 9 and callback.newest is trainer.state
