"""Older checkpoints kept as fixtures: build their trainers, resume them, and describe their state.

`tests/guarantees/exact_resume/test_older_checkpoint.py` runs this module in a subprocess, restricted to instructions
that round the same way on every processor:

    python -m tests.support.older_runs <folder> <result>

The result is a JSON file with every leaf of the states, and a safetensors file beside it with the floating-point tensors
at the end of each run. To add a fixture, build its trainer here, and call `write` in such a process with the version of
Forgather to keep.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from forgather.ml.trainer.callbacks.early_stopping import EarlyStopping
from forgather.ml.trainer.trainer import Trainer
from tests.support.drawn_order import DrawnOrder
from tests.support.tiny_models import TokenModel, quiet_trainer, token_samples

FIXTURES = Path(__file__).parents[1] / "fixtures"

# Durations are not state.
_DURATIONS = ("runtime", "_per_second")

# Component -> path of a leaf -> its type and value, or the hash of its bytes.
Description = dict[str, dict[str, str]]


class TokenModelWithDropout(TokenModel):
    """Token model that draws random numbers in every forward pass."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.embedding(input_ids)), 0.25, self.training)
        logits: Tensor = self.head(hidden)
        return logits


def run_of_format_1(folder: Path) -> Trainer:
    """Build the run that was saved at step 4 of 8."""
    return quiet_trainer(
        folder,
        TokenModel(),
        token_samples(16),
        EarlyStopping(patience=50),
        max_steps=8,
        shuffle=True,
        save_strategy="steps",
        save_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        ema_decay=0.9,
        logging_strategy="steps",
        logging_steps=1,
        lr_scheduler_type="cosine",
        trainer_options={
            "eval_dataset": token_samples(4),
            "optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
        },
    )


def run_before_house(folder: Path) -> Trainer:
    """Build the run that was saved at step 5 of 12; an epoch has 15 samples in 8 windows of 2, the last one short."""
    return quiet_trainer(
        folder,
        TokenModelWithDropout(),
        token_samples(15),
        EarlyStopping(patience=50),
        max_steps=12,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        shuffle=True,
        save_strategy="steps",
        save_steps=5,
        save_total_limit=10,
        eval_strategy="steps",
        eval_steps=3,
        ema_decay=0.9,
        logging_strategy="steps",
        logging_steps=1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        trainer_options={
            "eval_dataset": token_samples(4),
            "optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        },
    )


RUNS = {
    "checkpoint_of_format_1": (run_of_format_1, 4),
    "checkpoint_before_house": (run_before_house, 5),
}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every tensor, number and string inside a state, with its path."""
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield path, f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
    elif hasattr(value, "tobytes"):
        yield path, f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and len(value) > 100:
        yield path, hashlib.sha256(repr(value).encode()).hexdigest()
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{number}" if path else str(number))
    else:
        yield path, value.hex() if isinstance(value, float) else repr(value)


def floating_tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every floating-point tensor inside a state of nested dictionaries, with its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from floating_tensors(inner, f"{path}.{key}")
    elif isinstance(value, Tensor) and value.is_floating_point():
        yield path, value.detach().clone().contiguous()


def states_of(trainer: Trainer) -> dict[str, Any]:
    return {component.key: component.stateful.state_dict() for component in trainer.get_state_components()}


def describe(trainer: Trainer) -> Description:
    """Return the current state of every component that the trainer declares."""
    return {
        key: {path: leaf for path, leaf in leaves(state) if not path.endswith(_DURATIONS)}
        for key, state in states_of(trainer).items()
    }


def losses_of(trainer: Trainer) -> list[float]:
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def callbacks_of(trainer: Trainer) -> dict[str, str]:
    states = {type(one).__name__: one.state_dict() for one in trainer.callbacks if hasattr(one, "state_dict")}
    return dict(leaves(states))


def resume(name: str, folder: Path) -> tuple[dict[str, Any], Trainer]:
    """Return the state after loading the fixture and at the end of the resumed run, and the trainer."""
    build, step = RUNS[name]
    checkpoint = folder / "checkpoints" / f"checkpoint-{step}"
    shutil.copytree(FIXTURES / name, checkpoint)
    trainer = build(folder)
    trainer.load_checkpoint(str(checkpoint))
    loaded = {**describe(trainer), "callbacks": callbacks_of(trainer)}
    trainer.train()
    return {"loaded": loaded, **end_of(trainer)}, trainer


def straight(name: str, folder: Path) -> tuple[dict[str, Any], Trainer]:
    """Return the end of the same run, trained from the first step in the data order of its version."""
    trainer = RUNS[name][0](folder)
    trainer.add_callback(DrawnOrder())
    trainer.train()
    return end_of(trainer), trainer


def end_of(trainer: Trainer) -> dict[str, Any]:
    return {"losses": losses_of(trainer), "end": {**describe(trainer), "callbacks": callbacks_of(trainer)}}


def write(name: str, folder: Path) -> dict[str, Any]:
    """Train the run, and copy the fixture's checkpoint to the fixtures."""
    build, step = RUNS[name]
    trainer = build(folder)
    trainer.train()
    shutil.copytree(folder / "checkpoints" / f"checkpoint-{step}", FIXTURES / name)
    return end_of(trainer)


def main(folder: Path, result: Path) -> None:
    described: dict[str, Any] = {name: {} for name in RUNS}
    tensors: dict[str, Tensor] = {}
    for name in RUNS:
        for kind, run in (("resumed", resume), ("straight", straight)):
            described[name][kind], trainer = run(name, folder / f"{name}_{kind}")
            for key, state in states_of(trainer).items():
                tensors.update(floating_tensors(state, f"{name}/{kind}/{key}"))
    result.write_text(json.dumps(described, indent=1) + "\n")
    save_file(tensors, result.with_suffix(".safetensors"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
