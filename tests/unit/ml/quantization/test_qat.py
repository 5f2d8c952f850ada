"""Quantisation-aware training (QAT): prepared models train like plain models, and convert with the same loss."""

import copy
import logging
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from forgather.ml.quantization.layer_report import output_head
from forgather.ml.quantization.qat import QAT_RECIPES, convert_qat, prepare_qat, recipe_to_base_config, require_qat

INT_RECIPES = QAT_RECIPES[:2]
FLOAT8 = QAT_RECIPES[2]
IDS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**(sizes | {"num_attention_heads": 2, "use_cache": False} | changes)))


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(input_ids=IDS, labels=IDS).loss
    return loss


def train(model: nn.Module, num_steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(num_steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", QAT_RECIPES)
def test_prepare_keeps_parameters_names_and_layers(recipe: str) -> None:
    model = tiny_llama()
    keys, modules = list(model.state_dict()), dict(model.named_modules())
    parameters, values = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    report = prepare_qat(model, recipe, keep=output_head(model))
    assert (len(report.converted), report.total) == (14, 15)
    assert report.skipped == {"lm_head": "kept in full precision"}
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == list(parameters)
    assert all(one is parameters[name] for name, one in model.named_parameters())
    assert all(model.get_submodule(name) is module for name, module in modules.items())
    assert all(torch.equal(one, values[name]) for name, one in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("recipe", INT_RECIPES)
def test_prepared_model_trains_and_converts_with_the_same_loss(recipe: str) -> None:
    model = tiny_llama()
    prepare_qat(model, recipe, keep=output_head(model))
    losses = train(model, 12)
    assert losses[-1] < losses[0] - 0.5
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    plain = tiny_llama()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        as_trained, in_full = loss_of(model.eval()), loss_of(plain.eval())
        for source in (model, plain):
            report = convert_qat(source, recipe, keep=output_head(source))
            assert (len(report.converted), report.total) == (14, 15)
            assert loss_of(source).item() == pytest.approx(as_trained.item(), abs=1e-5)
    assert as_trained != in_full
    assert "Intx" in type(model.model.layers[0].mlp.up_proj.weight).__name__


def most_values_in_a_group(weight: Tensor, group_size: int) -> int:
    return max(len(group.unique()) for group in weight.reshape(-1, group_size))


@pytest.mark.parametrize("group_size", [32, 16])
@pytest.mark.parametrize("recipe", INT_RECIPES)
def test_int4_weights_have_at_most_sixteen_values_per_group(recipe: str, group_size: int) -> None:
    model = tiny_llama()
    convert_qat(model, recipe, group_size=group_size)
    weight = model.model.layers[0].mlp.up_proj.weight.dequantize()
    assert 8 < most_values_in_a_group(weight, group_size) <= 16
    assert most_values_in_a_group(weight, 2 * group_size) > 16, "two groups should have two scales"


def test_unaligned_and_tied_layers_are_skipped_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_llama(intermediate_size=48, tie_word_embeddings=True)
    with caplog.at_level(logging.INFO):
        report = prepare_qat(model, "int4-weight-only")
    reason = "in_features=48 cannot be divided by the group size 32"
    assert report.skipped == {
        "model.layers.0.mlp.down_proj": reason,
        "model.layers.1.mlp.down_proj": reason,
        "lm_head": "it shares its weight with another layer",
    }
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "qat_recipe='int4-weight-only': converted 12/15 linear layers." in caplog.text
    assert f"skipped model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj: {reason}." in caplog.text
    assert prepare_qat(tiny_llama(), "int4-weight-only", group_size=16).skipped == {}


def test_prepare_works_twice_with_copies_stages_and_hooks() -> None:
    model = tiny_llama()
    calls: list[str] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: calls.append("up_proj"))
    layer = model.model.layers[0]
    stage = nn.ModuleDict({"0": layer})
    assert len(prepare_qat(stage, "int4-weight-only").converted) == 7
    again = prepare_qat(model, "int4-weight-only", keep=output_head(model))
    assert (len(again.converted), again.total) == (14, 15)
    with torch.no_grad():
        assert loss_of(copy.deepcopy(model)) == loss_of(model)
    assert calls == ["up_proj"] * 2


def test_torch_attention_keeps_its_own_linear_layer() -> None:
    model = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    report = prepare_qat(model, "int4-weight-only")
    assert report.converted == ["linear1", "linear2"]
    assert list(report.skipped) == ["self_attn.out_proj"]


def test_gradient_checkpointing_and_autocast_keep_gradients_and_losses() -> None:
    model = tiny_llama()
    prepare_qat(model, "int8-dynamic-act-int4-weight", keep=output_head(model))
    loss_of(model).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    loss_of(model.train()).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    with torch.autocast("cpu", torch.bfloat16):
        assert loss_of(model).item() == pytest.approx(loss_of(tiny_llama()).item(), rel=0.02)


def test_float8_gradients_reach_the_weights_but_cpu_is_rejected() -> None:
    """Without a straight-through estimator, all gradients of the attention would be zero."""
    plain, model = tiny_llama(), tiny_llama()
    prepare_qat(model, FLOAT8, keep=output_head(model))
    loss_of(plain).backward()
    loss_of(model).backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        similarity = torch.cosine_similarity(parameter.grad.flatten(), model.get_parameter(name).grad.flatten(), dim=0)  # type: ignore[union-attr]
        assert similarity > 0.7, name
    with pytest.raises(ValueError, match="only on hardware that multiplies in float8, and the device is 'cpu'"):
        require_qat(FLOAT8, "cpu")
    for recipe in INT_RECIPES:
        require_qat(recipe, "cpu")


def test_unknown_recipe_is_rejected_with_the_known_ones() -> None:
    for work in (lambda: recipe_to_base_config("int3"), lambda: require_qat("int3", "cpu")):
        with pytest.raises(ValueError, match="'int3': there is no such recipe; choose from 'int8-dynamic-act"):
            work()


def test_importing_the_recipes_does_not_import_torchao() -> None:
    program = "import sys, forgather.ml.quantization.qat, forgather.ml.quantization.float8; sys.exit('torchao' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
