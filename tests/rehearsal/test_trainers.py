"""Each trainer on the rehearsal device: training, save, resume, evaluation and generation.

Host waits between logs, hazards of pinned memory and streams, mixed devices and deadlocks by NCCL's order fail here.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from forgather.ml.trainer import AccelTrainer
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.fsdp2 import FSDP2Trainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.hybrid.hybrid_arguments import DP_STRATEGIES
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.pipeline.schedules import SCHEDULES
from forgather.ml.trainer.trainer import Trainer
from tests.support.pipelines import llama
from tests.support.ranks import run_on_ranks
from tests.support.rehearsal import find_deadlocks
from tests.support.rehearsal.jobs import LOG_STEPS, NUM_STEPS, SAVE_STEP, Report, train_save_and_resume
from tests.support.rehearsal.ranks import environment
from tests.support.tiny_models import quiet_trainer, tiny_llama, token_samples

NUM_SAMPLES = 100
BATCH_SIZE = 4
SCHEDULE_NAMES = [traits.name for traits in SCHEDULES.values()]


def build(
    trainer_class: type[Trainer[Any]],
    options: dict[str, Any],
    settings: dict[str, Any],
    output_dir: Path,
    *callbacks: Any,
    **more: Any,
) -> Trainer[Any]:
    if trainer_class is AccelTrainer:
        # Accelerate keeps its state in classes, for the lifetime of the process.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        options = {"accelerator": Accelerator(), **options}
    elif trainer_class is not Trainer:
        options = {"distributed_env": environment(), **options}
    return quiet_trainer(
        output_dir,
        None,
        token_samples(NUM_SAMPLES),
        *callbacks,
        trainer_class=trainer_class,
        trainer_options={"optimizer_cls_and_kwargs": None, "eval_dataset": token_samples(7), **options},
        per_device_train_batch_size=BATCH_SIZE,
        **{"max_grad_norm": 1.0, **settings, **more},
    )


def evaluate(trainer: Trainer[Any]) -> float:
    return float(trainer.evaluate()["eval_loss"])


def evaluate_and_generate(trainer: PipelineTrainer[Any]) -> tuple[float, list[list[int]]]:
    prompts = torch.arange(12).reshape(2, 6)
    tokens = trainer.pipeline_generate(prompts, 4, do_sample=False, eos_token_id=31, pad_token_id=0)
    return evaluate(trainer), tokens.tolist()


def assert_sound(report: Report, device: str = "cuda:0") -> None:
    """Check everything but host waits."""
    assert report.hazards == []
    assert report.devices == {device}
    assert len(report.losses) == NUM_STEPS // LOG_STEPS and all(map(math.isfinite, report.losses))
    assert report.first_steps == [1, SAVE_STEP + 1] and report.saved == [SAVE_STEP, NUM_STEPS]
    assert report.waits.keys() == {3, 5, 6, 9, 11, 12}


def assert_no_waits(report: Report) -> None:
    assert not any(report.waits.values()), report.waits


def assert_ranks_are_sound(reports: Sequence[Report]) -> None:
    for rank, report in enumerate(reports):
        assert_sound(report, f"cuda:{rank}")
        assert report.result == reports[0].result
    assert find_deadlocks([report.trace for report in reports]) == []


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_trainer_does_not_wait_between_logs(tmp_path: Path, precision: str) -> None:
    job = functools.partial(build, Trainer, {"model_init": tiny_llama}, PRECISIONS[precision])
    report = train_save_and_resume(job, tmp_path, evaluate)
    assert_sound(report)
    assert_no_waits(report)


def test_fp16_waits_only_for_the_flag_of_the_step_before(tmp_path: Path) -> None:
    # The learning rate of a step depends on whether GradScaler skipped the step before.
    job = functools.partial(build, Trainer, {"model_init": tiny_llama}, {"mixed_precision": "fp16"})
    report = train_save_and_resume(job, tmp_path, evaluate)
    assert_sound(report)
    for waits in report.waits.values():
        (((name, where), number),) = waits.items()
        assert (name, number) == ("event.synchronize", 1) and "nonfinite.py" in where


def ddp_job(output_dir: Path, settings: dict[str, Any]) -> Report:
    job = functools.partial(build, DDPTrainer, {"model_init": tiny_llama}, settings)
    return train_save_and_resume(job, output_dir, evaluate)


@pytest.mark.parametrize("dispatch", [False, True])
def test_ddp_does_not_wait_between_logs(tmp_path: Path, dispatch: bool) -> None:
    reports = run_on_ranks(ddp_job, 2, tmp_path, {"dispatch_batches": dispatch})
    assert_ranks_are_sound(reports)
    for report in reports:
        assert_no_waits(report)


def fsdp2_job(output_dir: Path, settings: dict[str, Any]) -> Report:
    job = functools.partial(build, FSDP2Trainer, {"model_init": tiny_llama}, settings)
    return train_save_and_resume(job, output_dir, evaluate)


SHARDED: dict[str, tuple[int, dict[str, Any]]] = {
    "every rank reads": (2, {"dispatch_batches": False}),
    "unused parameters": (2, {"fsdp2": {"find_unused_parameters": True}}),
    "accumulation in bf16": (2, {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}),
    "replicas": (4, {"fsdp2": {"replicate_size": 2}}),
}


@pytest.mark.parametrize("name", SHARDED)
def test_fsdp2_does_not_wait_between_logs(tmp_path: Path, name: str) -> None:
    num_ranks, settings = SHARDED[name]
    reports = run_on_ranks(fsdp2_job, num_ranks, tmp_path, settings)
    assert_ranks_are_sound(reports)
    for report in reports:
        assert_no_waits(report)


def accelerate_job(output_dir: Path) -> Report:
    environment()
    job = functools.partial(build, AccelTrainer, {"model_init": tiny_llama}, {})
    return train_save_and_resume(job, output_dir, evaluate)


def test_accelerate_does_not_wait_between_logs(tmp_path: Path) -> None:
    reports = run_on_ranks(accelerate_job, 2, tmp_path)
    assert_ranks_are_sound(reports)
    for report in reports:
        assert_no_waits(report)


def pipeline_job(output_dir: Path, schedule: str) -> Report:
    options = {"model_init": functools.partial(llama, 4), "pipe_schedule_factory": schedule}
    job = functools.partial(build, PipelineTrainer, options, {"n_microbatches": 4})
    return train_save_and_resume(job, output_dir, evaluate_and_generate)


def hybrid_job(output_dir: Path, dp_strategy: str) -> Report:
    options = {"model_init": functools.partial(llama, 4), "pipe_schedule_factory": "1f1b"}
    settings = {"n_microbatches": 4, "pp_size": 2, "dp_strategy": dp_strategy}
    job = functools.partial(build, HybridTrainer, options, settings)
    return train_save_and_resume(job, output_dir, evaluate_and_generate)


@pytest.fixture(scope="module", params=[*SCHEDULE_NAMES, *DP_STRATEGIES])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    """Run a schedule, or the hybrid trainer with a strategy, and return the reports of its ranks."""
    name: str = request.param
    job, num_ranks = (hybrid_job, 4) if name in DP_STRATEGIES else (pipeline_job, 2)
    return run_on_ranks(job, num_ranks, tmp_path_factory.mktemp(name), name)


def test_pipelines_train_resume_and_generate_without_deadlock(reports: list[Report]) -> None:
    assert_ranks_are_sound(reports)
    tokens = reports[0].result[1]
    assert [len(row) for row in tokens] == [10, 10]


def test_pipelines_do_not_wait_between_logs(reports: list[Report]) -> None:
    for report in reports:
        assert_no_waits(report)
