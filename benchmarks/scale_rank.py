"""Measurement of one job size for `scale.py`: prepares a trainer and plans a save as rank 0 of simulated ranks.

    python benchmarks/scale_rank.py KIND NUM_RANKS NUM_LAYERS

It prints one line of JSON. A separate process for each measurement makes the peak of resident memory meaningful.
"""

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from simulated_ranks import RANKS_PER_NODE, PausingClock, SimulatedRanks
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from forgather.ml.checkpoint.manifest import CheckpointManifest
from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.trainer.accelerate import AccelTrainer
from forgather.ml.trainer.ddp import DDPTrainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer_types import TrainerCallback

PIPELINE_SIZE = 8
"""Ranks per pipeline of the hybrid trainer."""
KINDS: dict[str, type] = {
    "DDP": DDPTrainer,
    "Accelerate": AccelTrainer,
    "Pipeline": PipelineTrainer,
    "Hybrid": HybridTrainer,
}
_STAGED = ("Pipeline", "Hybrid")
_WARM_UP = 8


@dataclass(frozen=True)
class Scale:
    """Costs on rank 0: seconds, and bytes above the resident memory before the measurement."""

    num_tensors: int
    building: float
    """Construction of the model, which `preparation` does not include."""
    preparation: float
    first_planning: float
    """Planning of the first save, which also builds the class of the model on the meta device to learn its names."""
    planning: float
    manifest: float
    """Description of all files, and encoding of the manifest."""
    reading: float
    manifest_bytes: int
    peak_bytes: int
    num_gathers: int
    gathered_bytes: int


class _Prepared(Exception):
    """Raised when preparation is done, to leave `train()` before the first step."""


class _LeaveEarly(TrainerCallback):
    """Callback that ends training before the first step."""

    def on_train_begin(self, *args: Any, **options: Any) -> None:
        raise _Prepared


class _KeptManifest:
    """Transaction that keeps the manifest instead of writing it."""

    final_path = attempt = "simulated"
    manifest: CheckpointManifest

    def commit(self, manifest: CheckpointManifest) -> None:
        self.manifest = manifest


def measure(kind: str, num_ranks: int, num_layers: int) -> Scale:
    """Prepare a trainer and plan a save, as rank 0 of `num_ranks`."""
    clock = PausingClock()
    size = {"Pipeline": num_ranks, "Hybrid": PIPELINE_SIZE}.get(kind, 1)
    ranks = SimulatedRanks(num_ranks, size, clock)
    with tempfile.TemporaryDirectory() as directory, ranks.joined():
        return _measure(kind, ranks, num_layers, clock, Path(directory))


def _measure(kind: str, ranks: SimulatedRanks, num_layers: int, clock: PausingClock, directory: Path) -> Scale:
    building = [0.0]

    def build() -> nn.Module:
        started = time.process_time()
        with clock.paused():
            model = _make_model(num_layers)
        building[0] += time.process_time() - started
        return model

    before = _reset_peak()
    times = [clock.now()]
    trainer = _make_trainer(kind, ranks.num_ranks, build, directory)
    try:
        trainer.train()
    except _Prepared:
        times.append(clock.now())
    with clock.paused():
        if kind in _STAGED:
            ranks.hold(trainer.pipeline)
    coordinator = trainer.checkpoint_manager.coordinator
    for _ in range(2):
        # With a comparison of all replicas, which asks most of the gathered reports.
        snapshot = coordinator.take_snapshot(validate=True)
        times.append(clock.now())
    layout = coordinator._layout
    with clock.paused():
        records = ranks.records(coordinator._components, layout, snapshot.weight_names)
    kept = _KeptManifest()
    coordinator._commit(layout, kept, snapshot, records, 1, None, None)
    text = kept.manifest.to_bytes()
    times.append(clock.now())
    path = directory / "manifest.json"
    path.write_bytes(text)
    CheckpointManifest.load(str(path), sealed=True)
    times.append(clock.now())
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    peak, counts = _status_bytes("VmHWM") - before, (ranks.num_gathers, ranks.num_bytes)
    return Scale(_num_tensors(snapshot.weight_names), building[0], *steps, len(text), peak, *counts)


def _num_tensors(weight_names: dict[str, list[str]]) -> int:
    return sum(map(len, weight_names.values()))


def _make_model(num_layers: int) -> nn.Module:
    """Build a Llama model with many small tensors: nine for each layer. Embedding and head are tied."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "max_position_embeddings": 32}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=num_layers, tie_word_embeddings=True, **sizes)
    return LlamaForCausalLM(config)


def _make_trainer(kind: str, num_ranks: int, build: Callable[[], nn.Module], directory: Path) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(directory / "run"),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "device": "cpu",
    }
    if kind in _STAGED:
        settings["n_microbatches"] = 2
    if kind == "Hybrid":
        settings["pp_size"] = PIPELINE_SIZE
    tokens: Tensor = torch.arange(8)
    trainer_class = KINDS[kind]
    options = {"accelerator": _accelerator(num_ranks)} if kind == "Accelerate" else {}
    return trainer_class(
        args=trainer_class.arguments_class(**settings),
        model_init=build,
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * (4 * num_ranks),
        callbacks=[_LeaveEarly()],
        default_callbacks=False,
        distributed_env=StaticDistributedEnvironment(world_size=num_ranks, local_world_size=RANKS_PER_NODE),
        **options,
    )


def _accelerator(num_ranks: int) -> Accelerator:
    """Return the accelerator of rank 0, which Accelerate finds in the variables of a launcher."""
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": RANKS_PER_NODE}
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="localhost")
    # Accelerate keeps its state in classes, for the lifetime of the process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True)


def _reset_peak() -> int:
    """Reset the high-water mark of resident memory, and return the current resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def main(arguments: Sequence[str]) -> None:
    kind, num_ranks, num_layers = arguments[0], int(arguments[1]), int(arguments[2])
    torch.set_num_threads(1)
    # Modules that are imported on first use must not count.
    measure(kind, _WARM_UP, _WARM_UP)
    print(json.dumps(asdict(measure(kind, num_ranks, num_layers))))


if __name__ == "__main__":
    main(sys.argv[1:])
