"""Text generation with the models of checkpoints, from Python."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from forgather.data.byte_tokenizer import byte_tokenizer
from forgather.tools.generation import Sampling, TextGenerator, _IncrementalDecoder, generate_text
from tests.support.tiny_models import quiet_trainer, tiny_llama

TEXT = "Grüße, 世界 😀 naïve\n"


class Repeats(nn.Module):
    """Model without a configuration: predicts a fixed text, then its end."""

    def __init__(self, ids: Sequence[int], num_prompt_tokens: int) -> None:
        super().__init__()
        self.ids = ids
        self.start = num_prompt_tokens

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*input_ids.shape, 257)
        logits[:, -1, self.ids[input_ids.shape[1] - self.start]] = 100.0
        return logits


def test_stream_yields_complete_characters_until_the_end_of_the_text() -> None:
    generator = TextGenerator(Repeats([*TEXT.encode(), 256], 2), byte_tokenizer())
    stream = generator.stream("ab")
    pieces = list(stream)
    assert pieces == list(TEXT)
    result = stream.result("".join(pieces))
    assert (result.num_prompt_tokens, result.num_tokens, result.finish_reason) == (2, len(TEXT.encode()) + 1, "end")
    assert generator.generate("ab", Sampling(max_new_tokens=4)).finish_reason == "length"


def test_streamed_pieces_are_the_decoded_text_for_any_bytes() -> None:
    tokenizer, draw = byte_tokenizer(), random.Random(0)
    some = [*TEXT.encode(), 0xFF, 0xC3, 0xF0, 0x9F, 0x98, 0x80, 0xE4, 0x41]
    for _ in range(200):
        ids = [draw.choice(some) for _ in range(draw.randrange(1, 12))]
        decoder = _IncrementalDecoder(tokenizer, [0x41])
        pieces = [decoder.push(one) for one in ids]
        assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids, skip_special_tokens=True), ids


def test_consumer_of_a_stream_keeps_its_random_state_and_gradient_mode() -> None:
    generator = TextGenerator(Repeats([*b"abcdef", 256], 1), byte_tokenizer())
    torch.manual_seed(7)
    state = torch.get_rng_state()
    for _ in generator.stream("x"):
        assert torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), state)


def test_prompt_that_fills_the_context_is_an_error_and_a_long_text_ends_there() -> None:
    model = tiny_llama(None, vocab_size=257, max_position_embeddings=16)
    generator = TextGenerator(model.eval(), byte_tokenizer())
    with pytest.raises(ValueError, match="The prompt has 16 tokens, but the model has only 16 positions"):
        generator.generate("x" * 16)
    generator.model.generation_config = None  # type: ignore[assignment]
    found = generator.generate("x" * 14, Sampling(seed=1))
    assert (found.num_tokens, found.finish_reason) == (2, "context")


def test_text_of_a_checkpoint_without_a_tokenizer_needs_one(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path, tiny_llama(None), [{"input_ids": torch.arange(8), "labels": torch.arange(8)}], max_steps=1
    )
    trainer.train()
    trainer.save_checkpoint()
    with pytest.raises(RuntimeError, match="has no tokenizer"):
        generate_text(str(tmp_path), "x")


def test_top_p_keeps_the_most_probable_tokens() -> None:
    class Uneven(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits = torch.full((*input_ids.shape, 257), -30.0)
            logits[..., ord("a")], logits[..., ord("b")], logits[..., ord("c")] = 3.0, 2.0, 0.0
            return logits

    generator = TextGenerator(Uneven(), byte_tokenizer())
    assert set(generator.generate("x", Sampling(max_new_tokens=300)).text) == set("abc")
    assert set(generator.generate("x", Sampling(max_new_tokens=300, top_p=0.9)).text) == set("ab")
    assert set(generator.generate("x", Sampling(max_new_tokens=50, top_p=0.5)).text) == set("a")
