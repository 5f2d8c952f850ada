"""Recipe benchmark: time and memory of a step with each precision and memory recipe, compared with a plain step.

    python benchmarks/recipes.py [--quick] [--only NAME ...] [--rounds 12] [--threads 1] [--markdown FILE]

All trainers stay alive in one process, each in a separate thread, and exactly one thread runs. They take turns of one
step in random order. Memory figures come from torch's allocation record of a step before the turns. Recipes with a
missing package are skipped. `torch_compile` takes about a minute to compile, unless the result is in torch's cache.
"""

import argparse
import contextlib
import gc
import importlib.util
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from allocations import StepMemory
from result_table import ResultTable, write_markdown
from rich.console import Console
from step import MALLOC_NOTE, MS, Cost, Runner, facts, interval_of_median, settings, spread
from step_contenders import Size, Task
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from forgather.ml.loss import ChunkedCausalLoss, LinearCrossEntropyLoss
from forgather.ml.trainer.trainer import Trainer, TrainingArguments

_QUICK = (Size("quick", 128, 2, 2, 64),)
_FULL = (Size("wide", 256, 4, 2, 256), Size("deep", 256, 8, 4, 256))
"""A model dominated by embedding, logits and head, and a model dominated by layers and their activations."""
_VOCABULARIES = {"quick": 32_000, "wide": 32_000, "deep": 1_024}
_HEAD_WIDTH = 64
_NUM_STEPS = 1_000_000
_MB = 1e6


@dataclass(frozen=True)
class Recipe:
    """Settings of a trainer beyond the settings of all trainers."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Callable[[], Mapping[str, Any]] = dict
    """Keyword arguments of the trainer, built for each trainer since some keep state."""
    package: str = "torch"
    """Package that the recipe requires."""
    is_default: bool = True
    """Whether the recipe is measured without `--only`."""


def _fused_loss() -> Mapping[str, Any]:
    return {"fused_loss_factory": LinearCrossEntropyLoss}


PLAIN = "plain float32"
_LEAN = {"gradient_checkpointing": True, "fuse_optim_with_backward": True}
RECIPES = (
    Recipe(PLAIN),
    Recipe("mixed_precision='bf16'", {"mixed_precision": "bf16"}),
    # CPUs without fp16 arithmetic take more than ten times as long.
    Recipe("mixed_precision='fp16'", {"mixed_precision": "fp16"}, is_default=False),
    Recipe("default_dtype='bfloat16'", {"default_dtype": "bfloat16"}),
    Recipe("param_precision='bf16_master'", {"param_precision": "bf16_master"}),
    Recipe("param_precision='bf16_stochastic'", {"param_precision": "bf16_stochastic"}),
    Recipe("gradient_checkpointing", {"gradient_checkpointing": True}),
    Recipe("gradient_checkpointing='selective'", {"gradient_checkpointing": "selective"}),
    Recipe("LinearCrossEntropyLoss", options=_fused_loss),
    Recipe("ChunkedCausalLoss", options=lambda: {"compute_loss_func": ChunkedCausalLoss()}),
    Recipe("fuse_optim_with_backward", {"fuse_optim_with_backward": True}),
    # With a large vocabulary the logits hide the savings of the other recipes, so this recipe avoids them.
    Recipe("fused loss, checkpointing, fused optimizer", _LEAN, _fused_loss),
    Recipe("ema_decay=0.999", {"ema_decay": 0.999}),
    Recipe("qat_recipe, int4 weights", {"qat_recipe": "int4-weight-only"}, package="torchao"),
    Recipe("torch_compile", {"torch_compile": True}),
    Recipe("torch_compile_scope='layer'", {"torch_compile": True, "torch_compile_scope": "layer"}),
    # Last, since the budget is a process-wide compiler setting that stays set while the trainer lives.
    Recipe("activation_memory_budget=0.3", {"torch_compile": True, "activation_memory_budget": 0.3}),
)

_DEFAULTS = [one.name for one in RECIPES if one.is_default]


class _Samples(Dataset[Tensor]):
    """Samples that are slices of one random token sequence."""

    def __init__(self, size: Size) -> None:
        self._length = size.sequence_length
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(_VOCABULARIES[size.name], (2**16,), generator=generator)

    def __len__(self) -> int:
        return 2**19

    def __getitem__(self, index: int) -> Tensor:
        start = index % (len(self._tokens) - self._length)
        return self._tokens[start : start + self._length]


@dataclass
class RecipeTask(Task):
    """Task of a trainer with one recipe, and its memory figures."""

    recipe: Recipe = RECIPES[0]
    memory: StepMemory = field(init=False, default_factory=StepMemory)
    dataset: Any = field(init=False)

    def __post_init__(self) -> None:
        self.dataset = _Samples(self.size)

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        self.memory.note_step()
        return super().collate(samples)


def make_model(size: Size) -> nn.Module:
    config = LlamaConfig(
        vocab_size=_VOCABULARIES[size.name],
        hidden_size=size.width,
        intermediate_size=size.width * 5 // 2,
        num_hidden_layers=size.num_blocks,
        num_attention_heads=size.width // _HEAD_WIDTH,
        max_position_embeddings=size.sequence_length,
        use_cache=False,
    )
    # A separate class per model: code compiled for one model is otherwise reused for its class, despite another recipe.
    own_class = type(LlamaForCausalLM.__name__, (LlamaForCausalLM,), {})
    model: nn.Module = own_class(config)
    return model


def _train(name: str, task: RecipeTask) -> None:
    task.memory.begin()
    arguments = TrainingArguments(
        output_dir=task.directory,
        per_device_train_batch_size=task.size.batch_size,
        max_steps=_NUM_STEPS,
        logging_strategy="no",
        save_strategy="no",
        use_cpu=True,
        seed=0,
        **task.recipe.arguments,
    )
    Trainer(
        args=arguments,
        model_init=lambda: make_model(task.size),
        train_dataset=task.dataset,
        data_collator=task.collate,
        **task.recipe.options(),
    ).train()


def main() -> None:
    arguments = _parse_arguments()
    _require_settings(arguments.threads)
    sizes, num_rounds = (_QUICK, min(arguments.rounds, 3)) if arguments.quick else (_FULL, arguments.rounds)
    recipes = [one for one in _available() if one.name in (PLAIN, *(arguments.only or _DEFAULTS))]
    console = Console(width=None if sys.stdout.isatty() else 140)
    known = _facts(num_rounds, arguments.threads)
    console.print(*known, sep="\n", highlight=False, soft_wrap=True)
    tables = [_measure(size, recipes, num_rounds) for size in sizes]
    console.print(*(one.as_rich() for one in tables), *_NOTES, sep="\n", highlight=False, soft_wrap=True)
    if arguments.markdown:
        write_markdown(arguments.markdown, known, tables, _NOTES)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small model and few rounds, to check the script")
    parser.add_argument(
        "--only", nargs="+", choices=[one.name for one in RECIPES], help="recipes besides the plain step"
    )
    parser.add_argument("--rounds", type=int, default=12, help="steps of each recipe")
    parser.add_argument("--threads", type=int, default=1, help="torch threads within an operation")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    return parser.parse_args()


def _require_settings(num_threads: int) -> None:
    """Restart this program unless its environment has the variables that libraries read at process start."""
    required = {**settings(num_threads), "KINETO_LOG_LEVEL": "99"}
    if any(os.environ.get(name) != value for name, value in required.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **required})


def _available() -> Iterator[Recipe]:
    return (one for one in RECIPES if importlib.util.find_spec(one.package) is not None)


def _facts(num_rounds: int, num_threads: int) -> list[str]:
    machine, versions, _ = facts(["transformers"], num_rounds, num_threads)
    return [machine, versions, f"median of {num_rounds} rounds of one step each (10th to 90th percentile)"]


def _measure(size: Size, recipes: Sequence[Recipe], num_rounds: int) -> ResultTable:
    with tempfile.TemporaryDirectory() as directory, _quiet():
        StepMemory.prepare()
        tasks = [RecipeTask(size, str(Path(directory, str(i))), recipe=one) for i, one in enumerate(recipes)]
        # Warm up one trainer after another: two that compile or measure memory at once would disturb each other.
        runners = [_warmed_up(task) for task in tasks]
        costs = _take_turns(runners, num_rounds)
        for runner in runners:
            runner.close()
    return _table(size, costs, {task.recipe.name: task.memory for task in tasks})


def _warmed_up(task: RecipeTask) -> Runner:
    runner = Runner(task.recipe.name, task, _train)  # type: ignore[arg-type]
    runner.take_steps(StepMemory.NUM_STEPS + 1)
    return runner


def _take_turns(runners: Sequence[Runner], num_rounds: int) -> dict[str, list[Cost]]:
    gc.collect()
    gc.freeze()
    costs: dict[str, list[Cost]] = {runner.name: [] for runner in runners}
    order = random.Random(0)
    for _ in range(num_rounds):
        for runner in order.sample(runners, len(runners)):
            costs[runner.name].append(runner.take_steps(1))
    return costs


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard the output of the trainers."""
    with open(os.devnull, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


def _table(size: Size, costs: dict[str, list[Cost]], memory: Mapping[str, StepMemory]) -> ResultTable:
    columns = ["", "wall ms", "step / plain", "95% interval", "peak MB", "peak / plain", "held MB"]
    rows = []
    for name, rounds in costs.items():
        # Compare within a round: a disturbance usually lasts longer than a turn.
        ratios = [one.wall / plain.wall for one, plain in zip(rounds, costs[PLAIN], strict=True)]
        low, high = interval_of_median(ratios)
        interval = "" if name == PLAIN else f"{low:.2f} to {high:.2f}"
        peak, held = memory[name].peak, memory[name].held
        wall = spread([one.wall * MS for one in rounds], 0)
        share = f"{peak / memory[PLAIN].peak:.2f}"
        rows.append(
            [name, wall, f"{statistics.median(ratios):.2f}", interval, f"{peak / _MB:.0f}", share, f"{held / _MB:.0f}"]
        )
    return ResultTable(_title(size), columns, rows, PLAIN)


def _title(size: Size) -> str:
    num_parameters = sum(one.numel() for one in make_model(size).parameters())
    layers = f"Llama of {size.num_blocks} layers, vocabulary {_VOCABULARIES[size.name]:,}"
    return f"One step: {layers}, {num_parameters:,} parameters, batch {size.batch_size} x {size.sequence_length}"


_NOTES = [
    "step / plain: median of the ratios within each round. Every step includes AdamW and the gradient norm.",
    "peak: peak of allocated memory during a step, including weights and moments. held: memory that stays allocated "
    "between steps. Both count allocations by torch, not the memory that the system assigned to the process.",
    MALLOC_NOTE,
]


if __name__ == "__main__":
    main()
