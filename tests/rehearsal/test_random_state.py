"""Random state of a device: the generator follows the rank to another device index."""

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forgather.ml.checkpoint.state.rng import RNGState, undisturbed_random_numbers
from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.trainer import Trainer, TrainingArguments


@pytest.fixture(autouse=True)
def first_device() -> Iterator[None]:
    yield
    torch.accelerator.set_device_index(0)


def saved_on(index: int) -> tuple[dict[str, Any], list[float]]:
    """Return a state from a process that trained on this device, and the numbers that it draws next."""
    torch.manual_seed(7)
    torch.accelerator.set_device_index(index)
    torch.rand(3, device="cuda")
    state = RNGState().state_dict()
    return state, torch.rand(3, device="cuda").tolist()


def resumed_on(index: int, state: dict[str, Any]) -> list[float]:
    torch.manual_seed(8)
    torch.accelerator.set_device_index(index)
    RNGState().load_state_dict(state)
    return torch.rand(3, device="cuda").tolist()


def as_list(state: dict[str, Any], num_devices: int, other: torch.Tensor | None = None) -> dict[str, Any]:
    """Return the state as earlier versions stored it; `other` is the state of all other devices."""
    other = torch.Generator("cuda").manual_seed(7).get_state() if other is None else other
    states = [other] * num_devices
    states[state["accelerator"]["index"]] = state["accelerator"]["state"]
    return {**state, "accelerator": {"type": "cuda", "states": states}}


def test_random_numbers_continue_on_another_device_index(caplog: pytest.LogCaptureFixture) -> None:
    state, expected = saved_on(1)
    assert state["accelerator"]["index"] == 1 and state["accelerator"]["state"].ndim == 1
    assert resumed_on(0, state) == resumed_on(1, state) == expected
    assert not caplog.text


def test_list_of_an_older_checkpoint_gives_the_state_of_the_device_that_drew(caplog: pytest.LogCaptureFixture) -> None:
    state, expected = saved_on(1)
    for num_devices, index in itertools.product((2, 4, torch.accelerator.device_count()), (1, 0, 5)):
        assert resumed_on(index, as_list(state, num_devices)) == expected
    # Also if all devices drew before.
    other = torch.Generator("cuda").manual_seed(7)
    torch.rand(100_000, device="cuda", generator=other)
    for index in (1, 0, 5):
        assert resumed_on(index, as_list(state, 4, other.get_state())) == expected
    assert not caplog.text


def test_ambiguous_list_gives_the_state_of_the_same_index_or_the_first_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state, expected = saved_on(1)
    other = torch.Generator("cuda").manual_seed(8)
    torch.rand(100_000, device="cuda", generator=other)
    ambiguous = as_list(state, 2, other.get_state())
    assert resumed_on(1, ambiguous) == expected
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        first = resumed_on(3, ambiguous)
    assert first != expected
    assert (
        "list of random states of 2 cuda device(s)" in caplog.text and "cuda:3 gets the state of cuda:0" in caplog.text
    )


def test_undisturbed_random_numbers_restores_the_device_generator() -> None:
    state, expected = saved_on(2)
    RNGState().load_state_dict(state)
    with undisturbed_random_numbers():
        torch.rand(5, device="cuda")
    assert torch.rand(3, device="cuda").tolist() == expected


class Dropping(nn.Module):
    """Linear layer behind dropout, so that the loss depends on the generator of the device."""

    def __init__(self) -> None:
        super().__init__()
        # Large enough for its moments to be mapped from the file in a resume.
        self.linear = nn.Linear(160, 160)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = nn.functional.dropout(self.linear(x), 0.5, self.training)
        return {"loss": (outputs - labels).square().mean()}


def trained(output_dir: Path, device: str, resume: bool | str = False) -> list[float]:
    values = torch.randn(8, 160, generator=torch.Generator().manual_seed(0))
    args = TrainingArguments(
        output_dir=str(output_dir),
        device=device,
        seed=3,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        resume_from_checkpoint=resume,
        per_device_train_batch_size=2,
    )
    trainer = Trainer(
        args=args,
        model_init=Dropping,
        train_dataset=[{"x": value, "labels": value} for value in values],
        distributed_env=StaticDistributedEnvironment(),
    )
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def test_run_saved_on_one_device_resumes_exactly_on_another(tmp_path: Path) -> None:
    expected = trained(tmp_path / "whole", "cuda:1")
    resumed = trained(tmp_path / "rest", "cuda:0", str(tmp_path / "whole" / "checkpoints" / "checkpoint-2"))
    assert resumed[-2:] == expected[-2:]
