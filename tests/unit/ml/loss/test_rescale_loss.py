"""`RescaleLoss`: a loss times a constant."""

import copy
import inspect

import pytest
import torch
from torch import Tensor

from forgather.ml.loss import CausalLoss, RescaleLoss


def plain(logits: Tensor, labels: Tensor, num_items_in_batch: int = 1) -> Tensor:
    return (logits - labels).sum() / num_items_in_batch


def value(loss: RescaleLoss) -> float:
    return loss(torch.tensor([3.0]), torch.tensor([1.0])).item()


def test_loss_is_rescaled_except_inside_no_rescale() -> None:
    loss = RescaleLoss(plain, 0.25)
    assert value(loss) == 0.5
    with loss.no_rescale():
        with loss.no_rescale():
            assert value(loss) == 2.0
        assert value(loss) == 2.0
    assert value(loss) == 0.5


def test_rescaling_is_restored_after_an_error() -> None:
    loss = RescaleLoss(plain, 0.25)
    with pytest.raises(KeyError), loss.no_rescale():
        raise KeyError
    assert value(loss) == 0.5


def test_num_targets_exists_if_the_inner_loss_has_it() -> None:
    labels = torch.tensor([[1, 2, -100]])
    assert int(RescaleLoss(CausalLoss(), 0.5).num_targets(labels)) == 1
    assert not hasattr(RescaleLoss(plain, 0.5), "num_targets")


def test_arguments_of_the_inner_loss_are_accepted() -> None:
    loss = RescaleLoss(plain, 0.5)
    assert "num_items_in_batch" in inspect.signature(loss).parameters
    assert loss(torch.tensor([3.0]), torch.tensor([1.0]), num_items_in_batch=2).item() == 0.5


def test_rescale_loss_can_be_copied() -> None:
    assert value(copy.deepcopy(RescaleLoss(plain, 0.25))) == 0.5


def test_rescale_applies_to_a_mean_computed_elsewhere() -> None:
    loss, mean = RescaleLoss(plain, 0.25), torch.tensor(2.0)
    assert loss.rescale(mean).item() == loss.rescale(mean, torch.tensor([1])).item() == 0.5
    with loss.no_rescale():
        assert not loss.is_rescaling
        assert loss.rescale(mean) is mean
    assert loss.is_rescaling
    assert value(RescaleLoss(plain)) == 2.0


class ByLabels(RescaleLoss):
    def rescale(self, mean: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        return mean * len(labels) if self.is_rescaling else mean


def test_subclass_that_overrides_rescale_applies_it_to_every_call() -> None:
    loss, logits, labels = ByLabels(plain), torch.tensor([3.0, 5.0]), torch.tensor([1.0, 1.0])
    assert loss(logits, labels).item() == loss(logits, labels=labels).item() == 12.0
    with loss.no_rescale():
        assert loss(logits, labels).item() == 6.0
