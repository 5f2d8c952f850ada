"""Processes of the self-test: `python -m forgather.tools.doctor.self_test_job FOLDER`.

Importing torch takes longer than the runs. This process imports it once and forks one process for each run, as the lines
of its input request. It must stay without threads. A forked process trains in one of the roles below, and writes its
losses and the digest of its state to a JSON file in `FOLDER`.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo  # The first optimizer imports it; import it once for all processes.
from torch import Tensor, nn

from forgather.ml.checkpoint.encoding.digest import combine_digests, state_digests
from forgather.ml.checkpoint.store import verify_checkpoint
from forgather.ml.distributed import DistributedEnvironment
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)

NUM_STEPS = 6
SAVE_STEPS = 2
KILL_STEP = 5
_VOCABULARY = 32


class _Model(nn.Module):
    """Model with dropout, so that a resume must restore the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, 16)
        self.dropout = nn.Dropout(0.1)
        self.output = nn.Linear(16, _VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.output(self.dropout(self.embedding(input_ids)))
        return logits


class _Kill(TrainerCallback):
    """Callback that kills its own process with SIGKILL, between two saves."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step == KILL_STEP:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: str) -> None:
    """Train without interruption and note the result; then train again, and die by SIGKILL."""
    _note(folder, "whole", _trained(_trainer(Trainer, os.path.join(folder, "whole"))))
    _trainer(Trainer, os.path.join(folder, "killed"), _Kill()).train()


def resumed(folder: str) -> None:
    """Continue the killed run from its newest checkpoint."""
    trainer = _trainer(Trainer, os.path.join(folder, "killed"))
    first_steps: list[int] = []

    class Begin(TrainerCallback):
        def on_train_begin(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
        ) -> None:
            first_steps.append(state.global_step)

    trainer.add_callback(Begin())
    found = _trained(trainer)
    _note(folder, "resumed", {**found, "first_step": first_steps[0]})


def rank(folder: str) -> None:
    """Train as one of two ranks, and verify the checkpoint that they saved together."""
    environment = DistributedEnvironment(backend="gloo", no_accelerator=True, log_level="WARNING", timeout=60)
    trainer = _trainer(DDPTrainer, os.path.join(folder, "ranks"), distributed_env=environment)
    found = _trained(trainer)
    damage = verify_checkpoint(str(trainer.loop.saved_path)) if environment.rank == 0 else []
    _note(folder, f"rank{environment.rank}", {**found, "damage": damage})


def _trainer(cls: type[Trainer[Any]], output_dir: str, *callbacks: TrainerCallback, **options: Any) -> Trainer[Any]:
    args = cls.arguments_class(
        output_dir=output_dir,
        max_steps=NUM_STEPS,
        save_steps=SAVE_STEPS,
        save_strategy="steps",
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        seed=1,
        use_cpu=True,
    )
    return cls(
        args=args,
        model_init=_Model,
        train_dataset=_samples(),
        callbacks=list(callbacks),
        default_callbacks=False,
        **options,
    )


def _samples() -> list[dict[str, Tensor]]:
    tokens = [torch.arange(number, number + 8) % _VOCABULARY for number in range(64)]
    return [{"input_ids": one, "labels": one} for one in tokens]


def _trained(trainer: Trainer[Any]) -> dict[str, Any]:
    """Train, and return the losses and a digest of all bits of weights and optimizer."""
    trainer.train()
    optimizer = trainer.optimizer
    assert optimizer is not None, "the trainer has trained"
    state = {"model": trainer.unwrapped_model().state_dict(), "optimizer": optimizer.state_dict()["state"]}
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return {"digest": combine_digests(state_digests(state)), "losses": losses}


def _note(folder: str, name: str, content: dict[str, Any]) -> None:
    with open(os.path.join(folder, f"{name}.json"), "w", encoding="utf-8") as file:
        json.dump(content, file)


_ROLES: dict[str, Callable[[str], None]] = {"killed": killed, "resumed": resumed, "rank": rank}


def _forked(folder: str, role: str, number: int, variables: Mapping[str, str]) -> int:
    """Fork a process that plays a role, and return its process id. Its output goes to `<role><number>.log`."""
    process_id = os.fork()
    if process_id:
        return process_id
    exit_code = 1
    try:
        _redirect_output(os.path.join(folder, f"{role}{number}.log"))
        os.environ.update(variables)
        _ROLES[role](folder)
        exit_code = 0
    except Exception:
        logger.exception("The role %r failed.", role)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The copy of the parent's input and output must not be used or flushed here.
        os._exit(exit_code)


def _redirect_output(path: str) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)


def main(folder: str) -> None:
    """Serve requests `{"role": ..., "variables": [...]}`, one per line; answer each with the list of exit codes."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        ids = [
            _forked(folder, request["role"], number, variables) for number, variables in enumerate(request["variables"])
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]) for process_id in ids]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
