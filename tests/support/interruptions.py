"""Search for interruptions that change a run: `python -m tests.support.interruptions` tries a signal at every event.

Each run is interrupted at one event, resumed, and compared with the uninterrupted run: final weights, best checkpoint,
list of the best checkpoints, evaluations, and the content of the last checkpoint.
"""

import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.files.eval_metrics import load_checkpoint_metrics
from forgather.ml.trainer.loop.signals import Preempted
from forgather.ml.trainer.trainer import Trainer

NUM_EVAL_BATCHES = 3
EVENTS = (
    *("on_step_begin", "on_forward_backward_end", "on_train_metrics", "on_step_end", "on_log", "on_evaluate"),
    *(f"on_prediction_step {number}" for number in range(1, NUM_EVAL_BATCHES + 1)),
    *("on_save", "on_epoch_end"),
)
BASE = {"max_steps": 8, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 5}
SETTINGS: dict[str, dict[str, Any]] = {
    "4, 5": BASE,
    "4, 4": {**BASE, "eval_steps": 4},
    "3, 2": {**BASE, "save_steps": 3, "eval_steps": 2, "preserve_n_best": 2, "preserve_best_model": True},
    "epochs": {"num_train_epochs": 3, "save_strategy": "epoch", "eval_strategy": "epoch", "preserve_n_best": 2},
    "epochs, 3": {"num_train_epochs": 2, "save_strategy": "epoch", "eval_strategy": "steps", "eval_steps": 3},
    "epochs, 8": {"max_steps": 8, "save_strategy": "epoch", "eval_strategy": "steps", "eval_steps": 8},
    "5, epochs": {"num_train_epochs": 2, "save_steps": 5, "eval_strategy": "epoch"},
    "on save": {"max_steps": 8, "save_steps": 3, "eval_on_save": True},
    "on save, epochs": {"num_train_epochs": 2, "save_strategy": "epoch", "eval_on_save": True},
    "no saves": {**BASE, "save_strategy": "no", "load_best_model_at_end": False},
}
HABITS = (
    "none",
    "asks on_step_end",
    "asks on_evaluate",
    "stops on_evaluate",
    "by hand on_step_end",
    "by hand on_evaluate",
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Habit:
    """Callback that requests saves, saves directly, or stops training, at certain steps."""

    changes_control = True

    def __init__(self, kind: str) -> None:
        verb, _, self._event = kind.rpartition(" ")
        self._act = {"": _nothing, "asks": _ask, "stops": _stop, "by hand": _save_by_hand}[verb]

    def on_step_end(self, args: Any, state: Any, control: Any, trainer: Any, **_: Any) -> None:
        if self._event == "on_step_end" and state.global_step in (2, 5, 6):
            self._act(trainer, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, trainer: Any, **_: Any) -> None:
        if self._event == "on_evaluate" and state.global_step in (4, 5, 6):
            self._act(trainer, control)


def _nothing(trainer: Any, control: Any) -> None: ...


def _ask(trainer: Any, control: Any) -> None:
    control.should_save = True


def _stop(trainer: Any, control: Any) -> None:
    control.should_training_stop = True


def _save_by_hand(trainer: Any, control: Any) -> None:
    trainer.save_checkpoint()


class Interrupter:
    """Callback that sends a signal at the nth occurrence of one event in one step."""

    changes_control = False

    def __init__(self, event: str, step: int, name: str) -> None:
        base, _, nth = event.partition(" ")
        self._step, self._left, self._signal = step, int(nth or 1), signal.Signals[name]
        setattr(self, base, self._pass)

    def _pass(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._left -= state.global_step == self._step
        if self._left == 0:
            self._left = -1
            os.kill(os.getpid(), self._signal)


def run(output_dir: str, settings: Mapping[str, Any], *callbacks: Any, make: Callable[..., Any] = Trainer) -> Any:
    """Train and return the trainer, or None after a preemption."""
    generator = torch.Generator().manual_seed(3)
    data = [
        {"x": torch.randn(4, generator=generator), "labels": torch.randint(3, (1,), generator=generator)[0]}
        for _ in range(9)
    ]
    torch.manual_seed(1)
    trainer = make(
        args={
            "output_dir": output_dir,
            "seed": 1,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 1,
            "learning_rate": 0.7,
            "lr_scheduler_type": "constant",
            "logging_steps": 2,
            "save_total_limit": 1,
            "load_best_model_at_end": True,
            "use_cpu": True,
            **settings,
        },
        model=Model(),
        train_dataset=data,
        eval_dataset=data[:NUM_EVAL_BATCHES],
        compute_loss_func=nn.functional.cross_entropy,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.7, "momentum": 0.9}),
        callbacks=list(callbacks),
    )
    try:
        trainer.train()
    except Preempted:
        return None
    return trainer


def outcome(trainer: Any) -> dict[str, Any]:
    """Return the results that an interruption must not change."""
    state, manager = trainer.state, trainer.checkpoint_manager
    evaluations = [(one["step"], one["eval_loss"]) for one in state.log_history if "eval_loss" in one]
    newest = store.find_checkpoints(os.path.join(trainer.args.output_dir, store.CHECKPOINTS_FOLDER))
    # Without scheduled saves, the newest checkpoint is the one of the preemption. If the run stops itself, the
    # checkpoint that the preemption rewrote may contain one more evaluation.
    is_comparable = trainer.args.save_strategy != "no" and state.global_step >= state.max_steps
    return {
        "weights": [tensor.tolist() for tensor in trainer.unwrapped_model().parameters()],
        "best": [state.best_metric, os.path.basename(state.best_model_checkpoint or "")],
        "best list": [(os.path.basename(path), value) for path, value in manager.best_checkpoints],
        "best exist": [os.path.isdir(path) for path, _ in manager.best_checkpoints],
        "evaluations": evaluations,
        "newest": _content(newest[-1].path) if newest and is_comparable else None,
    }


def _content(path: str) -> dict[str, Any]:
    trainer = torch.load(os.path.join(path, "trainer_state.pt"))
    metrics = load_checkpoint_metrics(path)
    return {
        "name": os.path.basename(path),
        "pending": trainer["evaluation_is_pending"],
        "evaluated": trainer["evaluated_step"],
        "metrics": None if metrics is None else metrics["eval_loss"],
        "evaluations": [one["step"] for one in trainer["state"]["log_history"] if "eval_loss" in one],
    }


def interrupted(
    directory: str, settings: Mapping[str, Any], habit: str, places: Any, **options: Any
) -> dict[str, Any] | None:
    """Return the outcome of a run interrupted at each place and then resumed, or None if a place was not reached."""
    folder = os.path.join(directory, "interrupted")
    shutil.rmtree(folder, ignore_errors=True)
    for event, step, name in places:
        if run(folder, settings, Habit(habit), Interrupter(event, step, name), **options) is not None:
            return None
    trainer = run(folder, settings, Habit(habit), **options)
    return outcome(trainer)


def differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any] | None:
    return {key: (value, found[key]) for key, value in expected.items() if found[key] != value} or None


def all_places(num_steps: int) -> Iterator[tuple[str, int, str]]:
    yield from ((event, step, "SIGUSR1") for event, step in itertools.product(EVENTS, range(1, num_steps + 1)))


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    num_runs = num_bad = 0
    with tempfile.TemporaryDirectory() as directory:
        for (name, settings), habit in itertools.product(SETTINGS.items(), HABITS):
            folder = os.path.join(directory, f"{name} {habit}")
            expected = outcome(run(folder, settings, Habit(habit)))
            for place in all_places(15):
                found = interrupted(directory, settings, habit, [place])
                num_runs += found is not None
                differences = None if found is None else differing(expected, found)
                if differences:
                    num_bad += 1
                    print(f"{name} | {habit} | {place}: {differences}", flush=True)
    print(f"{num_runs} interrupted runs, {num_bad} of them ended differently")
    sys.exit(num_bad > 0)


if __name__ == "__main__":
    main()
