"""bfloat16 weights with float32 updates on the rehearsal device: no host waits between logs, exact resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forgather.ml.optim.stochastic_rounding import round_stochastically_, rounding_key
from forgather.ml.trainer.trainer import Trainer
from tests.support.rehearsal import watching
from tests.support.tiny_models import tiny_llama, token_samples

PRECISIONS = ["bf16_master", "bf16_stochastic"]
ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "fused": True})
FIRST, LAST = 2, 6
"""Steps between which the host must not wait. No log is due between them."""


class Watch:
    """Callback that records host waits from the end of step FIRST to the end of step LAST."""

    changes_control = False

    def __init__(self) -> None:
        self._context = watching()
        self.record: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == FIRST:
            self.record = self._context.__enter__()
        if state.global_step == LAST:
            self._context.__exit__(None, None, None)


def trainer_for(output_dir: Path, *callbacks: Any, **settings: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "output_dir": str(output_dir),
        "device": "cuda",
        "seed": 0,
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "logging_steps": 100,
        "save_strategy": "steps",
        "save_steps": 7,
        **settings,
    }
    return Trainer(
        args=arguments,
        model=tiny_llama(),
        train_dataset=token_samples(40),
        callbacks=list(callbacks),
        default_callbacks=False,
        optimizer_cls_and_kwargs=ADAMW,
    )


def end_of(trainer: Trainer) -> dict[str, Any]:
    assert trainer.optimization is not None
    return {
        **trainer.unwrapped_model().state_dict(),
        **{
            f"{name}/{key}": value
            for name, state in trainer.optimization.state.state_dict()["state"].items()
            for key, value in state.items()
        },
    }


@pytest.mark.parametrize("ema_decay", [None, 0.9])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_host_waits_between_logs_and_exact_resume(precision: str, ema_decay: float | None, tmp_path: Path) -> None:
    watch = Watch()
    settings = {"param_precision": precision, "ema_decay": ema_decay}
    straight = trainer_for(tmp_path / "straight", watch, **settings)
    straight.train()
    assert watch.record.count("sync") == 0, watch.record.summary()
    assert {one.dtype for one in straight.unwrapped_model().parameters()} == {torch.bfloat16}
    if ema_decay is not None:
        return
    trainer_for(tmp_path / "resumed", max_steps=7, **settings).train()
    resumed = trainer_for(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=True)
    expected, found = end_of(straight), end_of(resumed)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        same = torch.equal(value, found[name]) if isinstance(value, Tensor) else value == found[name]
        assert same, name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_skipped_updates_do_not_wait(precision: str, tmp_path: Path) -> None:
    watch = Watch()
    trainer_for(tmp_path, watch, param_precision=precision, nonfinite_grad="skip").train()
    assert watch.record.count("sync") == 0, watch.record.summary()


def test_rounding_is_equal_on_cpu_and_device() -> None:
    values = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    key = rounding_key(0, "head.weight", 3)
    results = []
    for device in ("cpu", "cuda"):
        target = torch.empty(1001, dtype=torch.bfloat16, device=device)
        round_stochastically_(target, values.to(device, copy=True), key)
        results.append(target.cpu())
    assert torch.equal(*results)
