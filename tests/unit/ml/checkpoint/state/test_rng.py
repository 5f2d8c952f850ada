"""RNG state: random sequences continue after a restore."""

import io
import logging
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch

from forgather.ml.checkpoint.encoding.codec import decode_state, encode_state
from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.rng import RNGState


def draw() -> tuple[Any, ...]:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(3).tolist()


def through_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(encode_state(state), buffer)
    buffer.seek(0)
    return decode_state(torch.load(buffer, weights_only=True))


def test_random_sequence_continues_after_a_round_trip() -> None:
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


def test_incomplete_rng_state_error_says_what_to_do() -> None:
    with pytest.raises(CheckpointLoadError, match="skip_checkpoint_components"):
        RNGState().load_state_dict({"torch": torch.get_rng_state()})


def test_new_ranks_get_reproducible_and_distinct_random_numbers(caplog: pytest.LogCaptureFixture) -> None:
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


def test_states_of_missing_devices_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    rng = RNGState()
    stored = rng.state_dict()
    gone = {"type": "no_such_accelerator", "states": [torch.zeros(16, dtype=torch.uint8)] * 2}
    expected = draw()
    rng.load_state_dict({**stored, "accelerator": gone})
    assert "2 no_such_accelerator device(s)" in caplog.text
    assert draw() == expected


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_device_random_sequence_continues() -> None:
    device = torch.accelerator.current_accelerator()
    stored = through_file(RNGState().state_dict())
    expected = torch.rand(3, device=device)
    RNGState().load_state_dict(stored)
    assert torch.equal(torch.rand(3, device=device), expected)


# --- states that no save of ours writes

PYTHON = random.Random(0).getstate()
NUMPY = np.random.RandomState(0).get_state()


def torch_state(left: int, following: int) -> torch.Tensor:
    data = bytearray(torch.Generator().get_state().tolist())
    struct.pack_into("@QiiQ", data, 0, 0, left, 1, following)
    return torch.tensor(list(data), dtype=torch.uint8)


def numpy_with(position: int, value: Any) -> list[Any]:
    return [*NUMPY[:position], value, *NUMPY[position + 1 :]]


def accelerator_with(**changes: Any) -> dict[str, Any]:
    return {"type": "no_such_accelerator", "states": [torch.zeros(16, dtype=torch.uint8)], **changes}


MALFORMED: list[tuple[str, Any, str]] = [
    ("python", None, "python is None, expected a sequence of 3"),
    ("python", (2, *PYTHON[1:]), "version is 2"),
    ("python", (3, PYTHON[1][:-1], None), "words has 624 entries, expected 625"),
    ("python", (3, (*PYTHON[1][:-1], 625), None), "position is 625, expected an integer from 0 to 624"),
    ("python", (3, (-1, *PYTHON[1][1:]), None), "words is -1"),
    ("python", (3, (2**32, *PYTHON[1][1:]), None), "words is 4294967296"),
    ("python", (3, ("a", *PYTHON[1][1:]), None), "words is 'a'"),
    ("python", (3, (0,) * 625, None), "contains only zeros"),
    ("python", (3, PYTHON[1], "x"), "gauss_next is 'x'"),
    ("numpy", {"bit_generator": "MT19937"}, "numpy is of type dict"),
    ("numpy", NUMPY[:3], "numpy has 3 entries, expected 5"),
    ("numpy", numpy_with(0, "PCG64"), "generator 'PCG64'"),
    ("numpy", numpy_with(0, NUMPY[1]), "generator of type ndarray"),
    ("numpy", numpy_with(1, NUMPY[1][:-1]), "words has 623 entries"),
    ("numpy", numpy_with(1, NUMPY[1].astype(np.int64)), "dtype int64"),
    ("numpy", numpy_with(1, np.zeros(624, np.uint32)), "contains only zeros"),
    ("numpy", numpy_with(2, 625), "position is 625, expected an integer from 0 to 624"),
    ("numpy", numpy_with(2, 10**9), "position is 1000000000"),
    ("numpy", numpy_with(2, -5), "position is -5"),
    ("numpy", numpy_with(3, 2), "has_gauss is 2"),
    ("numpy", numpy_with(4, float("nan")), "cached_gaussian is nan"),
    ("numpy", numpy_with(4, None), "cached_gaussian is None"),
    ("torch", [0] * 5056, "torch is of type list"),
    ("torch", torch.zeros(16, dtype=torch.uint8), r"torch has shape \(16,\)"),
    ("torch", torch.zeros(5056), "torch has dtype torch.float32"),
    ("torch", torch.zeros(5056, dtype=torch.uint8), "torch is rejected by torch"),
    ("torch", torch.zeros(1, dtype=torch.uint8).expand(5056), "torch has strides"),
    ("torch", torch_state(600, 624), "at word 624 with 600 left"),
    ("accelerator", [], "accelerator is of type list"),
    ("accelerator", accelerator_with(type=None), "type is None"),
    ("accelerator", accelerator_with(states=None), "states is None"),
    ("accelerator", {"type": "no_such_accelerator", "index": 0, "state": None}, "state is None"),
    ("accelerator", {"type": "no_such_accelerator", "state": torch.zeros(16, dtype=torch.uint8)}, "index is None"),
    ("accelerator", accelerator_with(states=["x"]), r"states\[0\] is 'x'"),
    ("accelerator", accelerator_with(states=[torch.zeros(16)]), r"states\[0\] has dtype torch.float32"),
    ("accelerator", accelerator_with(states=[torch.zeros(4, 4, dtype=torch.uint8)]), r"shape \(4, 4\)"),
]


@pytest.mark.parametrize(("part", "value", "message"), MALFORMED, ids=[f"{one[0]}-{one[2][:40]}" for one in MALFORMED])
def test_malformed_rng_state_is_rejected_and_changes_no_generator(part: str, value: Any, message: str) -> None:
    rng = RNGState()
    stored = rng.state_dict()
    expected = draw()
    rng.load_state_dict(stored)
    other = through_file(stored)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    before = (random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state())
    for load in (rng.check_state_dict, rng.load_state_dict):
        with pytest.raises(CheckpointLoadError, match=rf'{message}.*skip_checkpoint_components=\["rng"\]'):
            load({**other, part: value})
    after = (random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state())
    assert before[:3] == after[:3] and torch.equal(before[3], after[3])
    rng.restore()
    assert draw() == expected, "the previously loaded state is still restored"


def test_rng_state_must_be_a_dict() -> None:
    with pytest.raises(CheckpointLoadError, match="expected a dict"):
        RNGState().load_state_dict([1])  # type: ignore[arg-type]


def test_rng_states_at_every_position_and_as_lists_are_accepted() -> None:
    rng = RNGState()
    for _ in range(700):
        random.random(), np.random.rand(), torch.rand(1)
        rng.check_state_dict(rng.state_dict())
    stored = rng.state_dict()
    expected = draw()
    version, words, gauss = stored["python"]
    name, numbers, *rest = stored["numpy"]
    rng.load_state_dict(
        {**stored, "python": [version, list(words), gauss], "numpy": [name, numbers.tolist(), *rest]},
    )
    assert draw() == expected
