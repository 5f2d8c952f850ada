"""Token weighting: supported losses and target counts."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from forgather.ml.loss import CausalLoss, RescaleLoss
from forgather.ml.trainer.step_loss.model_loss import Forward, ModelLoss
from forgather.ml.trainer.step_loss.model_outputs import logits_of, own_loss_of
from forgather.ml.trainer.step_loss.token_weighting import StepLoss

LOGITS = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[1, 2, 3, 4], [-100, -100, 0, -100]])


def unshifted(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return unshifted(logits[:, :-1], labels[:, 1:])


def with_num_items(logits: Tensor, labels: Tensor, num_items_in_batch: int) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(
    ("loss", "num_targets"), [(unshifted, 5), (shifted, 4), (with_num_items, 5), (CausalLoss(), 4)]
)
def test_targets_are_counted_like_the_loss(loss: nn.Module, num_targets: int) -> None:
    step_loss = StepLoss(loss)
    if not step_loss.is_resolved:
        step_loss.resolve(LOGITS, LABELS)
    assert step_loss.is_resolved
    assert step_loss.count(LABELS) == num_targets


def test_first_position_is_resolved_without_any_target() -> None:
    for loss, num_targets in ((unshifted, 8), (shifted, 6)):
        step_loss = StepLoss(loss)
        step_loss.resolve(LOGITS, torch.full((2, 4), -100))
        assert step_loss.count(torch.zeros(2, 4, dtype=torch.long)) == num_targets


def test_labels_are_unchanged_after_resolution() -> None:
    labels = LABELS.clone()
    StepLoss(shifted).resolve(LOGITS, labels)
    assert torch.equal(labels, LABELS)


@pytest.mark.parametrize("loss", [unshifted, with_num_items])
def test_shares_sum_to_the_loss_of_the_full_batch(loss: nn.Module) -> None:
    step_loss = StepLoss(loss)
    step_loss.resolve(LOGITS, LABELS)
    shares = [
        step_loss.share(LOGITS[row, None], LABELS[row, None], step_loss.count(LABELS[row, None]), 5, 2)
        for row in range(2)
    ]
    torch.testing.assert_close(shares[0] + shares[1], unshifted(LOGITS, LABELS))


def test_share_without_targets_has_zero_gradients() -> None:
    logits = LOGITS.clone().requires_grad_()
    step_loss = StepLoss(unshifted)
    step_loss.resolve(logits, LABELS)
    share = step_loss.share(logits, torch.full((2, 4), -100), 0, 7, 1)
    share.backward()
    assert share.item() == 0.0
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros_like(logits))


def test_classes_and_regression_targets_count_by_sample() -> None:
    classes = StepLoss(functional.cross_entropy)
    classes.resolve(torch.zeros(3, 2), torch.tensor([0, 1, -100]))
    assert classes.count(torch.tensor([0, 1, -100])) == 2
    numbers = StepLoss(functional.mse_loss)
    numbers.resolve(torch.zeros(3, 2), torch.zeros(3, 2))
    assert numbers.count(torch.zeros(3, 2)) == 3


def test_rescaled_loss_has_the_kind_of_the_inner_loss() -> None:
    assert StepLoss(RescaleLoss(CausalLoss(), 0.5)).is_resolved
    assert not StepLoss(RescaleLoss(shifted, 0.5)).is_resolved
    rescaled = StepLoss(RescaleLoss(with_num_items, 0.5))
    rescaled.resolve(LOGITS, LABELS)
    torch.testing.assert_close(rescaled.share(LOGITS, LABELS, 5, 10, 2), unshifted(LOGITS, LABELS) / 4)


def test_logits_and_loss_are_found_in_outputs() -> None:
    class Outputs:
        logits = LOGITS
        loss = LOGITS.mean()

    for outputs in (LOGITS, {"logits": LOGITS}, (LOGITS.mean(), LOGITS), Outputs()):
        assert logits_of(outputs) is LOGITS
    assert own_loss_of(Outputs()) is Outputs.loss
    assert own_loss_of({"loss": Outputs.loss}) is Outputs.loss
    assert own_loss_of((Outputs.loss, LOGITS)) is Outputs.loss
    assert own_loss_of((LOGITS, LOGITS)) is None
    assert own_loss_of(()) is None
    assert own_loss_of(LOGITS) is None
    assert logits_of({"loss": Outputs.loss}) is None


@pytest.mark.parametrize("token_weighted", [True, False])
@pytest.mark.parametrize("of_whole", [True, False], ids=["all of the step", "part of the step"])
def test_zero_count_on_the_device_gives_zero_loss(token_weighted: bool, of_whole: bool) -> None:
    logits = LOGITS.clone().requires_grad_()
    step_loss = StepLoss(unshifted, token_weighted)
    count = torch.tensor(0)
    share = step_loss.share(logits, torch.full((2, 4), -100), count, count if of_whole else torch.tensor(7), 1)
    share.backward()
    assert share.item() == 0.0
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros_like(logits))


def test_model_loss_is_zero_for_a_zero_count_on_the_device() -> None:
    model_loss = ModelLoss(None, token_weighted=True)
    nothing = Forward(LOGITS, torch.tensor(math.nan))
    count = torch.tensor(0)
    assert model_loss.share(nothing, None, count, count, 1).item() == 0.0
