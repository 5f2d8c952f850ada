"""Batch messages: encoding and decoding of tensors and Python values."""

from collections import OrderedDict, UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from forgather.ml.trainer.loading.batch_messages import decode, encode, length_of, packed
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
    return decode(packed(encode(value)))[0]


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
    tree = there_and_back({"tree": Tree(3)})["tree"]
    assert type(tree) is Tree and tree.left == 3


def test_empty_batch_round_trips() -> None:
    got = there_and_back([EmptyBatch(x=torch.ones(1)), {"x": 1}])
    assert type(got[0]) is EmptyBatch and torch.equal(got[0]["x"], torch.ones(1)) and type(got[1]) is dict


def test_message_contains_its_length() -> None:
    message = packed(encode({"x": torch.arange(1000)}))
    assert length_of(message[:100]) == len(message) > 8000
    # A buffer of a longer message may be reused.
    longer = torch.cat([message, torch.full((500,), 7, dtype=torch.uint8)])
    assert torch.equal(decode(longer)[0]["x"], torch.arange(1000))


def test_tensors_are_aligned_for_vector_instructions() -> None:
    got = there_and_back([torch.ones(1, dtype=torch.bool), torch.ones(3, dtype=torch.float64), torch.ones(1)])
    offsets = [tensor.storage_offset() * tensor.element_size() % 64 for tensor in got]
    assert offsets == [0, 0, 0]


def test_message_is_independent_of_later_changes_to_the_tensors() -> None:
    sent = torch.ones(3)
    message = packed(encode({"x": sent}))
    sent.zero_()
    assert torch.equal(decode(message)[0]["x"], torch.ones(3))


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("value", [torch.ones(2, 2).to_sparse(), torch.ones(2, 2).to_sparse_csr()], ids=["coo", "csr"])
def test_sparse_tensors_are_rejected_with_a_remedy(value: Any) -> None:
    with pytest.raises(TypeError, match="make it dense, or set dispatch_batches=False"):
        encode({"x": value})


def test_unpicklable_value_is_an_error() -> None:
    with pytest.raises(TypeError, match="generator"):
        encode({"x": numbers()})


def test_metadata_is_sent_with_the_batch() -> None:
    value = {"x": torch.ones(2)}
    for note in (None, ("batch", {"index": 3}), "again"):
        content, came = decode(packed(encode(value, note)))
        assert came == note and torch.equal(content["x"], torch.ones(2))


def test_similar_batches_are_distinguished() -> None:
    """Layouts are cached: different names, shapes, dtypes and orders must not match a cached layout."""
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


def test_python_values_are_not_shared_between_messages() -> None:
    first = there_and_back({"x": torch.ones(1), "names": {"a"}})
    first["names"].add("b")
    assert there_and_back({"x": torch.ones(1), "names": {"a"}})["names"] == {"a"}
