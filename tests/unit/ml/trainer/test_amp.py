"""Mixed precision (AMP) on the CPU, with torch's own GradScaler."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.amp import AMPContext


def make_step(amp: AMPContext, gradient: float = 1.0) -> Tensor:
    """Return the weight after one step with this gradient."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = SGD([weight], lr=1.0)
    amp.scale_loss((weight * gradient).sum()).backward()
    amp.unscale_(optimizer)
    amp.optimizer_step(optimizer)
    return weight.detach()


@pytest.mark.parametrize(
    ("mixed_precision", "dtype"),
    [(None, torch.float32), ("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_autocast_uses_the_chosen_precision(mixed_precision: str | None, dtype: torch.dtype) -> None:
    amp = AMPContext(mixed_precision, "cpu")
    assert amp.enabled == (dtype != torch.float32)
    with amp.autocast():
        assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype == dtype


@pytest.mark.parametrize("mixed_precision", [None, "no", "bf16", "fp16"])
def test_step_uses_the_unscaled_gradient(mixed_precision: str | None) -> None:
    assert make_step(AMPContext(mixed_precision, "cpu"), gradient=3.0).item() == -3.0


def test_only_fp16_scales_the_loss() -> None:
    loss = torch.tensor(2.0)
    assert AMPContext("bf16", "cpu").scale_loss(loss) is loss
    assert AMPContext("fp16", "cpu", initial_scale=8).scale_loss(loss).item() == 16.0


def test_overflow_skips_the_step_and_logs_the_drop(caplog: pytest.LogCaptureFixture) -> None:
    amp = AMPContext("fp16", "cpu", initial_scale=1024)
    with caplog.at_level(logging.INFO):
        assert make_step(amp, gradient=float("inf")).item() == 0.0
    assert caplog.messages == ["loss scale dropped from 1024 to 512"]
    caplog.clear()
    make_step(amp)
    assert not caplog.messages


def test_loss_scale_is_restored() -> None:
    saved = AMPContext("fp16", "cpu", initial_scale=1024)
    make_step(saved, gradient=float("inf"))
    make_step(saved)
    for used_before in (False, True):
        restored = AMPContext("fp16", "cpu")
        if used_before:
            make_step(restored)
        restored.load_state_dict(saved.state_dict())
        assert restored.state_dict() == saved.state_dict()
        assert restored.scale_loss(torch.tensor(1.0)).item() == 512.0


def test_restored_lower_scale_is_not_logged_as_a_drop(caplog: pytest.LogCaptureFixture) -> None:
    amp = AMPContext("fp16", "cpu")
    amp.load_state_dict(AMPContext("fp16", "cpu", initial_scale=4).state_dict())
    with caplog.at_level(logging.INFO):
        make_step(amp)
    assert not caplog.messages


@pytest.mark.parametrize(("saved", "now"), [("fp16", "bf16"), ("bf16", "fp16"), (None, "fp16")])
def test_state_of_another_precision_is_ignored_with_a_warning(
    saved: str | None, now: str, caplog: pytest.LogCaptureFixture
) -> None:
    amp = AMPContext(now, "cpu")
    before = amp.state_dict()
    amp.load_state_dict(AMPContext(saved, "cpu", initial_scale=4).state_dict())
    assert amp.state_dict() == before
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_state_without_a_scale_is_empty_and_loads_quietly(caplog: pytest.LogCaptureFixture) -> None:
    amp = AMPContext("bf16", "cpu")
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    assert not caplog.records


def test_unknown_precision_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"mixed_precision='fp8'.*'bf16', 'fp16'"):
        AMPContext("fp8", "cpu")


@pytest.mark.parametrize(
    ("entry", "values"),
    [
        ("scale", (0.0, -1.0, float("nan"), float("inf"), 1e39, None, "1", True, torch.ones(2))),
        ("growth_factor", (1.0, 0.5, float("inf"), None)),
        ("backoff_factor", (0.0, 1.0, -0.5, 2.0, None)),
        ("growth_interval", (0, -1, 2.5, True, None)),
        ("_growth_tracker", (-1, 0.5, 2**31, None)),
    ],
)
def test_malformed_loss_scale_is_rejected_and_changes_nothing(entry: str, values: tuple[Any, ...]) -> None:
    amp = AMPContext("fp16", "cpu")
    make_step(amp)
    before = amp.state_dict()
    good = AMPContext("fp16", "cpu", initial_scale=4).state_dict()
    for value in values:
        for load in (amp.check_state_dict, amp.load_state_dict):
            with pytest.raises(CheckpointLoadError, match=f"the saved loss scale: {entry} "):
                load({**good, entry: value})
    with pytest.raises(CheckpointLoadError, match=entry):
        amp.load_state_dict({name: value for name, value in good.items() if name != entry})
    assert amp.state_dict() == before


def test_loss_scale_that_is_not_a_dict_is_rejected() -> None:
    for mixed_precision in ("fp16", "bf16"):
        for value in (None, [1], 2.0):
            with pytest.raises(CheckpointLoadError, match="expected a dict"):
                AMPContext(mixed_precision, "cpu").load_state_dict(value)  # type: ignore[arg-type]
