"""Chunked next-token loss, compared with the plain loss."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forgather.ml.loss import CausalLoss, ChunkedCausalLoss, LinearCrossEntropyLoss
from forgather.ml.loss.chunked_causal_loss import _CrossEntropyInParts, cross_entropy_in_parts, parts_of
from tests.support.memory import peak_bytes

VOCABULARY = 37


def make_batch(*shape: int, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return logits and labels, with some ignored labels."""
    torch.manual_seed(0)
    labels = torch.randint(0, vocabulary, shape)
    labels[torch.rand(shape) < 0.3] = -100
    return (3 * torch.randn(*shape, vocabulary)).to(dtype).requires_grad_(), labels


def loss_and_gradient(
    loss_fn: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    loss = loss_fn(logits, labels)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("shape", [(11,), (3, 9), (2, 2, 5)], ids=str)
@pytest.mark.parametrize("chunk_size", [1, 7, 256])
def test_chunked_loss_equals_the_plain_loss(shape: tuple[int, ...], chunk_size: int) -> None:
    logits, labels = make_batch(*shape)
    before = logits.detach().clone()
    given = loss_and_gradient(ChunkedCausalLoss(chunk_size), logits, labels)
    torch.testing.assert_close(given, loss_and_gradient(CausalLoss(), logits, labels), rtol=1e-5, atol=1e-6)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_loss_is_computed_in_float32_or_better(dtype: torch.dtype) -> None:
    logits, labels = make_batch(3, 9, dtype=dtype)
    loss, gradient = loss_and_gradient(ChunkedCausalLoss(7), logits, labels)
    expected, plain = loss_and_gradient(CausalLoss(), logits, labels)
    assert loss.dtype == expected.dtype and gradient.dtype == dtype
    torch.testing.assert_close(loss, expected)
    # Scaling rounds the gradient once more.
    torch.testing.assert_close(gradient, plain, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("length", [1, 4])
def test_without_targets_loss_and_gradient_are_zero(length: int) -> None:
    logits = torch.randn(2, length, VOCABULARY, requires_grad=True)
    labels = torch.full((2, length), -100)
    loss, gradient = loss_and_gradient(ChunkedCausalLoss(3), logits, labels)
    assert loss.item() == 0.0 and not gradient.any()
    assert ChunkedCausalLoss().num_targets(labels) == 0


def test_sums_and_means_over_targets_equal_the_plain_loss() -> None:
    logits, labels = make_batch(3, 9)
    plain, given = CausalLoss(ignore_index=5), ChunkedCausalLoss(7, ignore_index=5)
    labels = labels.clamp(min=0)
    labels[0] = 5
    assert given.num_targets(labels) == plain.num_targets(labels) > 0
    for reduction in ("sum", "mean"):
        expected = plain.sum_over_targets(logits, labels, reduction)
        torch.testing.assert_close(given.sum_over_targets(logits, labels, reduction), expected)


def test_logits_without_gradient_are_accepted() -> None:
    logits, labels = make_batch(3, 9)
    expected = CausalLoss()(logits, labels)
    torch.testing.assert_close(ChunkedCausalLoss(7)(logits.detach(), labels), expected.detach())
    with torch.no_grad():
        given = ChunkedCausalLoss(7)(logits, labels)
    assert not given.requires_grad
    torch.testing.assert_close(given, expected.detach())


def test_scaled_loss_has_a_scaled_gradient() -> None:
    logits, labels = make_batch(3, 9)
    _, gradient = loss_and_gradient(ChunkedCausalLoss(7), logits, labels)
    _, scaled = loss_and_gradient(lambda *batch: ChunkedCausalLoss(7)(*batch) * 3, logits, labels)
    torch.testing.assert_close(scaled, gradient * 3)


def test_second_backward_pass_is_rejected() -> None:
    loss = ChunkedCausalLoss(7)(*make_batch(3, 9))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_chunks_may_contain_tokens_without_targets() -> None:
    """This happens on accelerators: removing these tokens would require a device synchronisation."""
    logits, labels = make_batch(20)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    gradient = torch.full_like(logits, torch.nan, requires_grad=False)
    parts = [slice(start, start + 6) for start in range(0, 20, 6)]
    with torch.no_grad():
        total = cross_entropy_in_parts(logits, labels, parts, -100, gradient)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


def test_ignore_index_can_be_changed_on_accelerators() -> None:
    logits, labels = make_batch(20)
    padded = labels.masked_fill(labels == -100, 0)
    parts = [slice(start, start + 6) for start in range(0, 20, 6)]
    given = _CrossEntropyInParts.apply(logits, padded, parts, 0)
    expected = torch.nn.functional.cross_entropy(logits, padded, reduction="sum", ignore_index=0)
    torch.testing.assert_close(given, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, logits)[0] for one in (given, expected)))


def test_chunks_cover_all_tokens_on_accelerators() -> None:
    parts = parts_of(torch.empty(20, device="meta"), -100, 6)
    assert parts == [slice(0, 6), slice(6, 12), slice(12, 18), slice(18, 24)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_the_gradient_plus_one_chunk(dtype: torch.dtype) -> None:
    logits, labels = make_batch(4, 256, vocabulary=8192, dtype=dtype)
    plain, given = (
        peak_bytes(lambda loss_fn=loss_fn: loss_and_gradient(loss_fn, logits, labels))
        for loss_fn in (CausalLoss(), ChunkedCausalLoss(64))
    )
    part = 64 * 8192 * 4
    assert given < logits.nbytes + 2 * part
    assert given * 2 < plain


def test_unsuitable_inputs_are_explained() -> None:
    logits, labels = make_batch(3, 9)
    with pytest.raises(ValueError, match=r"chunk_size=0 of ChunkedCausalLoss .* at least 1"):
        ChunkedCausalLoss(0)
    with pytest.raises(ValueError, match=r"\[3, 9\] positions .* \[3, 8\] labels"):
        ChunkedCausalLoss()(logits, labels[:, 1:])
    with pytest.raises(ValueError, match=r"reduction='none' is unknown to ChunkedCausalLoss"):
        ChunkedCausalLoss().sum_over_targets(logits, labels, "none")


def test_second_derivative_is_rejected() -> None:
    hidden = torch.randn(2, 5, 4, requires_grad=True)
    labels = torch.randint(0, 7, (2, 5), dtype=torch.int32)
    head = torch.nn.Linear(4, 7)
    for name, loss in (
        ("ChunkedCausalLoss", ChunkedCausalLoss()(head(hidden), labels)),
        ("LinearCrossEntropyLoss", LinearCrossEntropyLoss(head)(hidden, labels)),
    ):
        with pytest.raises(
            RuntimeError, match=rf"{name} has no second derivative \(create_graph=True\): use CausalLoss"
        ):
            torch.autograd.grad(loss, hidden, create_graph=True)
