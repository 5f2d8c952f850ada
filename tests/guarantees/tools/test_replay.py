"""A replayed step has the loss, gradients and random numbers of the run: bit for bit, or to 1e-6 on one device."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.output_lock import OutputDirLock
from forgather.ml.trainer.ddp import DDPTrainer
from forgather.ml.trainer.fsdp2 import FSDP2Trainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from forgather.tools.replay import ReplayError, ReplayReport, replay
from forgather.tools.samples import StepOrder
from tests.support.data_parallel import environment
from tests.support.pipelines import llama
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCAB_SIZE, TokenModel, token_samples

NUM_SAMPLES = 22
STEP = 6
"""A step in the second epoch, two steps after a checkpoint."""


class DroppingModel(TokenModel):
    """Model with dropout, so that the loss depends on the random numbers."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.embedding(input_ids), 0.3, self.training)
        logits: Tensor = self.head(torch.tanh(hidden))
        return logits


def small_llama() -> nn.Module:
    return llama(2)


def dropping_llama() -> nn.Module:
    return llama(2, attention_dropout=0.5)


def arguments(output_dir: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "seed": 3,
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "save_steps": 4,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        **more,
    }


def parts(model_init: Callable[[], nn.Module]) -> dict[str, Any]:
    return {"model_init": model_init, "train_dataset": token_samples(NUM_SAMPLES)}


def train(trainer_class: type[Trainer], model_init: Callable[[], nn.Module], args: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    options = {} if trainer_class is Trainer else {"distributed_env": environment()}
    trainer_class(args=args, default_callbacks=False, **parts(model_init), **options).train()


@pytest.fixture(scope="module")
def dropping_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("single") / "run"
    train(Trainer, DroppingModel, arguments(path))
    return path


def replayed(path: Path, step: int, to: int | None = None, **more: Any) -> ReplayReport:
    return replay(str(path), step, to, args=arguments(path), **parts(DroppingModel), **more)


def content(folder: Path) -> dict[str, tuple[int, int]]:
    paths = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def test_a_replay_has_the_bits_of_the_run_and_does_not_touch_it(dropping_run: Path) -> None:
    before = content(dropping_run)
    report = replayed(dropping_run, STEP)
    assert content(dropping_run) == before
    assert report.checkpoint_step == 4 and report.is_same_topology
    step = report.steps[0]
    assert step.logged is not None and step.logged.is_exact
    assert step.loss == step.logged.loss and step.grad_norm == step.logged.grad_norm
    # The norms of modules make the total norm, and the samples make the loss.
    assert math.hypot(*(one.norm for one in step.gradients)) == pytest.approx(step.grad_norm, rel=1e-6)
    total = sum(one.loss * one.num_targets for one in step.samples if one.loss is not None)
    assert total / step.num_targets == pytest.approx(step.loss, rel=1e-5)
    order = StepOrder.of(trainer_arguments(dropping_run), token_samples(NUM_SAMPLES))
    assert [one.index for one in step.samples] == [one.index for one in order.samples(STEP)]


def trainer_arguments(path: Path) -> Any:
    from forgather.ml.trainer.arguments.training_arguments import TrainingArguments

    return TrainingArguments(**arguments(path))


def test_a_replay_needs_no_lock_of_a_run_that_trains(dropping_run: Path) -> None:
    lock = OutputDirLock(str(dropping_run))
    lock.acquire()
    try:
        assert replayed(dropping_run, STEP).steps[0].loss is not None
    finally:
        lock.release()


def test_a_step_before_the_first_checkpoint_is_replayed_from_the_beginning(dropping_run: Path) -> None:
    report = replayed(dropping_run, 3)
    assert report.checkpoint is None
    assert report.steps[0].logged is not None and report.steps[0].logged.is_exact


def test_several_steps_are_replayed_in_one_go(dropping_run: Path) -> None:
    report = replayed(dropping_run, 5, 7)
    assert [step.step for step in report.steps] == [5, 6, 7]
    assert all(step.logged is not None and step.logged.is_exact for step in report.steps)


def test_an_index_of_another_step_and_a_step_after_the_end_are_refused(dropping_run: Path) -> None:
    present = {one.index for one in replayed(dropping_run, STEP).steps[0].samples}
    missing = next(index for index in range(NUM_SAMPLES) if index not in present)
    with pytest.raises(ReplayError, match=rf"step {STEP} has no sample with the dataset index {missing}"):
        replayed(dropping_run, STEP, without=[missing])
    with pytest.raises(ReplayError, match="The run ends at step 8, before step 12"):
        replayed(dropping_run, 12)


def test_a_replay_without_samples_is_the_step_of_a_run_that_skips_them(dropping_run: Path, tmp_path: Path) -> None:
    index = replayed(dropping_run, STEP).steps[0].samples[1].index
    assert index is not None
    report = replayed(dropping_run, STEP, without=[index])
    skipping = tmp_path / "run"
    start = str(dropping_run / "checkpoints" / "checkpoint-4")
    args = arguments(skipping, resume_from_checkpoint=start, skip_samples=[index])
    trainer = Trainer(args=args, default_callbacks=False, **parts(DroppingModel))
    trainer.train()
    losses = {record["step"]: record["loss"] for record in trainer.state.log_history if "grad_norm" in record}
    assert report.steps_without[0].loss == losses[STEP] != report.steps[0].loss
    assert index not in [one.index for one in report.steps_without[0].samples]


CASES: dict[str, tuple[type[Trainer], int, Callable[[], nn.Module], dict[str, Any]]] = {
    "ddp with dropout": (DDPTrainer, 2, DroppingModel, {"dispatch_batches": False, "replica_check_steps": 2}),
    "ddp, dispatched, global batch": (
        DDPTrainer,
        2,
        DroppingModel,
        {"gradient_accumulation_steps": 1, "global_batch_size": 8},
    ),
    "fsdp2": (FSDP2Trainer, 2, small_llama, {}),
    "pipeline": (PipelineTrainer, 2, small_llama, {"n_microbatches": 2}),
    "pipeline with dropout": (PipelineTrainer, 2, dropping_llama, {"n_microbatches": 2}),
    "hybrid": (HybridTrainer, 4, small_llama, {"pp_size": 2, "n_microbatches": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_several_ranks_is_replayed_on_one_device(tmp_path: Path, name: str) -> None:
    trainer_class, num_ranks, model_init, more = CASES[name]
    args = arguments(tmp_path / "run", **more)
    run_on_ranks(train, num_ranks, trainer_class, model_init, args)
    report = replay(str(tmp_path / "run"), STEP, args=trainer_class.arguments_class(**args), **parts(model_init))
    step = report.steps[0]
    assert report.num_ranks == num_ranks and not report.is_same_topology
    assert step.logged is not None
    if model_init is dropping_llama:
        assert_pipeline_note(report)
    else:
        assert step.logged.difference <= 1e-6, step.logged
        assert report.repeats_random_numbers and not report.notes


def assert_pipeline_note(report: ReplayReport) -> None:
    """Check that the report of a pipeline with dropout says what is exact, and what not."""
    assert not report.repeats_random_numbers
    (note,) = report.notes
    assert "Exact: the samples and their order, the learning rate, and the weights of the checkpoint." in note
    assert "Not exact: the dropout masks" in note
    assert "the weights drift" in note


class BrokenModel(TokenModel):
    """Model that overflows for the token 31, in a layer between others."""

    def __init__(self) -> None:
        super().__init__()
        self.overflow = Overflow()

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.overflow(self.embedding(input_ids), input_ids))
        return logits


class Overflow(nn.Module):
    def forward(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        return hidden / (input_ids != VOCAB_SIZE - 1).float().unsqueeze(-1)


def test_the_first_module_with_a_bad_value_is_named(tmp_path: Path) -> None:
    samples = [{key: value.clamp(max=30) for key, value in one.items()} for one in token_samples(16)]
    args = arguments(tmp_path / "run", max_steps=4, gradient_accumulation_steps=1, save_steps=1)
    order = StepOrder.of(trainer_arguments(tmp_path), samples)
    bad = StepOrder.of(order.args, samples).samples(1)[3].index
    samples[bad]["input_ids"][2] = VOCAB_SIZE - 1
    given = {"model_init": BrokenModel, "train_dataset": samples}
    with pytest.raises(RuntimeError, match="not finite"):
        Trainer(args=args, default_callbacks=False, **given).train()  # type: ignore[arg-type]
    report = replay(str(tmp_path / "run"), 2, args=args, without=[bad], **given)
    step = report.steps[0]
    assert step.first_nonfinite is not None and step.first_nonfinite.module == "overflow"
    assert step.first_nonfinite.rows == (1,) and step.first_nonfinite_gradient is not None
    assert step.worst_sample is not None and step.worst_sample.index == bad
    assert math.isfinite(report.steps_without[0].grad_norm or math.nan)
