"""Loaded tensors: accepted shapes, layouts and storages, and the errors for all others."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.tensor_checks import (
    OwnStorage,
    Where,
    check_mapping,
    check_sharing,
    check_tensor,
    is_number,
    one_number,
    owned,
    whole_number,
)

WHERE = Where("optimizer state of 'layer.weight'", "optimizer")


def beyond_its_storage() -> Tensor:
    tensor = torch.zeros(64)
    tensor.untyped_storage().resize_(16)
    return tensor


def test_error_names_found_and_expected_shape_and_the_fix() -> None:
    with pytest.raises(CheckpointLoadError) as caught:
        check_tensor(torch.zeros(3), WHERE.at("exp_avg"), shape=(64, 16))
    assert str(caught.value).startswith("optimizer state of 'layer.weight': exp_avg has shape (3,), expected (64, 16).")
    assert 'Set skip_checkpoint_components=["optimizer"] to start it fresh, or choose another checkpoint.' in str(
        caught.value
    )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 3),
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(12)[3:9].view(2, 3),
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d),
        torch.nn.Parameter(torch.zeros(2)),
    ],
    ids=lambda tensor: str(tuple(tensor.shape)),
)
def test_dense_tensors_are_accepted(tensor: Tensor) -> None:
    assert check_tensor(tensor, WHERE, shape=tensor.shape, kind="floating") is tensor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(1).expand(4, 3), r"strides \(0, 0\)"),
        (lambda: torch.zeros(4, 1).expand(4, 3), r"strides \(1, 0\)"),
        (lambda: torch.zeros(3, 4).t(), r"strides \(1, 4\)"),
        (lambda: torch.zeros(4, 6)[:, ::2], r"strides \(6, 2\)"),
        (lambda: torch.zeros(8).as_strided((4, 3), (1, 1)), r"strides \(1, 1\)"),
        (lambda: torch.zeros(4, 3).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.zeros(4, 3).to_sparse_csr(), "layout torch.sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]), "layout nested"),
        (lambda: torch.quantize_per_tensor(torch.zeros(4, 3), 1.0, 0, torch.qint8), "quantized"),
        (lambda: torch.zeros(4, 3, device="meta"), "without data"),
        (lambda: torch.zeros(4, 3, dtype=torch.complex64).conj(), "conjugated"),
        (beyond_its_storage, "needs 256 bytes of a storage of 16"),
        (lambda: [0.0], "of type list, expected a plain tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_layouts_are_rejected(make: Callable[[], object], message: str) -> None:
    with pytest.raises(CheckpointLoadError, match=message):
        check_tensor(make(), WHERE)


def test_parameter_strides_are_accepted_but_expanded_ones_rejected() -> None:
    transposed = torch.zeros(3, 4).t()
    assert check_tensor(torch.ones(3, 4).t(), WHERE, like=transposed) is not None
    with pytest.raises(CheckpointLoadError, match="strides"):
        check_tensor(torch.ones(3, 4).t(), WHERE, like=torch.zeros(4, 3))
    expanded = torch.zeros(1).expand(4, 3)
    with pytest.raises(CheckpointLoadError, match="strides"):
        check_tensor(expanded, WHERE, like=expanded)


def test_any_order_accepts_only_dense_permuted_strides() -> None:
    vectors = torch.linalg.qr(torch.rand(4, 4))[0].t().contiguous().t()
    assert not vectors.is_contiguous()
    assert check_tensor(vectors, WHERE, any_order=True) is vectors
    for broken in (torch.zeros(1).expand(4, 4), torch.zeros(4, 8)[:, ::2], torch.zeros(8).as_strided((4, 4), (1, 1))):
        with pytest.raises(CheckpointLoadError, match="strides"):
            check_tensor(broken, WHERE, any_order=True)


@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [
        (torch.float32, {"floating", "real"}),
        (torch.bfloat16, {"floating", "real"}),
        (torch.complex64, {"complex"}),
        (torch.int64, {"real"}),
        (torch.bool, set()),
    ],
)
def test_dtype_kinds(dtype: torch.dtype, kinds: set[str]) -> None:
    for kind in ("floating", "complex", "real"):
        if kind in kinds:
            check_tensor(torch.zeros(2, dtype=dtype), WHERE, kind=kind)  # type: ignore[arg-type]
        else:
            with pytest.raises(CheckpointLoadError, match=f"has dtype {dtype}, expected a {kind} one"):
                check_tensor(torch.zeros(2, dtype=dtype), WHERE, kind=kind)  # type: ignore[arg-type]


class TestOwnStorage:
    def check(self, *tensors: Tensor) -> None:
        own = OwnStorage()
        for number, tensor in enumerate(tensors):
            own.add(tensor, WHERE.at(number))
        own.check()

    def test_overlapping_storage_is_rejected_with_both_names(self) -> None:
        flat = torch.zeros(10)
        pairs = [(flat, flat), (flat, flat[4:6]), (flat[:5], flat[4:]), (flat, torch.from_numpy(flat.numpy()))]
        for one, other in pairs:
            with pytest.raises(CheckpointLoadError, match=r"shares its memory with .*'layer.weight': \d, expected"):
                self.check(one, torch.zeros(3), other)

    def test_disjoint_views_are_accepted(self) -> None:
        flat = torch.zeros(10)
        self.check(flat[:5], flat[5:], flat[:0], flat[:0], torch.zeros(10))

    def test_view_is_copied_into_separate_storage(self) -> None:
        flat = torch.arange(10.0)
        view = owned(flat[4:])
        assert torch.equal(view, flat[4:]) and view.untyped_storage().nbytes() == view.nbytes
        assert owned(flat) is flat
        assert type(owned(torch.nn.Parameter(flat))) is Tensor
        assert not owned(torch.zeros(2, requires_grad=True)).requires_grad


def test_one_number_accepts_only_finite_real_scalars() -> None:
    assert [one_number(value, WHERE) for value in (1, 2.5, torch.tensor([3]), np.float32(4))] == [1, 2.5, 3, 4]
    for value in (True, "1", None, float("nan"), float("inf"), torch.zeros(2), torch.tensor(True), 10**400, 1j):
        with pytest.raises(CheckpointLoadError):
            one_number(value, WHERE)
    with pytest.raises(CheckpointLoadError, match=r"is -1.0, expected a finite number of at least 0"):
        one_number(torch.tensor(-1.0), WHERE, at_least=0)
    assert not is_number(True) and is_number(float("nan"))


def test_whole_number_checks_type_and_range() -> None:
    assert whole_number(np.int64(3), WHERE, least=0, most=3) == 3
    for value in (-1, 4, 1.0, True, None, 10**400, torch.tensor(1)):
        with pytest.raises(CheckpointLoadError, match="expected an integer from 0 to 3"):
            whole_number(value, WHERE, least=0, most=3)


def test_malformed_mappings_and_tied_names_are_rejected() -> None:
    for value in ([], None, {1: 2}):
        with pytest.raises(CheckpointLoadError, match="expected"):
            check_mapping(value, WHERE)
    assert check_sharing([["a", "b"], ()], WHERE)
    for value in (None, 3, "ab", ["ab"], [["a", 1]], {"a": 1}):
        with pytest.raises(CheckpointLoadError, match="tied name"):
            check_sharing(value, WHERE)
