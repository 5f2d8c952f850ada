"""Model construction: same model for every method; compiled and activation-checkpointed models keep their names."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from forgather.ml.trainer.setup.model_construction import build_model
from forgather.ml.trainer.trainer import Trainer
from tests.support.tiny_models import (
    TokenModel,
    quiet_trainer,
    saved_steps,
    tiny_llama,
    token_samples,
    weights,
)

CPU = torch.device("cpu")
INPUT = torch.arange(12).reshape(2, 6)
WAYS = ["default", "device", "meta"]


def unseeded_llama(**options: Any) -> nn.Module:
    """Build a Llama with weights from the trainer's seeded generator."""
    return tiny_llama(seed=None, **options)


def tied_llama() -> nn.Module:
    return unseeded_llama(tie_word_embeddings=True)


class WithBuffers(TokenModel):
    """Model with a persistent buffer, and a non-persistent buffer in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.full((3,), 2.0))
        self.tables = nn.Module()
        self.tables.register_buffer("positions", torch.arange(6).float() / 7, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        table = self.tables.get_buffer("positions")
        return super().forward(input_ids) * (1 + table[:, None]) * self.get_buffer("kept")[0]


def trainer_for(output_dir: Path, model_init: Any, construct_on: str = "default", **settings: Any) -> Trainer:
    options: dict[str, Any] = {"model_init": model_init}
    defaults: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "momentum": 0.9}
    samples = token_samples(8)
    return quiet_trainer(
        output_dir,
        None,
        samples,
        trainer_options=options,
        construct_model_on=construct_on,
        **{**defaults, **settings},
    )


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        outputs = model.eval()(input_ids=INPUT)
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert torch.equal(logits(one), logits(other))
    expected, got = weights(one), weights(other)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("model_init", [unseeded_llama, tied_llama, WithBuffers])
@pytest.mark.parametrize("construct_on", WAYS)
def test_loaded_model_does_not_depend_on_the_construction(tmp_path: Path, model_init: Any, construct_on: str) -> None:
    saved = trainer_for(tmp_path, model_init)
    saved.train()
    loaded = trainer_for(tmp_path, model_init, construct_on)
    assert loaded.train().global_step == 2
    assert_same(saved.unwrapped_model(), loaded.unwrapped_model())
    buffers = dict(saved.unwrapped_model().named_buffers())
    for name, buffer in loaded.unwrapped_model().named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert all(parameter.device == CPU for parameter in loaded.unwrapped_model().parameters())


def test_models_have_non_persistent_buffers() -> None:
    for model in (unseeded_llama(), WithBuffers()):
        assert {name for name, _ in model.named_buffers()} - set(model.state_dict())


@pytest.mark.parametrize("construct_on", WAYS)
def test_tied_weights_stay_tied_after_loading_and_training(tmp_path: Path, construct_on: str) -> None:
    trainer_for(tmp_path, tied_llama).train()
    trainer = trainer_for(tmp_path, tied_llama, construct_on, max_steps=4)
    trainer.train()
    model = trainer.unwrapped_model()
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    straight = trainer_for(tmp_path / "straight", tied_llama, max_steps=4)
    straight.train()
    assert_same(straight.unwrapped_model(), model)


@pytest.mark.parametrize("construct_on", WAYS)
def test_fresh_model_does_not_depend_on_the_construction(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, construct_on: str
) -> None:
    def fresh(way: str) -> nn.Module:
        trainer = trainer_for(tmp_path, unseeded_llama, way, max_steps=0, save_strategy="no")
        trainer.train()
        return trainer.unwrapped_model()

    expected = fresh("default")
    with caplog.at_level(logging.WARNING, logger="forgather"):
        got = fresh(construct_on)
    assert_same(expected, got)
    warned = any("construct_model_on='meta' needs a checkpoint" in message for message in caplog.messages)
    assert warned == (construct_on == "meta")


def test_meta_construction_allocates_no_weights_before_loading() -> None:
    devices: list[str] = []

    def note() -> nn.Module:
        model = nn.Linear(3, 3)
        devices.append(model.weight.device.type)
        return model

    model = build_model(note, CPU, "meta", None, will_be_loaded=True)
    assert devices == ["meta"]
    assert model.weight.device == CPU


@pytest.mark.parametrize("construct_on", WAYS)
@pytest.mark.parametrize("will_be_loaded", [False, True])
def test_default_dtype_applies_to_the_model_only(construct_on: str, will_be_loaded: bool) -> None:
    model = build_model(unseeded_llama, CPU, construct_on, "bfloat16", will_be_loaded)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_bfloat16_model_trains_and_is_saved_in_bfloat16(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, unseeded_llama, default_dtype="bf16")
    metrics = trainer.train().metrics
    assert 0 < metrics["train_loss"] < 10
    with safe_open(tmp_path / "checkpoints" / "checkpoint-2" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    resumed = trainer_for(tmp_path, unseeded_llama, default_dtype="bf16")
    resumed.train()
    assert_same(trainer.unwrapped_model(), resumed.unwrapped_model())


def test_gradient_checkpointing_changes_memory_but_not_the_result(tmp_path: Path) -> None:
    plain, saving = (
        trainer_for(tmp_path / str(enabled), unseeded_llama, gradient_checkpointing=enabled)
        for enabled in (False, True)
    )
    plain.train()
    saving.train()
    assert saving.unwrapped_model().is_gradient_checkpointing
    assert_same(plain.unwrapped_model(), saving.unwrapped_model())


def test_gradient_checkpointing_of_an_unsupported_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TokenModel .*gradient_checkpointing_enable"):
        trainer_for(tmp_path, TokenModel, gradient_checkpointing=True).train()


def test_enable_activation_checkpoint_fn_is_called(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    options: dict[str, Any] = {
        "enable_activation_checkpoint_fn": lambda rank, module: seen.append((rank, type(module).__name__))
    }
    samples = token_samples(1)
    quiet_trainer(tmp_path, TokenModel(), samples, trainer_options=options, gradient_checkpointing=True).train()
    assert seen == [(0, "TokenModel")]


def test_compiled_model_trains_and_keeps_its_parameter_names_in_checkpoints(tmp_path: Path) -> None:
    compile_settings: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}
    torch.compiler.reset()
    compiled = trainer_for(tmp_path, TokenModel, **compile_settings)
    compiled.train()
    assert isinstance(compiled.model, torch._dynamo.OptimizedModule)
    assert saved_steps(tmp_path) == [2]
    with safe_open(tmp_path / "checkpoints" / "checkpoint-2" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"embedding.weight", "head.weight"}
    longer = trainer_for(tmp_path, TokenModel, max_steps=4)
    assert longer.train().global_step == 4
    straight = trainer_for(tmp_path / "straight", TokenModel, max_steps=4)
    straight.train()
    torch.testing.assert_close(
        weights(longer.unwrapped_model()), weights(straight.unwrapped_model()), rtol=1e-5, atol=1e-7
    )
    assert compiled.evaluate(token_samples(4))["eval_loss"] > 0


def test_requested_backend_compiles(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no_such_backend"):
        trainer_for(tmp_path, TokenModel, torch_compile=True, torch_compile_backend="no_such_backend").train()
