"""FSDP2 job that measures its memory; `run_warm_ranks` calls `main` with a directory, once per rank.

Prints one line of JSON with the peak growth of initialisation, save and load, in bytes. It needs only torch.

VmHWM, the kernel's high-water mark of resident memory, misses nothing, but counts pages of mapped files: a load maps the
saved moments. These pages are the page cache, which all ranks of a node share, and the kernel frees them when it needs
memory. RssAnon is without them, but has no high-water mark, so a thread samples it.
"""

import ctypes
import gc
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # The first sharded parameter imports it, which would count as memory of the initialisation.
import torch.distributed as dist
from torch import Tensor, nn

from forgather.ml.distributed import get_rank
from forgather.ml.trainer.fsdp2 import FSDP2Trainer

WIDTH = 2048
NUM_LAYERS = 8
VOCABULARY = 512


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Model(nn.Module):
    """Model of about 140 MB in float32, in layers of 16 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Peak:
    """Peak growth inside a block: of all resident memory, and of memory without mapped files."""

    resident = anonymous = 0

    def __enter__(self) -> "Peak":
        gc.collect()
        # Give freed memory back, or later phases would grow into it unseen.
        ctypes.CDLL(None).malloc_trim(0)
        # The value 5 resets the peak to the current size.
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS"), _status("RssAnon")
        self._highest, self._ended = self._before[1], threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def end(self) -> None:
        """End the measurement; later calls do nothing."""
        if not self._ended.is_set():
            self.resident = _status("VmHWM") - self._before[0]
            self._ended.set()
            self._thread.join()
            self.anonymous = max(self._highest, _status("RssAnon")) - self._before[1]

    def _sample(self) -> None:
        while not self._ended.wait(0.002):
            self._highest = max(self._highest, _status("RssAnon"))


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


class AtStart:
    """Callback that calls a function before the first step."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._work()


def build(output_dir: str, *callbacks: Any, max_steps: int) -> FSDP2Trainer[Any]:
    samples = [{"input_ids": torch.arange(4) + number, "labels": torch.arange(4)} for number in range(16)]
    return FSDP2Trainer(
        args={
            "output_dir": output_dir,
            "use_cpu": True,
            "max_steps": max_steps,
            "per_device_train_batch_size": 1,
            "save_strategy": "no",
            "logging_strategy": "no",
            "resume_from_checkpoint": False,
            # Memory that malloc keeps for later steps is not memory that a save needs.
            "tune_malloc": False,
            "fsdp2": {"transformer_layers_path": "layers"},
        },
        model_init=Model,
        train_dataset=samples,
        callbacks=list(callbacks),
        default_callbacks=False,
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 1e-3}),
    )


def local_bytes(trainer: FSDP2Trainer[Any], with_moments: bool) -> int:
    """Return the size of this rank's shards."""
    held: list[Any] = list(trainer.unwrapped_model().parameters())
    if with_moments:
        held += [value for state in trainer.optimizer.state.values() for value in state.values() if value.numel() > 1]
    return sum(tensor.to_local().nbytes for tensor in held)


def digest(trainer: FSDP2Trainer[Any]) -> float:
    return sum(float(one.detach().to_local().double().square().sum()) for one in trainer.unwrapped_model().parameters())


def warm_up(directory: str) -> None:
    """Train a small model once, so that imports and thread pools do not count."""
    global WIDTH
    width, WIDTH = WIDTH, 64
    trainer = build(f"{directory}/warm-up", max_steps=1)
    trainer.train()
    trainer.save_checkpoint()
    trainer.load_checkpoint()
    WIDTH = width


def main(words: Sequence[str]) -> None:
    (directory,) = words
    torch.set_num_threads(1)
    warm_up(directory)
    figures: dict[str, Any] = {}
    with Peak() as peak:
        # Up to the first step, which needs gradients and gathered layers too.
        first = build(f"{directory}/first", AtStart(peak.end), max_steps=1)
        first.train()
    figures["initialisation"] = [peak.resident, peak.anonymous, local_bytes(first, False)]
    with Peak() as peak:
        path = first.save_checkpoint()
    figures["save"] = [peak.resident, peak.anonymous, 0]
    expected = digest(first)
    del first
    second = build(f"{directory}/second", max_steps=1)
    with Peak() as peak:
        second.load_checkpoint(path)
    figures["load"] = [peak.resident, peak.anonymous, local_bytes(second, True)]
    assert digest(second) == expected
    print(json.dumps({"rank": get_rank(), "figures": figures}), flush=True)
    dist.barrier()
    os._exit(0)
