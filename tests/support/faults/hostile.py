"""Attacker with write access: changes the content of a checkpoint, and updates every checksum."""

import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forgather.ml.checkpoint.files.state_files import file_checksum
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest
from forgather.ml.trainer.trainer import Trainer
from tests.support.tiny_models import TokenModel, quiet_trainer, token_samples


def seal(checkpoint: Path, name: str) -> None:
    """Update the manifest to match a changed file."""
    manifest = CheckpointManifest.load(str(checkpoint / MANIFEST_NAME))
    size, checksum = (checkpoint / name).stat().st_size, file_checksum(str(checkpoint / name))
    manifest.files = [
        replace(record, size=size, checksum=checksum, tensors={}) if record.path == name else record
        for record in manifest.files
    ]
    manifest.save(str(checkpoint / MANIFEST_NAME))


def with_pickle(data: bytes) -> bytes:
    """Return a torch archive with a hand-written pickle."""
    source, target = io.BytesIO(), io.BytesIO()
    torch.save({"state": torch.zeros(3)}, source)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for entry in old.namelist():
            new.writestr(entry, data if entry.endswith("data.pkl") else old.read(entry))
    return target.getvalue()


def change_state(checkpoint: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Replace the encoded state of a file with the result of `change`, or with the state edited in place."""
    state = torch.load(checkpoint / name, weights_only=True)
    changed = change(state)
    torch.save(state if changed is None else changed, checkpoint / name)
    seal(checkpoint, name)


def put(checkpoint: Path, name: str, data: bytes) -> None:
    """Replace a file, and update the manifest."""
    (checkpoint / name).write_bytes(data)
    seal(checkpoint, name)


def trainer_in(output_dir: Path, steps: int = 4, **settings: Any) -> Trainer:
    """Return a trainer of a small model that saves at every second step."""
    torch.manual_seed(0)
    options = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2, **settings}
    optimizer = (torch.optim.AdamW, {"lr": 0.01, "fused": True})
    return quiet_trainer(
        output_dir, TokenModel(), token_samples(16), trainer_options={"optimizer_cls_and_kwargs": optimizer}, **options
    )


def trained(output_dir: Path, steps: int = 4, **settings: Any) -> Path:
    """Train in `output_dir`, and return the newest checkpoint."""
    trainer_in(output_dir, steps, **settings).train()
    return output_dir / "checkpoints" / f"checkpoint-{steps}"
