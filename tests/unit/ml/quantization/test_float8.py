"""Float8 training: converted layers and rejected settings. Training itself needs other hardware."""

import logging

import pytest
import torch
from torch import nn

from forgather.ml.quantization.float8 import FP8_RECIPES, capability_problem, convert_to_fp8, require_fp8


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 40, bias=False), nn.Linear(40, 32), nn.Linear(32, 16))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_layers_are_converted_in_place_except_unsuitable_ones(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    head = model[3]
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    with caplog.at_level(logging.INFO):
        report = convert_to_fp8(model, recipe, keep=[head])
    assert report.converted == ["0"]
    assert report.skipped == {
        "1": "out_features=40 cannot be divided by 16",
        "2": "in_features=40 cannot be divided by 16",
        "3": "kept in full precision",
    }
    assert type(model[0]).__name__ == "Float8Linear" and type(model[1]) is nn.Linear and model[3] is head
    assert list(model.state_dict()) == keys
    assert all(one is parameters[name] for name, one in model.named_parameters())
    assert f"fp8_recipe='{recipe}': converted 1/4 linear layers." in caplog.text
    assert "skipped 1: out_features=40 cannot be divided by 16." in caplog.text


def test_dim_alignment_selects_layers_and_converting_twice_changes_nothing() -> None:
    model = make_model()
    assert convert_to_fp8(model, "rowwise", dim_alignment=8).converted == ["0", "1", "2", "3"]
    layers = list(model)
    assert convert_to_fp8(model, "rowwise", dim_alignment=8).converted == ["0", "1", "2", "3"]
    assert list(model) == layers


def test_layer_under_two_names_stays_shared() -> None:
    model = nn.Module()
    model.one = nn.Linear(32, 32)
    model.two = model.one
    model.part = nn.Sequential(model.one)
    report = convert_to_fp8(model, "tensorwise")
    assert report.converted == ["one"]
    assert model.two is model.one is model.part[0] and type(model.one) is not nn.Linear


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_any_number_of_tokens_can_be_trained(recipe: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, dtype=torch.bfloat16), nn.Linear(64, 32, dtype=torch.bfloat16))
    tokens = torch.randn((30, 32), dtype=torch.bfloat16)

    def gradients() -> list[torch.Tensor]:
        return list(torch.autograd.grad(model(tokens).square().sum(), list(model.parameters())))

    expected = gradients()
    convert_to_fp8(model, recipe)
    for found, plain in zip(gradients(), expected, strict=True):
        assert (found - plain).norm() < 0.1 * plain.norm()
    # The gradient of a weight is a product over tokens. GPUs reject it in float8 unless the token count is padded to
    # 16.
    assert all(layer.config.pad_inner_dim for layer in model) == (recipe != "rowwise_with_gw_hp")


def test_unsupported_hardware_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"but the device is 'cpu', which cannot.*mixed_precision='bf16'"):
        require_fp8("tensorwise", "cpu")
    assert capability_problem((8, 0), "A100") == (
        "the GPU (A100) has compute capability 8.0, and float8 needs at least 8.9"
    )
    assert capability_problem((8, 9), "L4") is None and capability_problem((12, 0), "B200") is None


def test_unknown_recipe_is_rejected_with_the_known_ones() -> None:
    for work in (lambda: require_fp8("blockwise", "cpu"), lambda: convert_to_fp8(make_model(), "blockwise")):
        with pytest.raises(ValueError, match="'blockwise': there is no such recipe; choose from 'tensorwise'"):
            work()


def test_model_that_is_a_single_layer_is_not_converted() -> None:
    model = nn.Linear(32, 32)
    assert convert_to_fp8(model, "tensorwise").converted == []
    assert type(model) is nn.Linear and isinstance(model(torch.ones(1, 32)), torch.Tensor)
