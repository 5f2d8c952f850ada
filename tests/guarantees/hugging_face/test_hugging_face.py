"""A checkpoint directory is a Hugging Face model directory."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.coordinator import CheckpointCoordinator, CheckpointSaveError
from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager
from forgather.ml.checkpoint.weights.module_weights import make_shard_index
from forgather.ml.distributed import StaticDistributedEnvironment
from tests.support.tiny_models import quiet_trainer
from tests.support.tiny_parallel import captured_logs

TINY_LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
TINY_GPT2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
PROMPT = torch.arange(12).reshape(2, 6)


def build(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=PROMPT).logits


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_GPT2], ids=["llama", "tied-gpt2"])
@pytest.mark.parametrize("in_safetensors", [True, False])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_from_pretrained_loads_a_checkpoint(
    tmp_path: Path, config: PreTrainedConfig, in_safetensors: bool, num_shards: int
) -> None:
    model = build(config)
    index = None
    if num_shards > 1:
        size = sum(tensor.numel() * 4 for tensor in model.state_dict().values()) // num_shards
        sharing = [["transformer.wte.weight", "lm_head.weight"]] if config is TINY_GPT2 else None
        index = make_shard_index([model.state_dict()], None, in_safetensors, size, sharing)
        assert len(set(index["weight_map"].values())) >= num_shards
    components = [StateComponent("model", model, SharingPattern.GLOBAL)]
    coordinator = CheckpointCoordinator(
        components, {}, StaticDistributedEnvironment(), str(tmp_path), in_safetensors, model, shard_index=index
    )
    path = coordinator.save_checkpoint(checkpoint_id=1)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded.eval()), logits(model))

    other = build(config, seed=1)
    components = [StateComponent("model", other, SharingPattern.GLOBAL)]
    CheckpointCoordinator(components, {}, StaticDistributedEnvironment(), str(tmp_path), model=other).load_checkpoint()
    assert torch.equal(logits(other), logits(model))


def test_tied_head_of_gpt2_is_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = build(TINY_GPT2)
    components = [StateComponent("model", model, SharingPattern.GLOBAL)]
    coordinator = CheckpointCoordinator(components, {}, StaticDistributedEnvironment(), str(tmp_path), model=model)
    path = coordinator.save_checkpoint(checkpoint_id=1)
    stored = load_file(f"{path}/model.safetensors")
    assert "transformer.wte.weight" in stored and "lm_head.weight" not in stored
    other = build(TINY_GPT2, seed=1)
    components = [StateComponent("model", other, SharingPattern.GLOBAL)]
    CheckpointCoordinator(components, {}, StaticDistributedEnvironment(), str(tmp_path), model=other).load_checkpoint()
    assert other.lm_head.weight is other.transformer.wte.weight


class Templates:
    """Preprocessor that writes a subdirectory, like a tokenizer with several chat templates."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "additional_chat_templates").mkdir()
        (Path(folder) / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")


def test_a_preprocessor_may_write_subdirectories(tmp_path: Path) -> None:
    model = build(TINY_LLAMA)
    coordinator = CheckpointCoordinator(
        [StateComponent("model", model, SharingPattern.GLOBAL)],
        {},
        StaticDistributedEnvironment(),
        str(tmp_path),
        model=model,
        model_preprocessor=Templates(),
    )
    path = coordinator.save_checkpoint(checkpoint_id=1)
    coordinator.load_checkpoint(path)
    coordinator.export_model(str(tmp_path / "exported"))
    for directory in (Path(path), tmp_path / "exported"):
        assert (directory / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"


def test_save_model_keeps_other_files_of_the_directory(tmp_path: Path) -> None:
    model = build(TINY_LLAMA)

    class Provider:
        def get_state_components(self) -> list[StateComponent]:
            return [StateComponent("model", model, SharingPattern.GLOBAL)]

    (tmp_path / "notes.txt").write_text("mine")
    config = CheckpointConfig(output_dir=str(tmp_path), save_total_limit=1)
    manager = CheckpointManager(config, StaticDistributedEnvironment(), Provider(), model)
    manager.save_model()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), logits(model))
    with pytest.raises(Exception, match="overwrite_output_dir"):
        manager.save_model()
    torch.nn.init.ones_(model.lm_head.weight)
    manager.save_model(overwrite_output_dir=True)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), logits(model))
    manager.save_model(str(tmp_path / "elsewhere"))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere").eval()), logits(model))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.glob(".tmp-*"))
    manager.close()


# --- from_pretrained never initialises missing weights


class Around(nn.Module):
    """Wrapper with the configuration of the inner model, but other tensor names."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.config = model.config
        self.generation_config = model.generation_config
        self.inner = model


class SameNames(nn.Module):
    """Custom module with the tensor names of the class in its configuration."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.config = model.config
        self.model = model.model
        self.lm_head = model.lm_head


def coordinator_of(output_dir: Path, model: nn.Module, **options: Any) -> CheckpointCoordinator:
    component = StateComponent("model", model, SharingPattern.GLOBAL)
    return CheckpointCoordinator(
        [component], {}, StaticDistributedEnvironment(), str(output_dir), model=model, **options
    )


def with_compiled_layer() -> nn.Module:
    model = build(TINY_LLAMA)
    model.model.layers[1] = torch.compile(model.model.layers[1])
    return model


def tied_by_hand() -> nn.Module:
    model = build(copy.deepcopy(TINY_LLAMA))
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def without_head() -> nn.Module:
    module = SameNames(build(TINY_LLAMA))
    del module.lm_head
    return module


@pytest.mark.parametrize("safetensors", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Around(build(TINY_LLAMA)), "model.embed_tokens.weight"),
        (with_compiled_layer, "model.layers.1.self_attn.q_proj.weight"),
        (tied_by_hand, "lm_head.weight"),
        (without_head, "lm_head.weight"),
    ],
    ids=["wrapper module", "compiled layer", "tied by hand", "no head"],
)
def test_model_that_from_pretrained_would_initialise_is_not_exported(
    tmp_path: Path, make: Callable[[], nn.Module], name: str, safetensors: bool
) -> None:
    coordinator = coordinator_of(tmp_path, make(), save_safetensors=safetensors)
    with pytest.raises(CheckpointSaveError, match=rf"LlamaForCausalLM.*random weights.*{re.escape(name)}") as caught:
        coordinator.export_model(str(tmp_path / "exported"))
    assert "not a wrapper or a submodule of it" in str(caught.value) and "tie_word_embeddings" in str(caught.value)
    assert not list(tmp_path.glob("exported/*"))


def test_wrapper_checkpoint_has_no_configuration_and_resumes(tmp_path: Path) -> None:
    model = Around(build(TINY_LLAMA))
    coordinator = coordinator_of(tmp_path, model, model_preprocessor=Templates())
    with captured_logs() as lines:
        path = coordinator.save_checkpoint(checkpoint_id=1)
        coordinator_of(tmp_path, model).save_checkpoint(checkpoint_id=2)
    assert len(lines) == 1, "logged once, not at every save"
    assert "model.embed_tokens.weight" in lines[0] and "inner.model.embed_tokens.weight" in lines[0]
    assert not (Path(path) / "config.json").exists() and not (Path(path) / "generation_config.json").exists()
    assert (Path(path) / "additional_chat_templates" / "tool_use.jinja").exists()
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        AutoModelForCausalLM.from_pretrained(path)
    other = Around(build(TINY_LLAMA, seed=1))
    coordinator_of(tmp_path, other).load_checkpoint(path)
    assert torch.equal(logits(other.inner), logits(model.inner))


def assert_exports(tmp_path: Path, model: nn.Module) -> None:
    """Assert that the exported directory and a checkpoint load with every tensor of the model."""
    coordinator = coordinator_of(tmp_path, model)
    coordinator.export_model(str(tmp_path / "exported"))
    for directory in (str(tmp_path / "exported"), coordinator.save_checkpoint(checkpoint_id=1)):
        loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
        expected = model.state_dict()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_custom_module_with_matching_names_is_exported(tmp_path: Path) -> None:
    assert_exports(tmp_path, SameNames(build(TINY_LLAMA)))


def test_manually_tied_tensors_are_exported_if_configured(tmp_path: Path) -> None:
    model = tied_by_hand()
    model.config.tie_word_embeddings = True
    assert_exports(tmp_path, model)


@pytest.mark.parametrize(
    "config",
    [TINY_LLAMA, TINY_GPT2, LlamaConfig(**{**TINY_LLAMA.to_dict(), "tie_word_embeddings": True})],
    ids=["llama", "gpt2", "tied llama"],
)
def test_transformers_models_are_exported(tmp_path: Path, config: PreTrainedConfig) -> None:
    assert_exports(tmp_path, build(config))


def test_encoder_decoder_with_tied_tensors_is_exported(tmp_path: Path) -> None:
    """Several classes tie these names, biases included, and AutoModelForCausalLM does not select the class."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    t5 = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    models = [BertForMaskedLM(BertConfig(**sizes, num_attention_heads=4)), T5ForConditionalGeneration(t5)]
    for number, model in enumerate(models):
        directory = tmp_path / str(number)
        coordinator_of(tmp_path, model).export_model(str(directory))
        loaded = type(model).from_pretrained(directory).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


class OwnConfig(PreTrainedConfig):
    model_type = "one_of_my_own"


class WithOwnConfig(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = OwnConfig(width=2)
        self.linear = nn.Linear(2, 2)


class NeedsMore(LlamaForCausalLM):
    """Model that cannot be built from a configuration alone."""

    def __init__(self, config: LlamaConfig, depth: int) -> None:
        super().__init__(config)
        self.extra = nn.Linear(depth, depth)


@pytest.mark.parametrize("make", [WithOwnConfig, lambda: NeedsMore(TINY_LLAMA, 2)], ids=["own config", "needs more"])
def test_class_that_transformers_cannot_build_is_exported_unchecked(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    model = make()
    coordinator = coordinator_of(tmp_path, model)
    coordinator.export_model(str(tmp_path / "exported"))
    path = coordinator.save_checkpoint(checkpoint_id=1)
    for directory in (Path(path), tmp_path / "exported"):
        assert json.loads((directory / "config.json").read_text())["architectures"] == [type(model).__name__]


class Counted(LlamaForCausalLM):
    """Model that draws random numbers in its constructor and counts the calls."""

    num_built = 0

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        Counted.num_built += 1
        torch.rand(3, device="cpu")
        np.random.rand()


def test_expected_names_are_computed_once_without_changing_random_state(tmp_path: Path) -> None:
    model = Counted(copy.deepcopy(TINY_LLAMA))
    Counted.num_built = 0
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    coordinator = coordinator_of(tmp_path, model)
    for step in (1, 2, 3):
        coordinator.save_checkpoint(checkpoint_id=step)
    coordinator.export_model(str(tmp_path / "exported"))
    assert Counted.num_built == 1
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_trainer_saves_a_wrapper_but_rejects_its_export(tmp_path: Path) -> None:
    class Trained(Around):
        def forward(self, **batch: torch.Tensor) -> Any:
            return self.inner(**batch)

    samples = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 2
    trainer = quiet_trainer(tmp_path, Trained(build(TINY_LLAMA)), samples, save_strategy="steps", save_steps=1)
    assert trainer.train().global_step == 2
    assert not list(tmp_path.glob("checkpoints/*/config.json"))
    with pytest.raises(CheckpointSaveError, match="cannot be exported"):
        trainer.save_model(str(tmp_path / "exported"))
    trainer.model = trainer.unwrapped_model().inner
    trainer.save_model(str(tmp_path / "exported"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(logits(loaded.eval()), logits(trainer.model.eval()))
