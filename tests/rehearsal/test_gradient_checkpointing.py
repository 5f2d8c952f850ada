"""Activation checkpointing on the rehearsal device: no host waits between logs, and the same weights as without it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forgather.ml.trainer.trainer_types import TrainerCallback
from tests.guarantees.recipes.test_selective_checkpointing import ByProtocol
from tests.support.rehearsal import watching
from tests.support.tiny_models import quiet_trainer, tiny_llama, token_samples, weights


class Watch(TrainerCallback):
    """Callback that counts host waits from the end of step 2 to the end of step 4, between logs."""

    def __init__(self) -> None:
        self.num_waits = -1
        self.summary: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self._watching = watching()
            self._record = self._watching.__enter__()
        if state.global_step == 4:
            self._watching.__exit__(None, None, None)
            self.num_waits, self.summary = self._record.count("sync"), self._record.summary()


def trained(output_dir: Path, model: torch.nn.Module, mode: Any) -> tuple[dict[str, Tensor], Watch]:
    watch = Watch()
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 5, "use_cpu": False, "device": "cuda"}
    trainer = quiet_trainer(output_dir, model, token_samples(10), watch, gradient_checkpointing=mode, **settings)
    trainer.train()
    return weights(trainer.unwrapped_model()), watch


@pytest.mark.parametrize("name", ["transformers", "protocol"])
def test_selective_checkpointing_adds_no_host_wait_and_keeps_the_weights(name: str, tmp_path: Path) -> None:
    results = {}
    for mode in (False, "selective"):
        torch.manual_seed(0)
        model = tiny_llama(num_hidden_layers=2, attention_dropout=0.1) if name == "transformers" else ByProtocol()
        results[mode], watch = trained(tmp_path / str(mode), model, mode)
        assert watch.num_waits == 0, watch.summary
    for key, tensor in results[False].items():
        assert torch.equal(tensor, results["selective"][key]), key
