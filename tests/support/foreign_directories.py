"""Checkpoints of other programs, written by these programs themselves, and a job that imports them."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Trainer as HuggingFaceTrainer
from transformers import TrainingArguments as HuggingFaceArguments

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.coordinator import CheckpointCoordinator
from forgather.ml.checkpoint.manifest import MANIFEST_NAME
from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.distributed import from_env
from tests.support.tiny_models import token_samples

Moments = dict[str, dict[str, Tensor]]
"""By parameter name, what AdamW remembers."""


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- writers


def train_with_transformers(output_dir: Path, model: nn.Module, steps: int = 4, **settings: Any) -> HuggingFaceTrainer:
    """Train with `transformers.Trainer`, saving every second step, and return the trainer."""
    options: dict[str, Any] = {
        "max_steps": steps,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_total_limit": None,
        "seed": 0,
    }
    trainer = HuggingFaceTrainer(
        model,
        HuggingFaceArguments(output_dir=str(output_dir), **{**options, **settings}),
        train_dataset=token_samples(16),
    )
    trainer.train()
    return trainer


def save_with_accelerate(folder: Path, model: nn.Module, safetensors: bool = True) -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, optimizer)
    accelerator.save_state(str(folder), safe_serialization=safetensors)


def save_with_dcp(folder: Path, state: Mapping[str, Any]) -> None:
    """Save a state with torch.distributed.checkpoint from one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(dict(state), checkpoint_id=str(folder), no_dist=True)


def save_unversioned(
    folder: Path,
    model: nn.Module,
    states: Mapping[str, Any],
    *,
    world_size: int = 1,
    safetensors: bool = True,
) -> None:
    """Write the layout from before format versions: a manifest of eight fields, `<key>_state*.pt` and weights."""
    folder.mkdir(parents=True)
    components = {
        key.partition("_rank_")[0]: {"key": key, "sharing_pattern": "global", "ranks": [0]}
        for key in ("model", *states)
    }
    manifest = {
        "checkpoint_path": str(folder),
        "world_size": world_size,
        "timestamp": "2025-01-01T00:00:00",
        "components": components,
        "training_args_hash": None,
        "forgather_version": None,
        "pytorch_version": torch.__version__,
        "metadata": {},
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    if safetensors:
        save_model(model, str(folder / "model.safetensors"))
    else:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    for name, state in states.items():
        key, _, rank = name.partition("_rank_")
        torch.save(state, folder / f"{key}_state{f'_rank_{rank}' if rank else ''}.pt")


# --- a job that imports


class ProgressNote:
    """Minimal stateful object for the component "trainer" that imports progress."""

    def __init__(self) -> None:
        self.progress: tuple[int, float] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("an import never gives a foreign state to the trainer")

    def import_progress(self, global_step: int, epoch: float) -> None:
        self.progress = (global_step, epoch)


class ImportingJob:
    """Job with a model, AdamW in one group, a linear schedule and a progress note, declared to a coordinator."""

    def __init__(self, output_dir: Path, model: nn.Module, parts: list[nn.Module] | None = None) -> None:
        self.model, self.parts = model, [model] if parts is None else parts
        parameters = [parameter for part in self.parts for parameter in part.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01)
        self.scheduler: LRScheduler = LambdaLR(self.optimizer, lambda step: max(0.0, 1 - step / 10))
        self.trainer: Any = ProgressNote()
        self._output_dir = output_dir

    def components(self) -> list[StateComponent]:
        everywhere, each = SharingPattern.REPLICATED, SharingPattern.PER_RANK
        return [
            StateComponent("model", self.parts[0], each),
            StateComponent("optimizer", self.optimizer, each),
            StateComponent("scheduler", self.scheduler, everywhere),
            StateComponent("trainer", self.trainer, everywhere),
            StateComponent("rng", RNGState(0), each),
        ]

    def coordinator(self) -> CheckpointCoordinator:
        return CheckpointCoordinator(
            self.components(), {}, from_env(), str(self._output_dir), model=self.model, model_parts=self.parts
        )

    def load(self, path: Path) -> None:
        self.coordinator().load_checkpoint(str(path))

    def moments(self) -> Moments:
        named = [pair for part in self.parts for pair in part.named_parameters()]
        return {name: dict(self.optimizer.state[one]) for name, one in named if self.optimizer.state.get(one)}


def moments_of(model: nn.Module, optimizer: Any) -> Moments:
    inner = getattr(optimizer, "optimizer", optimizer)
    return {name: dict(inner.state[one]) for name, one in model.named_parameters() if inner.state.get(one)}


def zeroed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model
