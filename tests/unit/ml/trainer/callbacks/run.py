"""Simulated run for callbacks: sends the events of a trainer by hand."""

from pathlib import Path
from typing import Any

from torch import nn

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.trainer_types import TrainerControl, TrainerState


class Run:
    """Sender of events with the arguments of every handler; `attributes` are set on the state."""

    def __init__(self, output_dir: Path, *callbacks: Any, model: nn.Module | None = None, **attributes: Any) -> None:
        self.callbacks = callbacks
        self.args = TrainingArguments(output_dir=str(output_dir), logging_steps=2)
        settings: dict[str, Any] = {
            "logging_steps": 2,
            "eval_steps": 4,
            "train_batch_size": 16,
            "max_steps": 10,
            "num_train_epochs": 1,
            "max_eval_steps": -1,
        }
        self.state = TrainerState(**{**settings, **attributes})
        self.control = TrainerControl()
        self.model = nn.Linear(2, 2) if model is None else model
        self.processing_class: Any = None
        self.eval_dataloader: Any = None
        self.trainer: Any = None

    def send(self, event: str, **details: Any) -> None:
        keywords = {
            "model": self.model,
            "processing_class": self.processing_class,
            "optimizer": None,
            "lr_scheduler": None,
            "train_dataloader": None,
            "eval_dataloader": self.eval_dataloader,
            "trainer": self.trainer,
            **details,
        }
        for callback in self.callbacks:
            if hasattr(callback, event):
                getattr(callback, event)(self.args, self.state, self.control, **keywords)

    def step(self) -> None:
        self.send("on_step_begin")
        self.send("on_pre_optimizer_step")
        self.state.global_step += 1
        self.send("on_step_end")

    def log(self, **values: Any) -> dict[str, Any]:
        """Return a log record for the current step, with the changes of all callbacks."""
        logs: dict[str, Any] = {
            "epoch": self.state.epoch,
            "tokens": 100,
            "learning_rate": 1e-3,
            "grad_norm": 1.0,
            **values,
        }
        self.send("on_log_step", logs=logs)
        self.send("on_log", logs=logs)
        return logs

    def evaluate(self, **metrics: Any) -> None:
        self.send("on_evaluate", metrics=metrics)

    def train(self, losses: list[float], log_every: int = 1) -> None:
        """Run one step per loss, from the current step, until a callback requests a stop."""
        for loss in losses:
            self.step()
            if self.state.global_step % log_every == 0:
                self.log(loss=loss)
            if self.control.should_training_stop:
                return
