"""Losses with torch.compile return the same values as without."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.loss import CausalLoss, ChunkedCausalLoss, LinearCrossEntropyLoss
from tests.support.sampling import sampled

HEAD = nn.Linear(8, 32)
MAKE: dict[str, Callable[..., Callable[[Tensor, Tensor], Tensor]]] = {
    "causal": CausalLoss,
    "chunked": lambda compile: ChunkedCausalLoss(4, compile=compile),
    "linear": lambda compile: LinearCrossEntropyLoss(HEAD, chunk_size=8, compile=compile),
}


@pytest.mark.parametrize("name", sampled(MAKE, ["chunked"]))
def test_compiled_loss_has_the_same_value_and_gradient(name: str) -> None:
    torch.manual_seed(0)
    outputs = torch.randn(2, 9, 8 if name == "linear" else 32, requires_grad=True)
    labels = torch.randint(0, 32, (2, 9)).masked_fill(torch.rand(2, 9) < 0.3, -100)
    found = []
    for compile in (False, True):
        loss = MAKE[name](compile=compile)(outputs, labels)
        found.append((loss, *torch.autograd.grad(loss, outputs)))
    torch.testing.assert_close(found[1], found[0])


def test_compiled_loss_can_be_copied_and_pickled() -> None:
    loss = ChunkedCausalLoss(4, compile=True)
    assert copy.deepcopy(loss).compile and pickle.loads(pickle.dumps(loss)).compile
    assert LinearCrossEntropyLoss(HEAD, compile=True).unfused().compile
