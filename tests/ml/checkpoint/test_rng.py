"""Random numbers after a restore are those that would have followed."""

import io
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch

from forgather.ml.checkpoint.codec import decode_state, encode_state
from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.rng import RNGState


def draw() -> tuple[Any, ...]:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(3).tolist()


def through_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(encode_state(state), buffer)
    buffer.seek(0)
    return decode_state(torch.load(buffer, weights_only=True))


def test_numbers_continue_after_a_round_trip() -> None:
    draw()
    stored = through_file(RNGState().state_dict())
    expected = [draw() for _ in range(3)]
    RNGState().load_state_dict(stored)
    assert [draw() for _ in range(3)] == expected


def test_restore_applies_the_loaded_state_again() -> None:
    rng = RNGState()
    assert not rng.has_loaded
    stored = rng.state_dict()
    expected = draw()
    rng.load_state_dict(stored)
    assert rng.has_loaded
    draw()
    rng.restore()
    assert draw() == expected


def test_loaded_state_does_not_share_memory_with_the_file() -> None:
    rng = RNGState()
    stored = rng.state_dict()
    expected = draw()
    rng.load_state_dict(stored)
    stored["torch"].zero_()
    rng.restore()
    assert draw() == expected


def test_restore_without_a_loaded_state_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no random state was loaded"):
        RNGState().restore()


def test_foreign_state_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(CheckpointLoadError, match="skip_checkpoint_components"):
        RNGState().load_state_dict({"torch": torch.get_rng_state()})


def test_new_ranks_get_reproducible_and_distinct_numbers(caplog: pytest.LogCaptureFixture) -> None:
    def first_draw(seed: int | None, rank: int, step: int) -> tuple[Any, ...]:
        RNGState(seed).init_new_rank(rank, step)
        return draw()

    with caplog.at_level(logging.INFO):
        assert first_draw(1, 2, 100) == first_draw(1, 2, 100)
    assert "Rank 2" in caplog.text and "step 100" in caplog.text
    cases = [(1, 2, 100), (2, 2, 100), (1, 3, 100), (1, 2, 101), (None, 2, 100)]
    draws = [first_draw(*case) for case in cases]
    for numbers in zip(*[(d[0], d[2], tuple(d[4])) for d in draws], strict=True):
        assert len(set(numbers)) == len(cases)


def test_states_of_devices_that_are_gone_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    rng = RNGState()
    stored = rng.state_dict()
    gone = {"type": "no_such_accelerator", "states": [torch.zeros(16, dtype=torch.uint8)] * 2}
    expected = draw()
    rng.load_state_dict({**stored, "accelerator": gone})
    assert "2 no_such_accelerator device(s)" in caplog.text
    assert draw() == expected


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_device_numbers_continue() -> None:
    device = torch.accelerator.current_accelerator()
    stored = through_file(RNGState().state_dict())
    expected = torch.rand(3, device=device)
    RNGState().load_state_dict(stored)
    assert torch.equal(torch.rand(3, device=device), expected)
