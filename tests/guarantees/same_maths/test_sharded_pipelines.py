"""Pipelines with sharded stages (FSDP2 x PP) train like one device: schedules, tied weights, recipes and generation."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forgather.ml.loss import LinearCrossEntropyLoss
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.hybrid.hybrid_arguments import DP_STRATEGIES
from tests.guarantees.same_maths.test_pipeline_equality import on_one_device, trainer, with_evaluations
from tests.support.data_parallel import Result, assert_same_training
from tests.support.pipelines import joined, llama, trainer_of, whole_result
from tests.support.ranks import run_on_ranks
from tests.support.sampling import sampled
from tests.support.tiny_models import token_samples, weights

ALL_CASES = (
    ("llama", "gpipe", "sgd"),
    ("tied_gpt2", "1f1b", "adamw"),
    ("llama", "interleaved1f1b", "adamw"),
    ("tied_gpt2", "zbv", "sgd"),
    ("llama", "interleavedzerobubble", "sgd"),
    ("tied_gpt2", "dualpipev", "adamw"),
)
CASES = sampled(ALL_CASES, ALL_CASES[2:4])


def in_sharded_pipelines(output_dir: str) -> list[Result]:
    results = []
    for number, (model, schedule, optimizer) in enumerate(CASES):
        settings: dict[str, Any] = {
            "schedule": schedule,
            "per_device_train_batch_size": 4,
            "n_microbatches": 4,
            "dp_size": 2,
            "dp_strategy": "shard",
            "dispatch_batches": schedule != "1f1b",
        }
        one = trainer(HybridTrainer, f"{output_dir}/{number}", model, 4, optimizer, **settings)
        results.append(with_evaluations(whole_result(one), one))
    return results


def test_every_schedule_trains_like_one_device(tmp_path: Path) -> None:
    """With uneven labels and evaluations, gradient accumulation, clipping, and a last batch that is not full."""
    ranks = run_on_ranks(in_sharded_pipelines, 4, str(tmp_path))
    for number, (model, schedule, optimizer) in enumerate(CASES):
        reference = on_one_device(model, 4, optimizer, str(tmp_path / "one"))
        for rank, results in enumerate(ranks):
            try:
                assert_same_training(reference, results[number])
            except AssertionError as difference:
                raise AssertionError(f"{model} with {schedule} on rank {rank}: {difference}") from None


# --- recipes


class WithRecipes(NamedTuple):
    """Results of a run with several recipes on one rank."""

    result: Result
    averages: dict[str, Tensor]
    """Averaged weights (EMA) of all ranks."""
    tokens: list[list[int]]
    generated_while_gathered: list[list[int]]


def llama_with_unused_parameter() -> nn.Module:
    model = llama(4, vocab_size=33)
    model.lm_head.unused = nn.Parameter(torch.ones(3))
    return model


class Generating:
    """Callback that generates after an evaluation, while the weights are already gathered."""

    changes_control = False
    needs_all_ranks = True

    def __init__(self) -> None:
        self.trainer: HybridTrainer | None = None
        self.tokens: list[list[int]] = []

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        with self.trainer._gathered():
            self.tokens = generated(self.trainer)


def generated(of: HybridTrainer) -> list[list[int]]:
    prompts = torch.arange(12).reshape(2, 6)
    return of.pipeline_generate(prompts, 4, do_sample=False, eos_token_id=31, pad_token_id=0).tolist()


def with_recipes(output_dir: str) -> list[WithRecipes]:
    """Train with both strategies."""
    runs = []
    for strategy in DP_STRATEGIES:
        generating = Generating()
        one = trainer_of(
            HybridTrainer,
            Path(output_dir) / strategy,
            llama_with_unused_parameter,
            token_samples(48),
            generating,
            trainer_options={
                "eval_dataset": token_samples(5),
                "fused_loss_factory": LinearCrossEntropyLoss,
                "optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}),
            },
            schedule="loopedbfs",
            pp_size=2,
            n_microbatches=2,
            dp_strategy=strategy,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing="full",
            ema_decay=0.5,
            eval_strategy="steps",
            eval_steps=2,
            logging_strategy="steps",
            logging_steps=1,
            max_steps=4,
        )
        assert isinstance(one, HybridTrainer)
        generating.trainer = one
        result = with_evaluations(whole_result(one), one)
        with one.averaged_weights():
            averages = joined(weights(one.pipeline.part))
        runs.append(WithRecipes(result, averages, generated(one), generating.tokens))
    return runs


def test_recipes_and_generation_equal_replicated_stages(tmp_path: Path) -> None:
    """Fused loss, gradient checkpointing, EMA, a parameter without gradients, and an odd number of rows."""
    for replicated, sharded in run_on_ranks(with_recipes, 4, str(tmp_path)):
        assert_same_training(replicated.result, sharded.result)
        assert_same_training(
            replicated.result._replace(weights=replicated.averages), sharded.result._replace(weights=sharded.averages)
        )
        assert replicated.tokens == sharded.tokens == sharded.generated_while_gathered
        # Weight decay would have changed it if it had a gradient of zero.
        assert torch.equal(sharded.result.weights["lm_head.unused"], torch.ones(3))
