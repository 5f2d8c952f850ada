"""Next-token loss (`CausalLoss`)."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from forgather.ml.loss import CausalLoss


def make_batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, 7, (2, 5))
    labels[1, 3:] = -100
    return torch.randn(2, 5, 7, dtype=dtype, requires_grad=True), labels


def test_loss_is_the_mean_over_the_shifted_targets() -> None:
    logits, labels = make_batch()
    expected = cross_entropy(logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1))
    loss = CausalLoss()(logits, labels)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(one, logits)[0] for one in (loss, expected)]
    torch.testing.assert_close(*gradients)


def test_loss_of_many_labels_is_the_mean_over_the_targets() -> None:
    """More than a thousand labels are counted by another method."""
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 512, 8), torch.randint(0, 8, (4, 512))
    labels[torch.rand(labels.shape) < 0.3] = -100
    expected = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(CausalLoss()(logits, labels), expected)
    assert int(CausalLoss().num_targets(labels)) == int((labels[:, 1:] != -100).sum())


def test_first_label_of_a_sequence_is_not_a_target() -> None:
    logits, labels = make_batch()
    changed = labels.clone()
    changed[:, 0] = -100
    assert CausalLoss()(logits, changed) == CausalLoss()(logits, labels)
    assert int(CausalLoss().num_targets(changed)) == int(CausalLoss().num_targets(labels)) == 6


def test_loss_times_num_targets_is_the_sum() -> None:
    logits, labels = make_batch()
    loss = CausalLoss()
    total = cross_entropy(logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1), reduction="sum")
    torch.testing.assert_close(loss(logits, labels) * loss.num_targets(labels), total)


@pytest.mark.parametrize("length", [1, 4])
def test_without_targets_loss_and_gradients_are_zero(length: int) -> None:
    logits = torch.randn(2, length, 7, requires_grad=True)
    labels = torch.full((2, length), -100)
    loss = CausalLoss()(logits, labels)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None and not logits.grad.any()
    assert int(CausalLoss().num_targets(labels)) == 0


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_loss_is_computed_in_float32_or_better(dtype: torch.dtype, computed: torch.dtype) -> None:
    logits, labels = make_batch(dtype)
    loss = CausalLoss()(logits, labels)
    assert loss.dtype == computed
    torch.testing.assert_close(loss, CausalLoss()(logits.to(computed), labels))


def test_ignore_index_can_be_changed() -> None:
    logits, labels = make_batch()
    padded = labels.masked_fill(labels == -100, 0)
    assert int(CausalLoss(ignore_index=0).num_targets(padded)) == int((padded[:, 1:] != 0).sum())
    given = CausalLoss(ignore_index=0)(logits, padded)
    expected = cross_entropy(logits[:, :-1].reshape(-1, 7), padded[:, 1:].reshape(-1), ignore_index=0)
    torch.testing.assert_close(given, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, logits)[0] for one in (given, expected)))
