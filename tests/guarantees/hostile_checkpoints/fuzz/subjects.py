"""Fuzzed jobs: how their checkpoints are written and loaded, and the state that must come back."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch._inductor.cpu_vec_isa  # A job that compiles has imported these classes, so a checkpoint could name them.

from forgather.ml.trainer.callbacks.early_stopping import EarlyStopping
from forgather.ml.trainer.trainer import Trainer
from tests.support.faults.job import Job
from tests.support.tiny_models import TokenModel, quiet_trainer, token_samples
from tests.support.train_job import exact

STEPS = 2


class Resumed(Protocol):
    """Job that loads and saves checkpoints."""

    def load(self, path: str | None) -> str | None: ...

    def save(self) -> str: ...

    def parts(self) -> dict[str, str]:
        """Return a digest of each part of the state."""
        ...


@dataclass(frozen=True)
class Subject:
    """Kind of job with one form of checkpoints."""

    name: str
    build: Callable[[Path], Resumed]
    write: Callable[[Path], None]
    """Writes an output directory with checkpoints of two steps."""
    user_components: tuple[str, ...] = ()
    """Components with free-form state: every value is valid data."""
    optional: frozenset[str] = frozenset()
    """Parts that start fresh if the checkpoint lacks them."""


def digest(value: Any) -> str:
    return hashlib.sha256(exact(value).encode()).hexdigest()[:16]


def generators() -> dict[str, str]:
    return {"rng": digest([random.getstate(), str(np.random.get_state()), torch.get_rng_state()])}


def draw() -> None:
    """Draw random numbers, because a corrupt generator state crashes only in use."""
    random.random()
    np.random.random(1000)
    torch.rand(1000)


class ResumedJob:
    """Small job of the other fault tests."""

    def __init__(self, output_dir: Path, **options: Any) -> None:
        self.job = Job(output_dir, limit=5, seed=99, **options)

    def load(self, path: str | None) -> str | None:
        return self.job.manager.load_checkpoint(path)

    def save(self) -> str:
        return self.job.save()

    def parts(self) -> dict[str, str]:
        job = self.job
        optimizer = job.optimizer.state_dict()
        return {
            "model": digest(job.model.state_dict()),
            "optimizer": digest([optimizer["state"], optimizer["param_groups"]]),
            **{key: digest(tally.state_dict()) for key, tally in job.tallies.items()},
            "trainer": digest(job.state.global_step),
            "best": digest([(Path(path).name, value) for path, value in job.manager.best_checkpoints]),
            **generators(),
        }


class ResumedTrainer:
    """Trainer with every part that has state."""

    def __init__(self, output_dir: Path) -> None:
        self.stopping = EarlyStopping(patience=5)
        self.trainer: Trainer = quiet_trainer(
            output_dir,
            TokenModel(),
            token_samples(8),
            self.stopping,
            trainer_options={
                "optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
                "eval_dataset": token_samples(2),
            },
            ema_decay=0.9,
            max_steps=STEPS,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            logging_strategy="steps",
            logging_steps=1,
            save_total_limit=5,
            preserve_best_model=True,
            preserve_n_best=2,
        )

    def load(self, path: str | None) -> str | None:
        return self.trainer.load_checkpoint(path)

    def save(self) -> str:
        return self.trainer.save_checkpoint()

    def parts(self) -> dict[str, str]:
        # The live generators are compared instead of the RNG component.
        components = {one.key: one.stateful for one in self.trainer.get_state_components() if one.key != "rng"}
        manager = self.trainer.checkpoint_manager
        assert manager is not None
        return {
            **{key: digest(stateful.state_dict()) for key, stateful in components.items()},
            "callbacks": digest(self.stopping.state_dict()),
            "best": digest([(Path(path).name, value) for path, value in manager.best_checkpoints]),
            **generators(),
        }


def _write_job(**options: Any) -> Callable[[Path], None]:
    def write(output_dir: Path) -> None:
        job = Job(output_dir, limit=5, **options)
        for step in range(STEPS):
            job.train()
            metrics = {"loss": 1.0 / (step + 1)}
            job.manager.set_eval_metrics(metrics)
            path = job.save()
            job.manager.update_best_checkpoints(path, metrics, "loss", False, 2)
        job.manager.close()

    return write


def _write_trainer(output_dir: Path) -> None:
    ResumedTrainer(output_dir).trainer.train()


def _job(name: str, **options: Any) -> Subject:
    return Subject(
        name,
        lambda output_dir: ResumedJob(output_dir, **options),
        _write_job(**options),
        user_components=("node", "group", "dataset", "notes", "trainer"),
        optional=frozenset({"notes", "best"}),
    )


SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject(
            "trainer",
            ResumedTrainer,
            _write_trainer,
            # All components that the trainer declares as not required.
            optional=frozenset({"optimizer", "scheduler", "ema", "trainer", "dataset", "rng", "callbacks", "best"}),
        ),
        _job("shards"),
        _job("binary shards", save_safetensors=False),
        _job("binary", save_safetensors=False, max_shard_size=2**30),
    )
}
