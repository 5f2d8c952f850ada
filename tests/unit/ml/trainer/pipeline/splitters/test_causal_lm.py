"""Splitter for causal language models: stages in sequence equal the full model."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from forgather.ml.trainer.pipeline.pipeline_utils import tensors_of
from forgather.ml.trainer.pipeline.splitters.causal_lm import (
    create_causal_lm_splitter,
    create_manual_causal_lm_splitter,
)
from tests.support.staging import MakeModel, filled, in_a_row, on_meta, split, split_for_rank

VOCABULARY, WIDTH, NUM_LAYERS, ROWS, LENGTH = 32, 16, 4, 3, 7


def _config(config_class: Any, without: Sequence[str] = (), **options: Any) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config_class(**{name: value for name, value in settings.items() if name not in without}, **options)


def _gpt2() -> Any:
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=NUM_LAYERS,
        n_head=2,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        **rates,
    )


MODELS: dict[str, MakeModel] = {
    "llama": lambda: hf.LlamaForCausalLM(_config(hf.LlamaConfig)),
    "tied_llama": lambda: hf.LlamaForCausalLM(_config(hf.LlamaConfig, tie_word_embeddings=True)),
    "mistral": lambda: hf.MistralForCausalLM(_config(hf.MistralConfig, sliding_window=3)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(
        _config(hf.Qwen2Config, use_sliding_window=True, sliding_window=3, max_window_layers=2)
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(_config(hf.Qwen3Config, head_dim=8)),
    "tied_gpt2": lambda: hf.GPT2LMHeadModel(_gpt2()),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(_config(hf.GPTNeoXConfig, ["num_key_value_heads"])),
    "gemma": lambda: hf.GemmaForCausalLM(_config(hf.GemmaConfig, head_dim=8)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(_config(hf.Gemma2Config, head_dim=8, sliding_window=3)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(_config(hf.Gemma3TextConfig, head_dim=8, sliding_window=3)),
    "opt": lambda: hf.OPTForCausalLM(
        _config(hf.OPTConfig, ["intermediate_size"], ffn_dim=24, word_embed_proj_dim=WIDTH, dropout=0.0)
    ),
    "bloom": lambda: hf.BloomForCausalLM(
        _config(hf.BloomConfig, ["num_hidden_layers", "num_attention_heads"], n_layer=NUM_LAYERS, n_head=2)
    ),
    "phi3": lambda: hf.Phi3ForCausalLM(_config(hf.Phi3Config)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(_config(hf.Olmo2Config)),
    "cohere": lambda: hf.CohereForCausalLM(_config(hf.CohereConfig)),
    "falcon": lambda: hf.FalconForCausalLM(_config(hf.FalconConfig)),
    "mixtral": lambda: hf.MixtralForCausalLM(_config(hf.MixtralConfig, num_local_experts=2)),
    "smollm3": lambda: hf.SmolLM3ForCausalLM(_config(hf.SmolLM3Config)),
}

TOKEN_IDS = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(ROWS, LENGTH, dtype=torch.int64)
MASK[0, :3] = 0
MASK[2, :1] = 0
POSITIONS = (MASK.cumsum(1) - 1).clamp(min=0)


def with_large_values(make: MakeModel) -> Any:
    """Build a model with noise on all parameters, so that every parameter affects the result."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


# --- models of transformers


@pytest.mark.parametrize("name", MODELS)
def test_stages_in_sequence_equal_the_full_model(name: str) -> None:
    model = with_large_values(MODELS[name])
    modules = filled(split(on_meta(MODELS[name]), 3)[0], model)
    keywords = {"attention_mask": MASK, "position_ids": POSITIONS}
    with torch.no_grad():
        expected = model(TOKEN_IDS, **keywords).logits
        assert torch.equal(in_a_row(modules, TOKEN_IDS, **keywords), expected)
        unmasked = model(TOKEN_IDS).logits
        assert torch.equal(in_a_row(modules, TOKEN_IDS), unmasked)
    assert not torch.allclose(expected, unmasked, atol=1e-3), "the mask must matter, or it is not tested"


@pytest.mark.parametrize("name", MODELS)
def test_stages_with_caches_equal_the_full_model_token_by_token(name: str) -> None:
    """Bitwise equal to the model with a cache, and equal up to rounding to the model without a cache."""
    model = with_large_values(MODELS[name])
    modules = filled(split(on_meta(MODELS[name]), 3)[0], model)
    caches = [module.make_cache() for module in modules]  # type: ignore[operator]
    own_cache = hf.DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(TOKEN_IDS, attention_mask=MASK, position_ids=POSITIONS, use_cache=False).logits
        for first, last in ((0, 4), (4, 5), (5, 6), (6, 7)):
            keywords = {"attention_mask": MASK[:, :last], "position_ids": POSITIONS[:, first:last], "use_cache": True}
            hidden = tokens = TOKEN_IDS[:, first:last]
            for module, cache in zip(modules, caches, strict=True):
                hidden = module(hidden, **keywords, past_key_values=cache)
            assert torch.equal(hidden, model(tokens, **keywords, past_key_values=own_cache).logits)
            difference = (hidden[:, -1] - expected[:, last - 1]).abs().max() / expected.abs().max()
            assert difference < 3e-6


@pytest.mark.parametrize("name", MODELS)
def test_gradients_through_the_stages_equal_the_full_model(name: str) -> None:
    model = with_large_values(MODELS[name])
    modules = filled(split(on_meta(MODELS[name]), 3)[0], model)
    model(TOKEN_IDS, attention_mask=MASK, use_cache=False).logits[:, 3:].square().mean().backward()
    in_a_row(modules, TOKEN_IDS, attention_mask=MASK)[:, 3:].square().mean().backward()
    expected = dict(model.named_parameters(remove_duplicate=False))
    sums: dict[int, Tensor] = {}
    for module in modules:
        for parameter_name, parameter in module.named_parameters():
            assert parameter.grad is not None, parameter_name
            key = id(expected[parameter_name])
            sums[key] = sums[key] + parameter.grad if key in sums else parameter.grad
    for parameter in model.parameters():
        torch.testing.assert_close(sums.pop(id(parameter)), parameter.grad, rtol=1e-6, atol=1e-6)
    assert not sums


@pytest.mark.parametrize("name", MODELS)
def test_stages_have_each_fqn_of_the_full_model_once(name: str) -> None:
    whole = on_meta(MODELS[name])
    expected = {key: (value.shape, value.dtype) for key, value in whole.state_dict().items()}
    modules = split(whole, 3)[0]
    named = [(key, (value.shape, value.dtype)) for module in modules for key, value in module.state_dict().items()]
    assert len(named) == len(expected)
    assert dict(named) == expected
    assert all(any(True for _ in module.parameters()) for module in modules)


@pytest.mark.parametrize("name", MODELS)
def test_boundary_shapes_are_known_without_running_the_stages(name: str) -> None:
    """In float32 and with autocast, which gives some layers another output dtype than their weights."""
    modules = filled(split(on_meta(MODELS[name]), 3)[0], with_large_values(MODELS[name]))
    for is_mixed in (False, True):
        hidden = TOKEN_IDS
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            for module in modules[:-1]:
                hidden = module(hidden)
                assert {one.boundary(TOKEN_IDS) for one in modules} == {(hidden.shape, hidden.dtype)}  # type: ignore[operator]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen2", "tied_gpt2"])
def test_any_number_of_stages_equals_the_full_model(name: str, num_stages: int) -> None:
    model = with_large_values(MODELS[name])
    modules = filled(split(on_meta(MODELS[name]), num_stages)[0], model)
    with torch.no_grad():
        logits = in_a_row(modules, TOKEN_IDS, attention_mask=MASK)
        assert torch.equal(logits, model(TOKEN_IDS, attention_mask=MASK).logits)


def test_token_types_reach_only_the_embedding() -> None:
    model = with_large_values(MODELS["tied_gpt2"])
    modules = filled(split(on_meta(MODELS["tied_gpt2"]), 3)[0], model)
    types = TOKEN_IDS % 2
    with torch.no_grad():
        logits = in_a_row(modules, TOKEN_IDS, token_type_ids=types)
        assert torch.equal(logits, model(TOKEN_IDS, token_type_ids=types).logits)
        assert not torch.equal(logits, model(TOKEN_IDS).logits)


def test_dropout_of_the_embedding_is_applied_once() -> None:
    """Stages draw random numbers in the order of the full model, so equal seeds give equal dropout."""

    def make() -> Any:
        config = _gpt2()
        config.embd_pdrop = config.resid_pdrop = 0.5
        return hf.GPT2LMHeadModel(config)

    model = with_large_values(make).train()
    modules = filled(split(on_meta(make), 3)[0], model)
    with torch.no_grad():
        torch.manual_seed(1)
        expected = model(TOKEN_IDS).logits
        torch.manual_seed(1)
        assert torch.equal(in_a_row(modules, TOKEN_IDS), expected)
        assert not torch.equal(model.eval()(TOKEN_IDS).logits, expected)


def test_splitting_does_not_change_the_full_model() -> None:
    """Checkpoints use its parameter names and its configuration."""
    model = with_large_values(MODELS["qwen2"])
    names, config = list(model.state_dict()), model.config.to_dict()
    with torch.no_grad():
        before = model(TOKEN_IDS).logits
        split(model, 3)
        assert torch.equal(model(TOKEN_IDS).logits, before)
    assert (list(model.state_dict()), model.config.to_dict()) == (names, config)


def test_evaluation_mode_reaches_every_module_of_a_stage() -> None:
    for module in split(on_meta(MODELS["tied_gpt2"]), 3)[0]:
        for mode in (True, False):
            module.train(mode)
            assert {part.training for part in module.modules()} == {mode}


def test_both_names_of_the_splitter_split_equally() -> None:
    names = [
        [list(module.state_dict()) for module in split(on_meta(MODELS["llama"]), 3, create(output_weight=2))[0]]
        for create in (create_causal_lm_splitter, create_manual_causal_lm_splitter)
    ]
    assert names[0] == names[1]


def test_each_rank_gets_its_own_stages() -> None:
    modules, own, stages, make_mask = split_for_rank(on_meta(MODELS["llama"]), [(0, 3), (1, 2)], rank=1)
    assert len(modules) == 4
    assert own == [modules[1], modules[2]]
    assert [(stage.stage_index, stage.num_stages, stage.submod) for stage in stages] == [
        (1, 4, modules[1]),
        (2, 4, modules[2]),
    ]
    assert make_mask is None
    assert all(tensor.is_meta for module in modules for tensor in tensors_of(module).values())


def test_splitter_weights_move_layers() -> None:
    modules = split(on_meta(MODELS["llama"]), 2, create_causal_lm_splitter(input_weight=0, output_weight=2))[0]
    layers = [{name.split(".")[2] for name in one.state_dict() if ".layers." in name} for one in modules]
    assert layers == [{"0", "1", "2"}, {"3"}]


# --- refused models

REMEDIES = r".*input_encoder, layer_stack, output_decoder.*model_splitter=create_automatic_splitter\(split_spec\)"


def test_model_that_scales_hidden_states_outside_its_layers_is_rejected() -> None:
    """Granite scales its embeddings; every stage would repeat that."""
    config = _config(hf.GraniteConfig, embedding_multiplier=2.0)
    with pytest.raises(ValueError, match="GraniteForCausalLM changes hidden states outside of its layers" + REMEDIES):
        split(on_meta(lambda: hf.GraniteForCausalLM(config)), 2)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "Sequential is not a model of transformers"),
        (lambda: hf.LlamaModel(_config(hf.LlamaConfig)), "LlamaModel has no language-model head"),
        (
            lambda: hf.T5ForConditionalGeneration(
                hf.T5Config(vocab_size=VOCABULARY, d_model=8, d_ff=8, num_layers=2, num_heads=2, d_kv=4)
            ),
            "T5ForConditionalGeneration has an encoder and a decoder",
        ),
    ],
    ids=["sequential", "headless", "encoder-decoder"],
)
def test_unsupported_models_are_rejected_with_the_remedies(make: MakeModel, reason: str) -> None:
    with pytest.raises(ValueError, match=reason + REMEDIES):
        split(on_meta(make), 2)


@pytest.mark.parametrize("config_class", [hf.MambaConfig, hf.JambaConfig])
def test_models_without_a_layer_list_are_rejected_with_the_remedies(config_class: Any) -> None:
    config = _config(config_class)
    with pytest.raises(ValueError, match=REMEDIES):
        split(on_meta(lambda: hf.AutoModelForCausalLM.from_config(config)), 2)


def test_final_norm_without_parameters_is_applied_once() -> None:
    def make() -> Any:
        return hf.OlmoForCausalLM(_config(hf.OlmoConfig))

    model = with_large_values(make)
    modules = filled(split(on_meta(make), 3)[0], model)
    with torch.no_grad():
        assert torch.equal(in_a_row(modules, TOKEN_IDS), model(TOKEN_IDS).logits)


def test_models_without_a_cache_report_can_cache_false() -> None:
    """Generation then recomputes the full sequence for each token."""
    config = hf.OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=64)
    modules = split(on_meta(lambda: hf.OpenAIGPTLMHeadModel(config)), 2)[0]
    assert not any(module.can_cache for module in modules)


def test_wrong_number_of_layers_is_rejected() -> None:
    message = r"LlamaForCausalLM should have one list of 5 layers, but these were found: none"
    with pytest.raises(ValueError, match=message + REMEDIES):
        split(on_meta(MODELS["llama"]), 2, create_causal_lm_splitter(num_layers=5))


@pytest.mark.parametrize("name", ["llama", "tied_gpt2"])
def test_more_stages_than_layers_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=r"4 layers.*into 5 stages.*Use fewer ranks or stages_per_rank"):
        split(on_meta(MODELS[name]), 5)
