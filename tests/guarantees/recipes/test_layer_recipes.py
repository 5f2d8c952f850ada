"""`qat_recipe` and `fp8_recipe` through the trainers."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forgather.ml.quantization.qat import prepared_for
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.ddp import DDPTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.recipes.layers import apply_layer_recipe
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import Result, run
from tests.support.pipelines import trainer_of, whole_result
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import TokenModel, quiet_trainer, tiny_llama, token_samples

RECIPES = ["int8-dynamic-act-int4-weight", "int4-weight-only"]
SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 8,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "momentum": 0.9,
}


def aligned_llama() -> nn.Module:
    """Return a Llama with dimensions that are multiples of the group size 32."""
    return tiny_llama(None, hidden_size=32, intermediate_size=64)


def qat_run(output_dir: Path, kind: type[Trainer], recipe: str, settings: dict[str, Any]) -> Result:
    merged = {**SETTINGS, **settings}
    trainer = trainer_of(kind, output_dir, aligned_llama, token_samples(48), qat_recipe=recipe, **merged)
    return whole_result(trainer) if kind is not Trainer else run(trainer)


@pytest.mark.parametrize("recipe", RECIPES)
def test_qat_resumes_a_plain_checkpoint_and_back(recipe: str, tmp_path: Path) -> None:
    saving = {**SETTINGS, "save_strategy": "steps", "save_steps": 3}
    trainer_of(Trainer, tmp_path, aligned_llama, token_samples(48), **{**saving, "max_steps": 3}).train()
    trained = trainer_of(Trainer, tmp_path, aligned_llama, token_samples(48), qat_recipe=recipe, **saving)
    result = run(trained)
    assert len(result.losses) == 3
    plain = trainer_of(Trainer, tmp_path, aligned_llama, token_samples(48), **{**saving, "max_steps": 9})
    assert run(plain).weights.keys() == result.weights.keys()


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantisation_changes_the_loss_which_still_falls(recipe: str, tmp_path: Path) -> None:
    plain = run(trainer_of(Trainer, tmp_path / "plain", aligned_llama, token_samples(48), **SETTINGS))
    quantised = qat_run(tmp_path / "qat", Trainer, recipe, {"max_steps": 12})
    assert quantised.losses[0] != plain.losses[0]
    assert quantised.losses[0] == pytest.approx(plain.losses[0], rel=0.05)
    assert min(quantised.losses[-3:]) < quantised.losses[0]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(DDPTrainer, {"per_device_train_batch_size": 4}), (PipelineTrainer, {"schedule": "1f1b", "n_microbatches": 2})],
)
def test_other_trainers_train_like_one_device(kind: type[Trainer], settings: dict[str, Any], tmp_path: Path) -> None:
    expected = qat_run(tmp_path / "single", Trainer, "int4-weight-only", {})
    for result in run_on_ranks(qat_run, 2, tmp_path / "parallel", kind, "int4-weight-only", settings):
        assert result.losses[:2] == pytest.approx(expected.losses[:2], rel=1e-6)
        # A weight between two quantised values may be rounded either way. The first step where this happens depends on
        # the rounding of matrix products on this CPU.
        assert result.losses == pytest.approx(expected.losses, rel=3e-3)


def test_second_run_does_not_replace_layers_again(tmp_path: Path) -> None:
    model = aligned_llama()
    trainer = quiet_trainer(tmp_path, model, token_samples(16), qat_recipe=RECIPES[1], max_steps=1)
    trainer.train()
    kinds = {type(module) for module in model.modules()}
    trainer.train(resume_from_checkpoint=False)
    assert {type(module) for module in model.modules()} == kinds
    assert any(kind is not nn.Linear and issubclass(kind, nn.Linear) for kind in kinds)
    assert type(model.get_output_embeddings()) is nn.Linear  # type: ignore[operator]


def test_rebuilt_model_is_prepared_again(tmp_path: Path) -> None:
    options = {"model_init": aligned_llama}
    trainer = quiet_trainer(
        tmp_path, None, token_samples(8), trainer_options=options, qat_recipe=RECIPES[1], max_steps=1
    )
    trainer.train()
    first = trainer.model
    trainer.train(resume_from_checkpoint=False)
    assert trainer.model is not first
    assert prepared_for(trainer.unwrapped_model()) == RECIPES[1]


def test_float8_converts_aligned_layers_except_the_head() -> None:
    # Without a trainer, which would require hardware with float8 support.
    model: Any = aligned_llama()
    apply_layer_recipe(model, TrainingArguments(output_dir="unused", fp8_recipe="rowwise", fp8_dim_alignment=32))
    attention = model.model.layers[0].self_attn
    assert type(attention.q_proj).__name__ == "Float8Linear"
    assert attention.k_proj.out_features == 16 and type(attention.k_proj) is nn.Linear
    assert type(model.lm_head) is nn.Linear


def test_prepared_model_rejects_another_recipe_and_warns_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = aligned_llama()
    quiet_trainer(tmp_path, model, token_samples(16), qat_recipe=RECIPES[1], max_steps=1).train()
    with pytest.raises(ValueError, match=r"prepared for 'int4-weight-only' .*Build the model again"):
        quiet_trainer(tmp_path, model, token_samples(16), qat_recipe=RECIPES[0], max_steps=1).train()
    quiet_trainer(tmp_path, model, token_samples(16), max_steps=1).train()
    assert "trains with fake quantisation for 'int4-weight-only'" in caplog.text


# --- rejected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp8_recipe": "tensorwise"}, r"fp8_recipe='tensorwise'.*(cpu|CPU)"),
        ({"qat_recipe": "float8-dynamic-act-float8-weight"}, r"float8-dynamic-act-float8-weight.*(cpu|CPU)"),
        ({"fp8_recipe": "fast"}, r"fp8_recipe='fast' cannot be used: choose one of None, 'tensorwise'"),
        (
            {"qat_recipe": "int2"},
            r"qat_recipe='int2' cannot be used: choose one of None, 'int8-dynamic-act-int4-weight'",
        ),
        ({"fp8_dim_alignment": 0}, r"fp8_dim_alignment=0 cannot be used"),
        (
            {"fp8_recipe": "tensorwise", "qat_recipe": "int4-weight-only"},
            r"fp8_recipe='tensorwise' cannot be combined with qat_recipe='int4-weight-only'",
        ),
    ],
)
def test_invalid_recipes_are_rejected_at_construction(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        quiet_trainer(tmp_path, TokenModel(), token_samples(2), **settings)


def test_model_without_a_layer_to_replace_trains_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING):
        result = run(quiet_trainer(tmp_path, TokenModel(), token_samples(8), qat_recipe=RECIPES[0], **SETTINGS))
    assert len(result.losses) == 6
    assert "converted 0/1 linear layers" in caplog.text
