"""State schema: every value has the declared type, or the error names its key."""

import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.state_schema import (
    Check,
    Schema,
    Violation,
    amount,
    anything,
    count,
    described,
    every,
    flag,
    integer,
    list_like,
    list_of,
    mapping_of,
    number,
    optional,
    plain,
    position,
    positive,
    rate,
    real_vector,
    relative_name,
    relative_path,
    text,
)
from tests.support.wrong_values import assert_refused, replaced

VALUES: list[tuple[Check, list[Any], list[Any]]] = [
    (count, [0, 7, 2**63 - 1], [-1, 2**63, True, 1.0, "1", None, torch.tensor(1), np.int64(1)]),
    (positive, [1], [0, -1, True]),
    (position, [-1, 0, 5], [-2, False, -1.0]),
    (integer, [-(2**63), 2**64 - 1], [2**64, 2**70, False, 1.0]),
    (flag, [True, False], [0, 1, None, "True", np.bool_(True), torch.tensor(True)]),
    (number, [1, -1.5, math.nan, math.inf], [True, "1", 2**70, torch.tensor(1.0), None]),
    (amount, [0, 0.5, 2**90], [-1, -0.5, math.nan, math.inf, 2**1001, True]),
    (text, ["", "a"], [b"a", 1, None]),
    (
        rate,
        [0.1, 1, torch.tensor(0.1), torch.tensor([3])],
        [torch.zeros(2), torch.tensor(1j), torch.empty((), device="meta")],
    ),
    (
        real_vector,
        [torch.zeros(0), torch.zeros(3), torch.arange(3)],
        [torch.zeros(()), torch.zeros(2, 3), torch.zeros(1).expand(2**40), torch.zeros(3, dtype=torch.bool), [1.0]],
    ),
    (
        relative_name,
        ["checkpoint-3", "a b", "x..y"],
        ["", ".", "..", ".hidden", "a/b", "/a", "../x", "a\\b", "a\0", None, b"a", 3],
    ),
    (relative_path, ["runs/a", "a", "runs/.x"], ["", "/a", "a/../b", "..", "a//b", "a/", "./a", "a\0b", "a\\b", None]),
    (optional(count), [None, 3], [-1, "3", False]),
    (list_of(count), [[], [1, 2], (1,)], [{}, "12", [1, -1], [[1]], None, torch.zeros(2)]),
    (list_of(count, length=2), [[1, 2]], [[1], [1, 2, 3]]),
    (list_like([text, count]), [["a", 1], ("a", 1)], [["a"], [1, "a"], "a1"]),
    (mapping_of(text, count), [{}, {"a": 1}, OrderedDict(a=1), Counter("ab")], [{1: 1}, {"a": -1}, [], None]),
    (every(count, positive), [1], [0, -1]),
    (plain, [None, {"a": [1, (2.0, {3})]}, torch.zeros(2), Counter("a"), np.zeros(2)], [print, {"a": [len]}, int]),
    (anything, [None, print], []),
]


@pytest.mark.parametrize(("check", "fine", "wrong"), VALUES, ids=[str(number) for number in range(len(VALUES))])
def test_values_are_accepted_or_rejected(check: Check, fine: list[Any], wrong: list[Any]) -> None:
    for value in fine:
        check(value)
    for value in wrong:
        with pytest.raises(Violation):
            check(value)


SCHEMA = Schema({"step": count, "inner": Schema({"names": list_of(text)}), "best": optional(number)}, may_lack=["best"])
STATE = {"step": 3, "inner": {"names": ["a", "b"]}, "best": 0.5}


def test_error_names_the_key_and_the_fix() -> None:
    with pytest.raises(CheckpointLoadError) as caught:
        SCHEMA.check(replaced(STATE, "inner.names.1", 7), "trainer")
    message = str(caught.value)
    assert message.startswith("trainer.inner.names.1 in the checkpoint is 7, but should be text.")
    assert 'skip_checkpoint_components=["trainer"]' in message and "another checkpoint" in message


def test_nested_component_error_names_the_parent_to_skip() -> None:
    with pytest.raises(
        CheckpointLoadError, match=r'trainer\.interval\.step .*skip_checkpoint_components=\["trainer"\]'
    ):
        SCHEMA.check({**STATE, "step": None}, "trainer.interval")


def test_unknown_keys_are_accepted_and_missing_required_keys_rejected() -> None:
    newer = {**STATE, "added": object()}
    SCHEMA.check(newer, "trainer")
    assert SCHEMA.known(newer) == STATE
    SCHEMA.check({name: value for name, value in STATE.items() if name != "best"}, "trainer")
    with pytest.raises(CheckpointLoadError, match="has the key 'step'"):
        SCHEMA.check({"inner": STATE["inner"]}, "trainer")


@pytest.mark.parametrize("state", [None, [], "text", 3, torch.zeros(2, 3)])
def test_state_must_be_a_dict(state: Any) -> None:
    assert_refused(lambda value: SCHEMA.check(value, "trainer"), state, "trainer in the checkpoint")


class Hostile:
    """Value that raises when it is printed, compared or tested for truth."""

    def __repr__(self) -> str:
        raise AssertionError("repr ran")

    __str__ = __repr__

    def __bool__(self) -> bool:
        raise AssertionError("it was tested for truth")

    __eq__ = __hash__ = __len__ = __bool__  # type: ignore[assignment]


def test_values_are_described_without_calling_their_methods() -> None:
    for check in (
        count,
        flag,
        number,
        text,
        relative_name,
        rate,
        optional(text),
        list_of(text),
        mapping_of(text, text),
    ):
        with pytest.raises(Violation) as caught:
            check(Hostile())
        assert "Hostile" in caught.value.found
    assert described("x" * 1000).endswith("of 1000 characters")
    assert described(10**5000) == "an integer of 16610 bits"


def test_cyclic_data_is_rejected() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(Violation, match="levels deep"):
        plain(value)
