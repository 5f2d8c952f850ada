"""First background save of a run, right after the start: seconds that it blocks training, by the step of the save.

    python benchmarks/first_save.py [--size-gb 2.4] [--rounds 3] [--steps 1 2 5] [--dir .] [--markdown FILE]

Every run is a fresh process with a `Trainer`, `async_save=True` and AdamW. Its steps are short: 16 tokens. The first
step creates gradients and moments, so the system has to supply as much fresh memory to the step as to the save.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from disk import directory_on_disk, file_system
from result_table import ResultTable
from rich.console import Console
from torch import Tensor, nn

from forgather.ml.trainer.trainer import Trainer

_WIDTH = 1024
_NUM_TOKENS = 16
_BYTES_PER_PARAMETER = 3 * 4
_STEPS_AFTER = 2


class FirstSave(NamedTuple):
    """Seconds of one run: set-up of saves before the first step, first step, blocked by the save, save in all."""

    begin: float
    first_step: float
    after_step: float
    """Preparation of saves after the first step."""
    blocked: float


class _Model(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(num_blocks))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        return inputs


class _Clock:
    """Callback that measures the methods of the saver, and the first step."""

    changes_control = False

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        saver = event["trainer"].saver
        for name in ("begin", "look_after_step", "save_in_training"):
            if hasattr(saver, name):
                setattr(saver, name, self._timed(name, getattr(saver, name)))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.setdefault("step", []).append(time.perf_counter() - self._started)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self.seconds.setdefault(name, []).append(time.perf_counter() - start)

        return measured

    def first(self, name: str) -> float:
        return self.seconds.get(name, [0.0])[0]


def measure(num_bytes: int, step: int, directory: str) -> FirstSave:
    """Train to a few steps after the save, and return the times."""
    num_blocks = max(1, round(num_bytes / _BYTES_PER_PARAMETER / _WIDTH**2))
    clock = _Clock()
    trainer: Trainer[Any] = Trainer(
        args={
            "output_dir": directory,
            "use_cpu": True,
            "max_steps": step + _STEPS_AFTER,
            "per_device_train_batch_size": _NUM_TOKENS,
            "save_strategy": "steps",
            "save_steps": step,
            "save_total_limit": 1,
            "async_save": True,
            "logging_strategy": "no",
        },
        model_init=lambda: _Model(num_blocks),
        train_dataset=[{"inputs": torch.rand(_WIDTH), "labels": torch.rand(_WIDTH)} for _ in range(64)],
        compute_loss_func=nn.functional.mse_loss,
        callbacks=[clock],
        default_callbacks=False,
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 1e-4}),
    )
    trainer.train()
    return FirstSave(*(clock.first(name) for name in ("begin", "step", "look_after_step", "save_in_training")))


def _runs(arguments: argparse.Namespace, directory: Path) -> Iterator[tuple[int, FirstSave]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([Trainer.__module__, "torch.optim"])
    for number in range(arguments.rounds):
        for step in arguments.steps:
            with ProcessPoolExecutor(1, mp_context=context) as executor:
                folder = str(directory / f"{number}-{step}")
                yield step, executor.submit(measure, int(arguments.size_gb * 1e9), step, folder).result()


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=2.4, help="size of weights and moments together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 5], help="steps of the first save")
    parser.add_argument("--dir", default=".", help="directory on the disk to measure")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    console, found = Console(), dict[int, list[FirstSave]]()
    with directory_on_disk(arguments.dir, ".first-save-benchmark-", int(2e9 * arguments.size_gb)) as directory:
        console.print(f"{file_system(str(directory))}, torch {torch.__version__}, {torch.get_num_threads()} threads")
        for step, run in _runs(arguments, directory):
            console.print(f"save at step {step}: {run}", highlight=False, soft_wrap=True)
            found.setdefault(step, []).append(run)
    columns = ["first save", "begin s", "first step s", "after first step s", "blocked s"]
    rows = [
        [f"at step {step}", *(_spread(list(values)) for values in zip(*runs, strict=True))]
        for step, runs in found.items()
    ]
    table = ResultTable("First background save of a run", columns, rows, rows[0][0])
    console.print(table.as_rich())
    if arguments.markdown:
        arguments.markdown.write_text(table.as_markdown() + "\n")


if __name__ == "__main__":
    main()
