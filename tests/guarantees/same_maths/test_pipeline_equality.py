"""A pipeline trains like one device: every schedule, 2 and 4 ranks, tied weights, uneven labels, and evaluations."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import Result, assert_same_training, run
from tests.support.pipelines import llama, tied_gpt2, trainer_of, whole_result
from tests.support.ranks import run_on_ranks
from tests.support.sampling import RUNS_ALL, sampled
from tests.support.tiny_models import IGNORED, token_samples

SINGLE_STAGE = ("gpipe", "1f1b")
SCHEDULES = (*SINGLE_STAGE, "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbv", "dualpipev")
MODELS = {
    # Narrow, because on one device too the gradient norm is a float32 sum of squares with rounding errors.
    "llama": functools.partial(llama, hidden_size=8, intermediate_size=12),
    "tied_gpt2": functools.partial(tied_gpt2, width=8),
}
NUM_SAMPLES = 75
"""Not divisible by the batch size: the last batch of an epoch is not full."""
GLOBAL_BATCH = 8
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    # Beyond the first epoch, which has five steps.
    "max_steps": 6,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "max_grad_norm": 1.0,
    "per_device_eval_batch_size": 6,
    "eval_strategy": "steps",
    "eval_steps": 3,
}
SGD: dict[str, Any] = {"momentum": 0.9, "learning_rate": 0.005}


def adamw() -> tuple[type, dict[str, Any]]:
    return torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-2, "weight_decay": 0.1}


def trainer(
    trainer_class: type[Trainer], output_dir: str, model: str, num_layers: int, optimizer: str, **settings: Any
) -> Trainer:
    options: dict[str, Any] = {"eval_dataset": token_samples(15, seed=3)}
    if optimizer == "adamw":
        options["optimizer_cls_and_kwargs"] = adamw()
    return trainer_of(
        trainer_class,
        Path(output_dir),
        functools.partial(MODELS[model], num_layers),
        token_samples(NUM_SAMPLES),
        trainer_options=options,
        **{**SETTINGS, **SGD, **settings},
    )


def with_evaluations(result: Result, of: Trainer) -> Result:
    """Add the evaluation losses to the losses, so that they are compared too."""
    return result._replace(
        losses=result.losses + [one["eval_loss"] for one in of.state.log_history if "eval_loss" in one]
    )


@functools.cache
def on_one_device(model: str, num_layers: int, optimizer: str, output_dir: str) -> Result:
    one = trainer(Trainer, output_dir, model, num_layers, optimizer, per_device_train_batch_size=GLOBAL_BATCH)
    result = with_evaluations(run(one), one)
    assert len(result.losses) == SETTINGS["max_steps"] + 2
    return result


@pytest.fixture(scope="module")
def reference_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("one_device"))


def in_pipelines(output_dir: str, cases: list[tuple[str, str, str, int]]) -> list[Result]:
    """Train each case on ranks; the last item of a case is the number of pipelines that share the global batch."""
    results = []
    for number, (model, schedule, optimizer, num_pipelines) in enumerate(cases):
        num_ranks = torch.distributed.get_world_size() // num_pipelines
        num_stages = num_ranks * (1 if schedule in SINGLE_STAGE else 2)
        batch_size = GLOBAL_BATCH // num_pipelines
        settings: dict[str, Any] = {
            "schedule": schedule,
            "per_device_train_batch_size": batch_size,
            # DualPipeV fills the pipeline before the first backward pass.
            "n_microbatches": num_stages if schedule == "dualpipev" else min(4, batch_size),
        }
        trainer_class: type[Trainer] = PipelineTrainer
        if num_pipelines > 1:
            trainer_class = HybridTrainer
            settings |= {"dp_size": num_pipelines, "dispatch_batches": schedule != "1f1b"}
        one = trainer(trainer_class, f"{output_dir}/{number}", model, 2 * num_ranks, optimizer, **settings)
        results.append(with_evaluations(whole_result(one), one))
    return results


def assert_equal_to_one_device(
    tmp_path: Path, reference_dir: str, num_ranks: int, cases: list[tuple[str, str, str, int]]
) -> None:
    results = run_on_ranks(in_pipelines, num_ranks, str(tmp_path), cases)
    for number, (model, schedule, optimizer, num_pipelines) in enumerate(cases):
        # One layer for each stage; a rank may have two stages.
        num_layers = 2 * (num_ranks // num_pipelines)
        reference = on_one_device(model, num_layers, optimizer, reference_dir)
        for rank in range(num_ranks):
            try:
                assert_same_training(reference, results[rank][number])
            except AssertionError as difference:
                raise AssertionError(f"{model} with {schedule} and {optimizer} on rank {rank}: {difference}") from None


CASES = [(model, num_ranks) for model in MODELS for num_ranks in (2, 4)]


@pytest.mark.parametrize(("model", "num_ranks"), sampled(CASES, [("tied_gpt2", 4)]))
def test_every_schedule_trains_like_one_device(tmp_path: Path, reference_dir: str, model: str, num_ranks: int) -> None:
    # Tied weights do not affect the order of operations. A quick run tries all schedules on two ranks only.
    is_short = (model, num_ranks) == ("tied_gpt2", 4) or (num_ranks == 4 and not RUNS_ALL)
    schedules = ("1f1b", "interleaved1f1b", "zbv", "dualpipev") if is_short else SCHEDULES
    cases = [(model, schedule, "sgd", 1) for schedule in schedules]
    assert_equal_to_one_device(tmp_path, reference_dir, num_ranks, cases)


@pytest.mark.parametrize("num_ranks", sampled([2, 4], [2]))
def test_adamw_trains_like_one_device(tmp_path: Path, reference_dir: str, num_ranks: int) -> None:
    names = list(MODELS)
    schedules = tuple(SCHEDULES)[::2] if num_ranks == 2 else ("1f1b", "zbv")
    # Some schedules with alternating models: SGD covers all schedules with both models.
    cases = [(names[number % 2], schedule, "adamw", 1) for number, schedule in enumerate(schedules)]
    assert_equal_to_one_device(tmp_path, reference_dir, num_ranks, cases)


def test_two_pipelines_train_like_one_device_with_the_full_batch(tmp_path: Path, reference_dir: str) -> None:
    cases = [("llama", "gpipe", "sgd", 2), ("tied_gpt2", "1f1b", "sgd", 2), ("llama", "zbv", "sgd", 2)]
    cases += [("tied_gpt2", "interleavedzerobubble", "adamw", 2), ("llama", "interleaved1f1b", "adamw", 2)]
    cases = sampled(cases, [cases[0], cases[1], cases[3]])
    assert_equal_to_one_device(tmp_path, reference_dir, 4, cases)


def masked_samples(num_samples: int) -> list[dict[str, torch.Tensor]]:
    """Return left-padded samples with mask and positions; the length alternates after every eight samples."""
    generator = torch.Generator().manual_seed(7)
    samples = []
    for number in range(num_samples):
        length = 6 + 3 * (number // 8 % 2)
        input_ids = torch.randint(0, 32, (length,), generator=generator)
        mask = torch.ones(length, dtype=torch.int64)
        mask[: number % 3] = 0
        positions = (mask.cumsum(0) - 1).clamp(min=0)
        labels = input_ids.masked_fill(mask == 0, IGNORED)
        samples.append({"input_ids": input_ids, "attention_mask": mask, "position_ids": positions, "labels": labels})
    return samples


def masked_trainer(trainer_class: type[Trainer], output_dir: str, model: str, **settings: Any) -> Trainer:
    options = {"eval_dataset": masked_samples(13)[:8]}
    return trainer_of(
        trainer_class,
        Path(output_dir),
        functools.partial(MODELS[model], 4),
        masked_samples(64),
        trainer_options=options,
        **{**SETTINGS, **SGD, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, **settings},
    )


def masked_on_ranks(output_dir: str) -> list[Result]:
    results = []
    for model in MODELS:
        for schedule in ("1f1b", "interleavedzerobubble"):
            one = masked_trainer(PipelineTrainer, f"{output_dir}/{model}_{schedule}", model, schedule=schedule)
            results.append(with_evaluations(whole_result(one), one))
    return results


def test_masks_and_positions_reach_every_stage_at_any_length(tmp_path: Path) -> None:
    expected = []
    for model in MODELS:
        one = masked_trainer(Trainer, str(tmp_path / f"one_{model}"), model)
        expected += [with_evaluations(run(one), one)] * 2
    for results in run_on_ranks(masked_on_ranks, 2, str(tmp_path)):
        for reference, result in zip(expected, results, strict=True):
            assert_same_training(reference, result)


class MeanOfLogits:
    """Plain loss without a shift; the trainer must find out which labels it counts."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def plain_loss(output_dir: str, trainer_class: type[Trainer], token_weighted: bool) -> Result:
    one = trainer_of(
        trainer_class,
        Path(output_dir),
        llama,
        token_samples(40),
        trainer_options={"compute_loss_func": MeanOfLogits(), "eval_dataset": token_samples(7)},
        **{**SETTINGS, **SGD, "per_device_train_batch_size": 4, "token_weighted_loss": token_weighted},
    )
    if trainer_class is Trainer:
        return with_evaluations(run(one), one)
    return with_evaluations(whole_result(one), one)


@pytest.mark.parametrize("token_weighted", [True, False])
def test_custom_loss_weights_tokens_as_on_one_device(tmp_path: Path, token_weighted: bool) -> None:
    expected = plain_loss(str(tmp_path / "one"), Trainer, token_weighted)
    for result in run_on_ranks(plain_loss, 2, str(tmp_path / "two"), PipelineTrainer, token_weighted):
        assert_same_training(expected, result)
