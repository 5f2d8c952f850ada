"""Small DDP or FSDP2 job with one failing rank: `python -m tests.support.ddp_job DIRECTORY WHERE [ddp|fsdp2]`.

It needs only torch, so that it starts fast.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.checkpoint.sharding.sharded_tensors import local_part
from forgather.ml.distributed import get_rank, record_entry_point
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.fsdp2.fsdp2_trainer import FSDP2Trainer

NUM_STEPS = 8
FAILING_STEP = 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids))  # type: ignore[no-any-return]


class Failing:
    """Callback that fails at one event of one step."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._fail)

    def _fail(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == FAILING_STEP:
            raise ValueError("this is the root cause")


class Dying:
    """Callback that kills its process with SIGKILL, the first time that the job reaches the failing step."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == FAILING_STEP and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class FailingState:
    """Callback with a state that cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("this is the root cause")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def failing_loss(logits: Tensor, labels: Tensor) -> Tensor:
    failing_loss.num_calls = getattr(failing_loss, "num_calls", 0) + 1  # type: ignore[attr-defined]
    if failing_loss.num_calls > FAILING_STEP and get_rank() == 1:  # type: ignore[attr-defined]
        raise ValueError("this is the root cause")
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@record_entry_point
def main() -> None:
    torch.set_num_threads(1)
    directory, where, kind = Path(sys.argv[1]), sys.argv[2], "".join(sys.argv[3:])
    callbacks: list[Any] = []
    if get_rank() == 1:
        callbacks = {
            "step": lambda: [Failing("on_step_end")],
            "evaluation": lambda: [Failing("on_prediction_step")],
            "save": lambda: [FailingState()],
            "kill": lambda: [Dying(directory / "died")],
        }.get(where, list)()
    samples = [{"input_ids": torch.arange(6) + index % 9, "labels": torch.arange(6) + index % 8} for index in range(64)]
    trainer_class = FSDP2Trainer if kind == "fsdp2" else DDPTrainer
    trainer = trainer_class(
        args={
            "output_dir": str(directory / "output"),
            "use_cpu": True,
            "seed": 3,
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "save_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": FAILING_STEP,
        },
        model_init=Model,
        train_dataset=samples,
        eval_dataset=samples[:7],
        compute_loss_func=failing_loss if where == "loss" else None,
        callbacks=callbacks,
        default_callbacks=False,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        lr_scheduler_factory=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
    )
    trainer.train()
    digest = sum(
        float(local_part(one.detach()).double().square().sum()) for one in trainer.unwrapped_model().parameters()
    )
    print(f"rank {get_rank()} ended at step {trainer.state.global_step} with {digest.hex()}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
