"""A checkpoint directory is a Hugging Face model directory."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel

from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.sharded_checkpoint import make_shard_index
from forgather.ml.trainer.checkpoint_coordinator import CheckpointCoordinator
from forgather.ml.trainer.checkpoint_manager import CheckpointConfig, CheckpointManager
from forgather.ml.trainer.checkpoint_types import SharingPattern, StateComponent

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


def test_the_tied_head_of_gpt2_is_stored_once_and_tied_again(tmp_path: Path) -> None:
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
    """A preprocessor whose files are not all in one directory, like a tokenizer with several chat templates."""

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


def test_the_model_alone_can_be_exported_beside_other_things(tmp_path: Path) -> None:
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
