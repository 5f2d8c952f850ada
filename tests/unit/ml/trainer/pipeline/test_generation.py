"""Generation through pipeline stages: same tokens as the model's own `generate`, with and without a cache."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from forgather.ml.trainer.pipeline.generation import GenerationOptions, choose_tokens, generate, supports_cache
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCAB_SIZE, tiny_llama

PAD, EOS = 0, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


def tiny_gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=EOS
    )
    return GPT2LMHeadModel(config)


BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny_llama(seed=None, max_position_embeddings=64),
    "tied gpt2": tiny_gpt2,
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=1)),
    "mistral, window of 4": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=4)),
}


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """Build a model with large weights, so that its tokens vary; a fresh model repeats tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = BUILDERS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.6)
    return model


class CachingStage(nn.Module):
    """Full model as the only stage."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def make_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def forward(self, inputs: Tensor, **keywords: Any) -> Tensor:
        logits: Tensor = self.model(inputs, **keywords).logits
        return logits


def through_stages(stage: nn.Module, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    def run(inputs: Tensor, keywords: Mapping[str, Any], stage_keywords: Mapping[int, Mapping[str, Any]]) -> Tensor:
        logits: Tensor = stage(inputs, **keywords, **stage_keywords.get(0, {}))
        return logits

    def share_tokens(tokens: Tensor | None) -> Tensor:
        assert tokens is not None
        return tokens

    stages = {0: stage}
    with torch.no_grad():
        return generate(
            run,
            stages,
            share_tokens,
            input_ids,
            GenerationOptions(**options),
            mask,
            can_cache=supports_cache(stages),
        )


def by_transformers(model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    ids: Tensor = model.generate(input_ids, attention_mask=mask, **{"do_sample": False, "top_k": 0, **options})
    return ids


def prompts(lengths: tuple[int, ...], seed: int = 3, pad: int = PAD) -> Tensor:
    """Return left-padded prompts of these lengths, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, VOCAB_SIZE, (len(lengths), max(lengths)), generator=generator)
    for row, length in zip(rows, lengths, strict=True):
        row[: max(lengths) - length] = pad
    return rows


def mask_of(input_ids: Tensor, pad: int = PAD) -> Tensor:
    return (input_ids != pad).long()


def ending_token(model: PreTrainedModel, input_ids: Tensor, mask: Tensor, num_new: int) -> int:
    """Return a token that ends some rows midway and other rows never."""
    free_ids = through_stages(CachingStage(model), input_ids, mask, max_new_tokens=num_new, do_sample=False)
    new_tokens = free_ids[:, input_ids.shape[1] :]
    for token in range(3, VOCAB_SIZE):
        has_token = (new_tokens == token).any(dim=1)
        is_early = (new_tokens[:, : num_new // 2] == token).any()
        if has_token.any() and not has_token.all() and is_early:
            return token
    raise AssertionError("every token ends all rows or none; take other prompts")


# --- greedy


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", BUILDERS)
class TestGreedy:
    def test_prompts_of_one_length_equal_transformers(self, name: str, use_cache: bool) -> None:
        model, ids = tiny(name), prompts((7, 7, 7))
        options = {"max_new_tokens": 12, "do_sample": False, "use_cache": use_cache, "eos_token_id": EOS}
        expected = by_transformers(model, ids, **options)
        assert torch.equal(through_stages(CachingStage(model), ids, **options), expected)

    @pytest.mark.parametrize("with_mask", [True, False])
    def test_left_padded_prompts_equal_transformers(self, name: str, use_cache: bool, with_mask: bool) -> None:
        model, ids = tiny(name), prompts((9, 4, 1, 6))
        mask = mask_of(ids) if with_mask else None
        options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": PAD, "eos_token_id": EOS}
        expected = by_transformers(model, ids, mask, **options)
        assert torch.equal(through_stages(CachingStage(model), ids, mask, use_cache=use_cache, **options), expected)

    def test_finished_rows_are_padded(self, name: str, use_cache: bool) -> None:
        model, ids = tiny(name), prompts((5, 3, 8, 8, 2, 7))
        end = ending_token(model, ids, mask_of(ids), num_new=16)
        options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": PAD, "eos_token_id": end}
        expected = by_transformers(model, ids, **options)
        assert (expected[:, -1] == PAD).any() and not (expected[:, -1] == PAD).all()
        assert torch.equal(through_stages(CachingStage(model), ids, use_cache=use_cache, **options), expected)

    def test_repetition_penalty_equals_transformers(self, name: str, use_cache: bool) -> None:
        model, ids = tiny(name), prompts((6, 3, 4))
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "eos_token_id": EOS}
        penalised = by_transformers(model, ids, repetition_penalty=1.7, **options)
        assert penalised.tolist() != by_transformers(model, ids, **options).tolist()
        actual = through_stages(CachingStage(model), ids, use_cache=use_cache, repetition_penalty=1.7, **options)
        assert torch.equal(actual, penalised)


def test_padding_does_not_change_a_row() -> None:
    model, ids = tiny("llama"), prompts((9, 4))
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": PAD}
    alone = through_stages(CachingStage(model), ids[1:, 5:], **options)
    assert torch.equal(through_stages(CachingStage(model), ids, **options)[1:, 5:], alone)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_any_dtype_are_accepted(mask_dtype: torch.dtype) -> None:
    model, ids = tiny("llama"), prompts((6, 2), pad=EOS)
    mask = mask_of(ids, pad=EOS)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": EOS}
    expected = by_transformers(model, ids, mask, **options)
    assert torch.equal(through_stages(CachingStage(model), ids, mask.to(mask_dtype), **options), expected)


# --- what the end and padding tokens mean


def test_generation_stops_when_all_rows_are_finished() -> None:
    model, ids = tiny("gpt_neox"), prompts((4, 4))
    free_ids = through_stages(CachingStage(model), ids, max_new_tokens=12, do_sample=False)
    ends = [int(free_ids[0, 5]), int(free_ids[1, 7])]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "eos_token_id": ends}
    actual = through_stages(CachingStage(model), ids, **options)
    assert actual.shape[1] < free_ids.shape[1]
    assert torch.equal(actual, by_transformers(model, ids, **options))


def test_without_an_end_token_all_tokens_are_generated() -> None:
    model, ids = tiny("llama"), prompts((4, 4))
    model.generation_config.eos_token_id = None
    actual = through_stages(CachingStage(model), ids, max_new_tokens=20, do_sample=False)
    assert actual.shape == (2, 24)
    assert torch.equal(actual, by_transformers(model, ids, max_new_tokens=20))


def test_without_a_padding_token_rows_are_padded_with_the_first_end_token() -> None:
    model, ids = tiny("llama"), prompts((4, 4, 4))
    end = ending_token(model, ids, mask_of(ids), num_new=14)
    options = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": [end, 1]}
    actual = through_stages(CachingStage(model), ids, **options)
    assert (actual[:, -2:] == end).all(dim=1).any()
    assert torch.equal(actual, by_transformers(model, ids, **options))


@pytest.mark.parametrize("end", [PAD, [EOS, PAD]])
def test_padding_token_that_is_also_an_end_token_is_not_masked(end: int | list[int]) -> None:
    model, ids = tiny("llama"), prompts((6, 3))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": end}
    expected = by_transformers(model, ids, **options)
    assert expected.tolist() != by_transformers(model, ids, mask_of(ids), **options).tolist()
    assert torch.equal(through_stages(CachingStage(model), ids, **options), expected)


def test_right_padding_causes_a_warning_and_equals_transformers(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = tiny("llama"), prompts((6, 6))
    ids[1, 4:] = PAD
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": EOS}
    expected = by_transformers(model, ids, **options)
    with caplog.at_level(logging.WARNING, logger="forgather"):
        assert torch.equal(through_stages(CachingStage(model), ids, **options), expected)
    assert "pad on the left" in caplog.text


def test_no_new_tokens_returns_the_prompt() -> None:
    ids = prompts((4, 2))
    actual = through_stages(CachingStage(tiny("llama")), ids, max_new_tokens=0)
    assert torch.equal(actual, ids)
    assert actual is not ids


# --- sampling


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_k": 1000},
        {"temperature": 1.8, "top_k": 7, "repetition_penalty": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", ["llama", "tied gpt2"])
def test_sampling_draws_the_same_tokens_as_transformers(name: str, use_cache: bool, options: dict[str, Any]) -> None:
    model, ids = tiny(name), prompts((6, 3, 5))
    special = {"pad_token_id": PAD, "eos_token_id": EOS}
    options = {"max_new_tokens": 15, "do_sample": True, "top_k": 0, **special, **options}
    torch.manual_seed(11)
    expected = by_transformers(model, ids, **options)
    torch.manual_seed(11)
    assert torch.equal(through_stages(CachingStage(model), ids, use_cache=use_cache, **options), expected)


def test_top_k_keeps_only_the_highest_logits() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).expand(500, 4)
    tokens = choose_tokens(logits, torch.zeros(500, 1, dtype=torch.long), GenerationOptions(1, top_k=2))
    assert set(tokens.tolist()) == {1, 3}


# --- logits that are no numbers


class WithBrokenLogits(CachingStage):
    """Stage with non-finite logits for some tokens."""

    def __init__(self, model: PreTrainedModel, broken: Mapping[int, float]) -> None:
        super().__init__(model)
        self.broken = broken

    def forward(self, inputs: Tensor, **keywords: Any) -> Tensor:
        logits = super().forward(inputs, **keywords).clone()
        for token, value in self.broken.items():
            logits[..., token] = value
        return logits


BROKEN = {5: float("nan"), 9: float("-inf"), 12: float("nan")}


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"temperature": 0.3}, {"top_k": 31}], ids=str)
def test_tokens_with_nan_logits_are_not_chosen(settings: dict[str, Any]) -> None:
    model, ids = tiny("llama"), prompts((6, 6, 6, 6))
    stage = WithBrokenLogits(model, BROKEN)
    actual = through_stages(stage, ids, max_new_tokens=50, repetition_penalty=1.2, **settings)
    assert actual.shape == (4, 56)
    assert not torch.isin(actual[:, 6:], torch.tensor(list(BROKEN))).any()


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"temperature": 0.3}, {"top_k": 2}], ids=str)
def test_an_infinite_logit_wins(settings: dict[str, Any]) -> None:
    stage = WithBrokenLogits(tiny("llama"), {7: float("inf"), **BROKEN})
    actual = through_stages(stage, prompts((3, 3)), max_new_tokens=4, **settings)
    assert (actual[:, 3:] == 7).all()


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf"), 3e38, -3e38])
def test_all_logits_non_finite_still_gives_tokens(value: float) -> None:
    stage = WithBrokenLogits(tiny("llama"), dict.fromkeys(range(VOCAB_SIZE), value))
    for settings in ({"do_sample": False}, {"temperature": 0.1, "top_k": 4}, {"repetition_penalty": 1.5}):
        actual = through_stages(stage, prompts((3, 3)), max_new_tokens=5, **settings)
        assert ((actual >= 0) & (actual < VOCAB_SIZE)).all()


def test_repetition_penalty_lowers_negative_logits_too() -> None:
    options = GenerationOptions(1, do_sample=False, repetition_penalty=1.5)
    tokens = choose_tokens(torch.tensor([[-1.0, -1.2, -3.0]]), torch.tensor([[0, 0]]), options)
    assert tokens.tolist() == [1]


def test_prompt_may_contain_tokens_outside_the_head() -> None:
    options = GenerationOptions(1, do_sample=False, repetition_penalty=4.0)
    tokens = choose_tokens(torch.tensor([[1.0, 2.0, 1.5]]), torch.tensor([[1, 7, 3]]), options)
    assert tokens.tolist() == [2]


# --- work


def layer_tokens(stage: CachingStage, ids: Tensor, **options: Any) -> list[int]:
    """Return the number of tokens per row that each layer computes in total."""
    layers = stage.model.model.layers
    counts = [0] * len(layers)

    def count(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        counts[list(layers).index(module)] += args[0].shape[1]

    handles = [layer.register_forward_hook(count) for layer in layers]
    through_stages(stage, ids, **options)
    for handle in handles:
        handle.remove()
    return counts


def test_cache_makes_each_layer_compute_each_token_once() -> None:
    stage, ids = CachingStage(tiny("llama")), prompts((7, 3))
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD}
    assert layer_tokens(stage, ids, **options) == [7 + 20 - 1] * 2
    assert layer_tokens(stage, ids, use_cache=False, **options) == [sum(range(7, 7 + 20))] * 2


class PlainStage(nn.Module):
    """Stage without a cache and without transformers' keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, 8)
        self.head = nn.Linear(8, VOCAB_SIZE)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(input_ids).cumsum(1))
        return logits


def test_stages_without_a_cache_get_the_full_sequence() -> None:
    torch.manual_seed(0)
    stage, ids = PlainStage(), prompts((4, 4))
    actual = through_stages(stage, ids, max_new_tokens=6, do_sample=False)
    for length in range(4, 10):
        assert torch.equal(stage(actual[:, :length])[:, -1].argmax(-1), actual[:, length])


# --- ranks


class FirstHalf(nn.Module):
    """Embedding and first layer of a Llama."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.body = LlamaModel(model.config)
        self.body.load_state_dict(model.model.state_dict())
        del self.body.layers[1]
        self.body.norm = nn.Identity()

    def make_cache(self) -> DynamicCache:
        return DynamicCache()

    def forward(self, inputs: Tensor, **keywords: Any) -> Tensor:
        hidden: Tensor = self.body(inputs, **keywords).last_hidden_state
        return hidden


class SecondHalf(nn.Module):
    """Last layer and head of a Llama."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.body = LlamaModel(model.config)
        self.body.load_state_dict(model.model.state_dict())
        del self.body.layers[0]
        self.body.layers[0].self_attn.layer_idx = 0
        self.head = model.lm_head

    def make_cache(self) -> DynamicCache:
        return DynamicCache()

    def forward(self, inputs: Tensor, **keywords: Any) -> Tensor:
        logits: Tensor = self.head(self.body(inputs_embeds=inputs, **keywords).last_hidden_state)
        return logits


def generate_on_this_rank(ids: Tensor, options: GenerationOptions) -> Tensor:
    """Generate with the first half of the model on rank 0 and the second half on rank 1."""
    model, rank = tiny("llama"), dist.get_rank()
    stage = (FirstHalf, SecondHalf)[rank](model).eval()

    def run(inputs: Tensor, keywords: Any, stage_keywords: Any) -> Tensor | None:
        hidden = torch.empty(*inputs.shape, model.config.hidden_size)
        if rank == 0:
            hidden = stage(inputs, **keywords, **stage_keywords[0])
        dist.broadcast(hidden, 0)
        return stage(hidden, **keywords, **stage_keywords[1]) if rank == 1 else None

    def share_tokens(tokens: Tensor | None) -> Tensor:
        assert (tokens is None) == (rank == 0), "only the last stage chooses"
        shared = torch.empty(len(ids), dtype=torch.long) if tokens is None else tokens
        dist.broadcast(shared, 1)
        return shared

    # The random state of the other rank must not matter.
    torch.manual_seed(5 if rank == 1 else 1234)
    with torch.no_grad():
        return generate(run, {rank: stage}, share_tokens, ids, options, can_cache=True)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("do_sample", [True, False])
def test_all_ranks_get_the_tokens_of_a_single_device(do_sample: bool, use_cache: bool) -> None:
    model, ids = tiny("llama"), prompts((5, 3, 8))
    end = ending_token(model, ids, mask_of(ids), num_new=12)
    settings: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": end, "pad_token_id": PAD, "do_sample": do_sample}
    torch.manual_seed(5)
    expected = by_transformers(model, ids, **settings)
    options = GenerationOptions(use_cache=use_cache, **settings)
    for actual in run_on_ranks(generate_on_this_rank, 2, ids, options):
        assert torch.equal(actual, expected)


# --- refusals


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens.*-1.*0 returns the prompt"),
        ({"max_new_tokens": 2.5}, "max_new_tokens.*2.5"),
        ({"temperature": 0.0}, "temperature.*do_sample=False"),
        ({"temperature": float("nan")}, "temperature.*nan"),
        ({"top_k": -3}, "top_k.*0 keeps all"),
        ({"repetition_penalty": 0.0}, "repetition_penalty.*1.0 is no penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty.*inf"),
        ({"eos_token_id": [2, -1]}, "eos_token_id.*-1.*pass None"),
        ({"pad_token_id": -1}, "pad_token_id.*-1.*pass None"),
    ],
    ids=str,
)
def test_bad_options_are_rejected_with_advice(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        GenerationOptions(**{"max_new_tokens": 4, **options})


def test_temperature_does_not_matter_without_sampling() -> None:
    assert GenerationOptions(4, do_sample=False, temperature=0.0).temperature == 0.0


@pytest.mark.parametrize("ids", [torch.tensor([1, 2]), torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 3)], ids=str)
def test_prompts_of_a_wrong_shape_are_rejected(ids: Tensor) -> None:
    with pytest.raises(ValueError, match="input_ids"):
        through_stages(PlainStage(), ids, max_new_tokens=1)


def test_mask_of_a_wrong_shape_is_rejected() -> None:
    with pytest.raises(ValueError, match="attention_mask of shape"):
        through_stages(PlainStage(), prompts((4, 4)), torch.ones(2, 3), max_new_tokens=1)
