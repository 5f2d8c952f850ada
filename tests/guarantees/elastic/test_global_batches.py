"""Steps of `global_batch_size` samples are the same on any number of ranks, and for every trainer."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from forgather.ml.sharded_checkpoint import load_checkpoint
from forgather.ml.trainer.accelerate import AccelTrainer
from forgather.ml.trainer.ddp import DDPTrainer
from forgather.ml.trainer.fsdp2 import FSDP2Trainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.pipelines import llama, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import IGNORED, Recorder

GLOBAL_BATCH = 8
NUM_SAMPLES = 20
"""Two full steps per epoch, and one of 4 samples."""
NUM_STEPS = 7
TOLERANCE = 1e-6


class Noting(Trainer):
    """Trainer that records the sample numbers of each micro-batch, by step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.samples: list[tuple[int, list[int]]] = []

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        batch = self.window.batches[self.window.number]
        numbers = [] if isinstance(batch, EmptyBatch) else (batch["input_ids"][:, :2] @ torch.tensor([32, 1])).tolist()
        self.samples.append((self.state.global_step, numbers))
        return super()._forward_backward_step(input_dict, labels)


class NotingDDP(Noting, DDPTrainer):
    pass


class NotingFSDP2(Noting, FSDP2Trainer):
    pass


class NotingAccelerate(Noting, AccelTrainer):
    def __init__(self, **options: Any) -> None:
        super().__init__(accelerator=Accelerator(cpu=True), **options)


class NotingPipeline(Noting, PipelineTrainer):
    pass


class NotingHybrid(Noting, HybridTrainer):
    pass


class Case(NamedTuple):
    """Trainer, number of ranks, and the ranks that together see each sample once."""

    trainer_class: type[Noting]
    num_ranks: int
    settings: dict[str, Any]
    readers: tuple[int, ...]


def data_parallel(trainer_class: type[Noting], num_ranks: int, **settings: Any) -> Case:
    return Case(trainer_class, num_ranks, settings, tuple(range(num_ranks)))


CASES = {
    "one device in micro-batches of 3": Case(Noting, 1, {"per_device_train_batch_size": 3}, (0,)),
    "ddp 2, sharded": data_parallel(NotingDDP, 2, per_device_train_batch_size=8, dispatch_batches=False),
    "ddp 3, dispatched": data_parallel(NotingDDP, 3, per_device_train_batch_size=8),
    "ddp 3, sharded": data_parallel(NotingDDP, 3, per_device_train_batch_size=2, dispatch_batches=False),
    "ddp 4, dispatched, workers": data_parallel(NotingDDP, 4, per_device_train_batch_size=1, dataloader_num_workers=1),
    "fsdp2 2": data_parallel(NotingFSDP2, 2, per_device_train_batch_size=3),
    "hsdp 4": data_parallel(NotingFSDP2, 4, per_device_train_batch_size=4, fsdp2={"replicate_size": 2}),
    "accelerate 2": data_parallel(NotingAccelerate, 2, per_device_train_batch_size=3),
    "pipeline 2": Case(
        NotingPipeline, 2, {"per_device_train_batch_size": 6, "n_microbatches": 2, "schedule": "1f1b"}, (0,)
    ),
    "hybrid 2 x 2": Case(
        NotingHybrid, 4, {"per_device_train_batch_size": 4, "pp_size": 2, "n_microbatches": 2}, (0, 2)
    ),
}


class Run(NamedTuple):
    """Samples of each step in global order, losses by step, and the final weights."""

    samples: dict[int, list[int]]
    losses: dict[int, float]
    weights: dict[str, Tensor]


def numbered_samples() -> list[dict[str, Tensor]]:
    """Return samples with their number in the first two tokens, and with different numbers of targets."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for number in range(NUM_SAMPLES):
        tail = torch.randint(0, 32, (4,), generator=generator)
        input_ids = torch.cat([torch.tensor([number // 32, number % 32]), tail])
        labels = input_ids.clone()
        labels[: (number % 5)] = IGNORED
        samples.append({"input_ids": input_ids, "labels": labels})
    return samples


def train(output_dir: Path, name: str, max_steps: int, more: dict[str, Any]) -> tuple[Any, dict[int, float]]:
    case, recorder = CASES[name], Recorder()
    settings = {**case.settings, **more}
    trainer = trainer_of(
        case.trainer_class,
        output_dir,
        lambda: llama(4),
        numbered_samples(),
        recorder,
        max_steps=max_steps,
        shuffle=True,
        logging_strategy="steps",
        logging_steps=1,
        save_strategy="steps",
        save_steps=1000,
        learning_rate=0.05,
        max_grad_norm=0.5,
        **settings,
    )
    trainer.train()
    assert isinstance(trainer, Noting)
    return trainer.samples, {step: record["loss"] for step, record in recorder.logs}


def run(output_dir: Path, name: str, max_steps: int = NUM_STEPS, **more: Any) -> Run:
    """Train to `max_steps`, also from a checkpoint in `output_dir`."""
    case = CASES[name]
    if "global_batch_size" not in more:
        more["global_batch_size"] = GLOBAL_BATCH
    arguments = (output_dir, name, max_steps, more)
    results = [train(*arguments)] if case.num_ranks == 1 else run_on_ranks(train, case.num_ranks, *arguments)
    samples: dict[int, list[int]] = {}
    # Micro-batch i of a step belongs to rank i modulo the number of ranks.
    for micro_batches in zip(*(results[rank][0] for rank in case.readers), strict=True):
        for step, numbers in micro_batches:
            samples.setdefault(step, []).extend(numbers)
    torch.manual_seed(0)
    model = llama(4)
    load_checkpoint(str(output_dir / "checkpoints" / f"checkpoint-{max_steps}"), model)
    return Run(samples, results[0][1], model.state_dict())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run on one device with batches of 8 samples, without `global_batch_size`."""
    output_dir = tmp_path_factory.mktemp("reference")
    return run(output_dir, "one device in micro-batches of 3", global_batch_size=None, per_device_train_batch_size=8)


def assert_same(one: Run, other: Run, first_step: int = 0) -> None:
    assert one.samples == {step: numbers for step, numbers in other.samples.items() if step >= first_step}
    for step, loss in one.losses.items():
        assert loss == pytest.approx(other.losses[step], rel=TOLERANCE), step
    for name, tensor in one.weights.items():
        torch.testing.assert_close(tensor, other.weights[name], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_step_has_the_same_samples_and_loss_on_any_ranks(name: str, reference: Run, tmp_path: Path) -> None:
    assert len(reference.samples) == NUM_STEPS and len(reference.samples[2]) == NUM_SAMPLES % GLOBAL_BATCH
    assert_same(run(tmp_path, name), reference)


def test_run_moves_between_world_sizes_inside_epochs(reference: Run, tmp_path: Path) -> None:
    legs = [
        ("ddp 3, dispatched", 1),
        ("ddp 2, sharded", 2),
        ("ddp 3, sharded", 4),
        ("pipeline 2", 5),
        ("one device in micro-batches of 3", NUM_STEPS),
    ]
    first_step, samples = 0, {}
    for name, max_steps in legs:
        moved = run(tmp_path, name, max_steps)
        assert all(step >= first_step for step in moved.samples)
        samples.update(moved.samples)
        first_step = max_steps
    assert samples == reference.samples
    assert_same(moved, reference, legs[-2][1])
