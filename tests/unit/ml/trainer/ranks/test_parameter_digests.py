"""Sampled digests of parameters: every bit counts, and windows cover every element in turn."""

import pytest
import torch
from torch import Tensor

from forgather.ml.trainer.ranks.parameter_digests import ParameterDigests

LIMIT = 1000


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "large": torch.randn(3000, generator=generator),
        "short": torch.randn(700, generator=generator).to(torch.bfloat16),
        "strided": torch.randn(6, 5, 4, generator=generator).permute(2, 0, 1),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0),
    }


def digests_of(values: dict[str, Tensor], number: int, limit: int | None = LIMIT) -> dict[str, int]:
    return ParameterDigests(list(values.items()), limit).start(number).by_name()


def test_equal_values_have_equal_digests() -> None:
    for number in range(3):
        assert digests_of(parameters(), number) == digests_of(parameters(), number)


@pytest.mark.parametrize("name", ["large", "short", "strided", "scalar"])
def test_every_element_is_read_within_one_round_of_windows(name: str) -> None:
    num_windows = ParameterDigests(list(parameters().items()), LIMIT).num_windows
    assert num_windows > 1
    before = [digests_of(parameters(), number) for number in range(num_windows)]
    for place in range(0, parameters()[name].numel(), 13):
        changed = parameters()
        memory = torch.as_strided(changed[name], (changed[name].numel(),), (1,))
        memory[place : place + 1].view(torch.int16 if name == "short" else torch.int32).bitwise_xor_(1)
        after = [digests_of(changed, number) for number in range(num_windows)]
        differing = {key for old, new in zip(before, after, strict=True) for key in old if old[key] != new[key]}
        assert differing == {name}


def test_a_model_within_the_limit_is_read_whole() -> None:
    digests = ParameterDigests(list(parameters().items()))
    assert digests.num_windows == 1
    assert digests.start(0).by_name() == digests.start(5).by_name()


def test_sign_flips_of_two_elements_do_not_cancel() -> None:
    plain, flipped = {"weight": torch.ones(100)}, {"weight": torch.ones(100)}
    flipped["weight"][[3, 4]] = -1.0
    one = {"weight": torch.ones(100)}
    one["weight"][3] = -1.0
    found = {digests_of(values, 0)["weight"] for values in (plain, flipped, one)}
    assert len(found) == 3
