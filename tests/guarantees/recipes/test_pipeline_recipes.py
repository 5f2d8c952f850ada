"""Recipes reach every stage of a pipeline, and its evaluations."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo import OptimizedModule

from forgather.ml.loss import LinearCrossEntropyLoss
from forgather.ml.quantization.qat import prepared_for
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.pipelines import llama, pipeline_trainer, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, token_samples

aligned_llama = functools.partial(llama, 4, hidden_size=32, intermediate_size=32)
"""Llama with dimensions that are multiples of the group size 32."""


class StageRecipes(NamedTuple):
    """Recipes in effect for one stage."""

    qat_recipe: str | None
    recomputes: bool
    is_compiled: bool


class OfRank(NamedTuple):
    """Results of a rank."""

    stages: list[StageRecipes]
    bf16_loss: float
    logits: list[Tensor | None]
    """Logits passed to callbacks for each batch, with a fused loss."""
    widths: set[int]
    """Last dimensions of the inputs of the fused loss."""


def stages_of_rank(output_dir: Path) -> list[StageRecipes]:
    trainer = pipeline_trainer(
        output_dir,
        aligned_llama,
        token_samples(4),
        schedule="interleaved1f1b",
        n_microbatches=2,
        per_device_train_batch_size=4,
        qat_recipe="int4-weight-only",
        gradient_checkpointing=True,
        torch_compile=True,
        torch_compile_backend="aot_eager",
    )
    # Build the stages without running them, because compilation would take long.
    trainer.save_model(str(output_dir / "model"))
    return [
        StageRecipes(
            prepared_for(trainer.pipeline.own[stage.stage_index]),
            any(getattr(module, "gradient_checkpointing", False) for module in stage.submod.modules()),
            isinstance(stage.submod, OptimizedModule),
        )
        for stage in trainer.pipeline.stages
    ]


def evaluating(kind: type[Trainer], output_dir: Path, *callbacks: Any, **settings: Any) -> Trainer:
    options = {"eval_dataset": token_samples(4), **settings.pop("trainer_options", {})}
    if kind is PipelineTrainer:
        settings |= {"n_microbatches": 2, "per_device_train_batch_size": 2}
    return trainer_of(
        kind, output_dir, llama, None, *callbacks, trainer_options=options, per_device_eval_batch_size=4, **settings
    )


def shown_logits(kind: type[Trainer], output_dir: Path, **options: Any) -> list[Tensor | None]:
    seen: list[Tensor | None] = []
    recorder = Recorder(on_prediction_step=lambda logits, **_: seen.append(logits))
    evaluating(kind, output_dir, recorder, trainer_options=options).evaluate()
    return seen


def job(output_dir: Path) -> OfRank:
    """Run all cases on ranks and return the results of this rank."""
    widths: set[int] = set()

    class Noting(LinearCrossEntropyLoss):
        def sum_over_targets(self, outputs: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
            widths.add(outputs.shape[-1])
            return super().sum_over_targets(outputs, labels, reduction)

    return OfRank(
        stages_of_rank(output_dir),
        evaluating(PipelineTrainer, output_dir, mixed_precision="bf16").evaluate()["eval_loss"],
        shown_logits(PipelineTrainer, output_dir, fused_loss_factory=Noting),
        widths,
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[OfRank]:
    """Results of one run on two ranks, shared by all tests."""
    return run_on_ranks(job, 2, tmp_path_factory.mktemp("ranks"))


def test_recipes_reach_every_stage_of_a_rank(ranks: list[OfRank]) -> None:
    assert [rank.stages for rank in ranks] == [[StageRecipes("int4-weight-only", True, True)] * 2] * 2


def test_evaluations_compute_in_the_precision_of_training(ranks: list[OfRank], tmp_path: Path) -> None:
    exact, rounded = (
        evaluating(Trainer, tmp_path, mixed_precision=precision).evaluate()["eval_loss"] for precision in (None, "bf16")
    )
    assert abs(exact - rounded) > 1e-5 * exact, "bf16 must change the loss"
    assert [rank.bf16_loss for rank in ranks] == pytest.approx([rounded] * 2, rel=1e-6)


def test_callbacks_get_logits_though_the_loss_is_computed_from_hidden_states(
    ranks: list[OfRank], tmp_path: Path
) -> None:
    first, last = ranks
    assert last.widths == {16} and not first.widths
    assert first.logits == [None]
    torch.testing.assert_close(last.logits, shown_logits(Trainer, tmp_path))
