"""Messages between ranks: values arrive as they were sent, and bytes of a stranger run no code."""

import json
import os
import pickle
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from forgather.ml.distributed import DistributedError
from forgather.ml.distributed.rank_messages import decode, encode, length_of, packed
from forgather.ml.trainer.loading.empty_batch import EmptyBatch

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]
SHAPES = [(), (1,), (7,), (0, 5), (3, 5), (2, 3, 5), (1, 2, 3, 4)]


class Pair(NamedTuple):
    left: Any
    right: Any


class Tree:
    """Object with `_fields` that is not a tuple, like a node of a syntax tree."""

    _fields = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


def there_and_back(value: Any) -> Any:
    return decode(packed(encode(value)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape_round_trip(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        sent = torch.randint(0, 2, shape).to(dtype)
        got = there_and_back({"odd": torch.tensor([True] * 3), "x": sent})["x"]
        assert got.dtype == dtype and got.shape == sent.shape
        assert torch.equal(got.to(torch.complex128), sent.to(torch.complex128)), shape


def test_non_contiguous_tensors_are_accepted_and_gradients_dropped() -> None:
    sent = torch.arange(12.0).view(3, 4).requires_grad_()
    got = there_and_back({"t": sent.t(), "strided": sent[::2, ::3], "expanded": sent[:, :1].expand(3, 4)})
    assert torch.equal(got["t"], sent.t()) and torch.equal(got["strided"], sent[::2, ::3])
    assert torch.equal(got["expanded"], sent[:, :1].expand(3, 4))
    assert not got["t"].requires_grad
    # One row of a column is contiguous, with the stride of the whole.
    lone, conjugate = torch.arange(6).view(3, 2)[2:, 1], torch.tensor([1 + 2j]).conj()
    got = there_and_back([lone, conjugate])
    assert torch.equal(got[0], lone) and torch.equal(got[1], conjugate)


def test_nested_python_values_round_trip() -> None:
    sent = {
        "none": None,
        "text": "ä\n",
        "numbers": (1, 2.5, True, 10**30),
        "nested": {"list": [torch.ones(2), "x", {"deep": (torch.zeros(1, dtype=torch.bool), None)}]},
        3: {1, 2},
        "empty": [{}, [], ()],
        "bytes": b"\0\1",
    }
    got = there_and_back(sent)
    assert got.keys() == sent.keys()
    assert all(got[name] == sent[name] for name in sent if name != "nested")
    assert type(got["numbers"]) is tuple and type(got["numbers"][2]) is bool
    ones, text, deep = got["nested"]["list"]
    assert torch.equal(ones, torch.ones(2)) and text == "x"
    assert torch.equal(deep["deep"][0], torch.tensor([False])) and deep["deep"][1] is None


def test_named_tuples_are_kept_and_other_mappings_become_dicts() -> None:
    got = there_and_back(Pair(torch.ones(1), [Pair(1, None)]))
    assert type(got) is Pair and torch.equal(got.left, torch.ones(1)) and got.right == [Pair(1, None)]
    for sent in (UserDict({"x": torch.ones(1)}), OrderedDict(x=torch.ones(1))):
        got = there_and_back({"inner": sent})
        assert type(got["inner"]) is dict and torch.equal(got["inner"]["x"], torch.ones(1))


def test_empty_batch_round_trips() -> None:
    got = there_and_back([EmptyBatch(x=torch.ones(1)), {"x": 1}])
    assert type(got[0]) is EmptyBatch and torch.equal(got[0]["x"], torch.ones(1)) and type(got[1]) is dict


def test_message_contains_its_length() -> None:
    message = packed(encode({"x": torch.arange(1000)}))
    assert length_of(message[:100]) == len(message) > 8000
    # A buffer of a longer message may be reused.
    longer = torch.cat([message, torch.full((500,), 7, dtype=torch.uint8)])
    assert torch.equal(decode(longer)["x"], torch.arange(1000))


def test_tensors_are_aligned_for_vector_instructions() -> None:
    got = there_and_back([torch.ones(1, dtype=torch.bool), torch.ones(3, dtype=torch.float64), torch.ones(1)])
    offsets = [tensor.storage_offset() * tensor.element_size() % 64 for tensor in got]
    assert offsets == [0, 0, 0]


def test_message_is_independent_of_later_changes_to_the_tensors() -> None:
    sent = torch.ones(3)
    message = packed(encode({"x": sent}))
    sent.zero_()
    assert torch.equal(decode(message)["x"], torch.ones(3))


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("value", [torch.ones(2, 2).to_sparse(), torch.ones(2, 2).to_sparse_csr()], ids=["coo", "csr"])
def test_sparse_tensors_are_rejected_with_a_remedy(value: Any) -> None:
    with pytest.raises(TypeError, match=r"dense tensors.*set dispatch_batches=False"):
        encode({"x": value})


@pytest.mark.parametrize(
    "value",
    [
        numbers(),
        Tree(3),
        lambda: 1,
        np.zeros(2, dtype=[("a", int)]),
        np.ma.masked_equal([1, 2], 2),
        torch.ones(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["generator", "object", "function", "records", "masked", "meta", "nested"],
)
def test_other_values_are_an_error_that_names_their_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be sent to other ranks, at images\.0?.*dispatch_batches=False"):
        encode({"labels": 1, "images": {"0": value}})


def test_nested_values_beyond_the_recursion_limit_are_an_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="very deep nesting cannot be sent"):
        encode(value)


def test_similar_batches_are_distinguished() -> None:
    batches = [
        {"a": torch.arange(4), "b": torch.ones(2)},
        {"b": torch.ones(2), "a": torch.arange(4)},
        {"a": torch.arange(6).view(2, 3), "b": torch.ones(2)},
        {"a": torch.arange(4).float(), "b": torch.ones(2)},
        {"a": torch.arange(4), "b": torch.zeros(0, 3)},
        {"a": torch.arange(8)[::2], "b": torch.ones(2)},
    ]
    for batch in batches * 2:
        came = there_and_back(batch)
        assert list(came) == list(batch)
        for name, tensor in batch.items():
            assert came[name].dtype == tensor.dtype and torch.equal(came[name], tensor)


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Reading:
    name: str
    values: tuple[Any, ...] = ()
    kind: Colour = Colour.RED

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a reading needs a name")


@pytest.mark.parametrize(
    "value",
    [
        float("inf"),
        -0.0,
        0.1 + 0.2,
        1 + 2j,
        '\ud800 \x1b[2J "quoted"',
        b"",
        {(1, "a"): b"x", None: [b"y"]},
        frozenset({(2, None)}),
        torch.bfloat16,
        torch.Size([2, 3]),
        torch.device("cpu"),
        Colour.RED,
        Reading("a", (Reading("b"), b"c")),
        {"tag": ["tensor", "float32", [2], 8]},
        np.float64(0.1),
        np.str_("text"),
        np.datetime64("2020-01-02"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_keep_type_and_content(value: Any) -> None:
    got = there_and_back(value)
    assert type(got) is type(value) and got == value and repr(got) == repr(value)


def test_arrays_round_trip() -> None:
    sent = [
        np.arange(6).reshape(2, 3)[:, ::2],
        np.array(["a", None, 3], dtype=object),
        np.zeros((0, 2)),
        np.array(["ä", "b"]),
    ]
    for array, got in zip(sent, there_and_back(sent), strict=True):
        assert got.dtype == array.dtype and got.shape == array.shape and got.tolist() == array.tolist()
        got[:] = got  # not read-only


def test_errors_round_trip() -> None:
    error = DistributedError("saving", 3, "OSError", "disk full", "Traceback ...")
    got = there_and_back({"error": error})["error"]
    assert type(got) is DistributedError and vars(got) == vars(error)


def message_with(header: object) -> torch.Tensor:
    """Return a message that a stranger could send."""
    text = json.dumps(header).encode()
    return packed([(16 + len(text)).to_bytes(8, "little") + len(text).to_bytes(8, "little"), text, bytes(256)])


@pytest.mark.parametrize(
    "header",
    [
        ["data", "subprocess", "Popen", {"args": "touch ran"}],
        ["data", "builtins", "object", {}],
        ["data", "tests.unit.ml.distributed.test_rank_messages", "Reading.__post_init__", {}],
        ["named", "builtins", "str", "x"],
        ["enum", "builtins", "dict", "x"],
        ["enum", "os.path", "os", "system"],
        ["registered", "Popen", ["touch ran"]],
        ["array", "O", [2], 16],
        ["array", "<f8", [10**12], 8],
        ["tensor", "load", [1], 8],
        ["tensor", "float32", [10**12], 8],
        ["tensor", "float32", [2, -1], 10**9],
        ["dtype", "__name__"],
        ["_blob", 3],
        ["unknown"],
        [],
        [[]],
    ],
    ids=str,
)
def test_forged_messages_run_nothing(header: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError, RuntimeError)):
        decode(message_with(header))
    assert not list(tmp_path.iterdir())


def test_pickles_are_not_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    bomb = pickle.dumps(Bomb())
    with pytest.raises(ValueError):
        decode(packed([(16 + len(bomb)).to_bytes(8, "little") + len(bomb).to_bytes(8, "little"), bomb]))
    assert not list(tmp_path.iterdir())
