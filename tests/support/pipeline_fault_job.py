"""Small pipeline job with one failing rank: `python -m tests.support.pipeline_fault_job DIRECTORY WHERE RANK`.

The given rank fails in the middle of a batch. Four ranks form two pipelines. The job needs only torch, so that it
starts fast.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.distributed import get_rank, get_world_size, record_entry_point
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer

FAILING_STEP = 4
VOCABULARY = 16


class Failure:
    """Error raised at the second opportunity after `arm`, while other ranks work on the first micro-batch."""

    def __init__(self, directory: Path) -> None:
        self._marker = directory / "failed"
        self._num_passes: int | None = None

    def arm(self) -> None:
        self._num_passes = 0

    def pass_by(self) -> None:
        if self._num_passes is not None:
            self._num_passes += 1
            if self._num_passes == 2:
                self.fail()

    def fail(self) -> None:
        # The file's timestamp tells the test when the failure happened.
        self._marker.touch()
        raise ValueError("this is the root cause")


class Layer(nn.Module):
    def __init__(self, failure: Failure | None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._failure = failure

    def forward(self, hidden: Tensor) -> Tensor:
        if self._failure is not None:
            self._failure.pass_by()
        return hidden + torch.tanh(self.linear(hidden))


class Model(nn.Module):
    """Model that follows the protocol of the splitter for causal language models."""

    def __init__(self, failure: Failure | None) -> None:
        super().__init__()
        self.input_encoder = nn.Embedding(VOCABULARY, 8)
        self.layer_stack = nn.ModuleList(Layer(failure) for _ in range(2))
        self.output_decoder = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.input_encoder(input_ids)
        for layer in self.layer_stack:
            hidden = layer(hidden)
        logits: Tensor = self.output_decoder(hidden)
        return logits


class Arming:
    """Callback that arms the failure after a step."""

    def __init__(self, failure: Failure, step: int) -> None:
        self._failure = failure
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._failure.arm()


class FailingState:
    """Callback with a state that cannot be saved."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure

    def state_dict(self) -> dict[str, Any]:
        self._failure.fail()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def loss_with(failure: Failure) -> Any:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        failure.pass_by()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return loss


@record_entry_point
def main() -> None:
    torch.set_num_threads(1)
    directory, where, failing_rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    failure = Failure(directory)
    is_failing = get_rank() == failing_rank
    callbacks: list[Any] = []
    if is_failing and where == "save":
        callbacks = [FailingState(failure)]
    elif is_failing:
        # After `FAILING_STEP` comes an evaluation; after the step before it comes another step.
        callbacks = [Arming(failure, FAILING_STEP if where == "evaluation" else FAILING_STEP - 1)]
    samples = [{"input_ids": torch.arange(6) + index % 9, "labels": torch.arange(6) + index % 8} for index in range(48)]
    is_hybrid = get_world_size() == 4
    trainer_class: type[PipelineTrainer] = HybridTrainer if is_hybrid else PipelineTrainer
    trainer = trainer_class(
        args={
            "output_dir": str(directory / "output"),
            "use_cpu": True,
            "seed": 3,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "n_microbatches": 4,
            "save_steps": 6,
            "eval_strategy": "steps",
            "eval_steps": FAILING_STEP,
            **({"pp_size": 2} if is_hybrid else {}),
        },
        pipe_schedule_factory="1f1b",
        model_init=lambda: Model(failure if where in ("forward", "evaluation") else None),
        train_dataset=samples,
        eval_dataset=samples[:15],
        compute_loss_func=loss_with(failure) if where == "loss" else None,
        callbacks=callbacks,
        default_callbacks=False,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        lr_scheduler_factory=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
    )
    trainer.train()
    raise AssertionError("the job should have failed")


if __name__ == "__main__":
    main()
