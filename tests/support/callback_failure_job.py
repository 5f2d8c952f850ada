"""Small job in which a callback fails on one rank: `main([DIRECTORY, KIND, EVENT, HOW, RANK])`.

Without a callback of that event's name, the failure is in an overridden hook of the trainer ("hook").
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.distributed import DistributedEnvironment, get_rank
from forgather.ml.trainer.accelerate import AccelTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.watch_job import KINDS, Fault, Model, Samples, loss_with

MESSAGE = "the disk of the callback is full"
NUM_STEPS = 6
FAILING_STEP = 2
TRAINERS: dict[str, type[Trainer[Any]]] = {
    **{name: one for name, (one, _) in KINDS.items()},
    "accelerate": AccelTrainer,
}
NUM_RANKS = {**{name: number for name, (_, number) in KINDS.items()}, "accelerate": 2, "hf": 2}


class FullDisk:
    """Callback that fails at one event, from the failing step on."""

    def __init__(self, event: str, how: str) -> None:
        self._how = how
        setattr(self, event, self._fail)

    def _fail(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        fail(self._how, state.global_step)


def fail(how: str, step: int) -> None:
    if how == "exit":
        sys.exit(0)
    raise ValueError(MESSAGE)


def train(words: Sequence[str]) -> None:
    directory, kind, event, how, rank = Path(words[0]), words[1], words[2], words[3], int(words[4])
    torch.set_num_threads(1)
    env = DistributedEnvironment(no_accelerator=True)
    is_faulty = get_rank() == rank
    if kind == "hf":
        train_as_transformers(directory, [FullDisk(event, how)] if is_faulty else [], event)
        return
    trainer_class: Any = TRAINERS[kind]
    if event == "hook":

        class Faulty(trainer_class):  # type: ignore[misc]
            def _clip_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
                if is_faulty and self.state.global_step == FAILING_STEP:
                    fail(how, FAILING_STEP)
                return super()._clip_grad_norm(*args, **kwargs)

        trainer_class = Faulty
    staged = kind in ("pipeline", "hybrid")
    sound = Fault(directory, "none")
    trainer = trainer_class(
        args={
            "output_dir": str(directory / "output"),
            "use_cpu": True,
            "seed": 3,
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "logging_steps": 2,
            "save_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 3,
            **({"n_microbatches": 2} if staged else {}),
            **({"pp_size": 2} if kind == "hybrid" else {}),
        },
        model_init=Model,
        train_dataset=Samples(sound),
        eval_dataset=[Samples(sound)[index] for index in range(24)],
        compute_loss_func=loss_with(sound),
        callbacks=[FullDisk(event, how)] if is_faulty and event != "hook" else [],
        default_callbacks=False,
        **({"accelerator": accelerator()} if kind == "accelerate" else {"distributed_env": env}),
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
        lr_scheduler_factory=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
        **({"pipe_schedule_factory": "1f1b"} if staged else {}),
    )
    if event == "on_predict":
        trainer.predict(trainer.eval_dataset)
    elif how == "evaluate":
        trainer.evaluate()
    elif how == "save":
        trainer.save_checkpoint(str(directory / "saved"))
    else:
        trainer.train()
    print("finished", flush=True)


def accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def train_as_transformers(directory: Path, callbacks: list[Any], event: str) -> None:
    """Train with the drop-in for the Trainer of transformers."""
    from transformers import TrainingArguments

    from forgather.hf import Trainer as DropIn

    samples = [Samples(Fault(directory, "none"))[index] for index in range(24)]
    trainer = DropIn(
        model=Labelled(),
        args=TrainingArguments(
            output_dir=str(directory / "output"),
            use_cpu=True,
            max_steps=NUM_STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=2,
            save_steps=3,
            eval_strategy="steps",
            eval_steps=3,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=samples,
        eval_dataset=samples,
        callbacks=callbacks,
    )
    if event == "on_predict":
        trainer.predict(samples)
    else:
        trainer.train()


class Labelled(Model):
    """Model that computes its loss, as those of transformers."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def main(words: Sequence[str]) -> None:
    train(words)
