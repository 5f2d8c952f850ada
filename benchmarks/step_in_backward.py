"""Step time by number of parameters, with `fuse_optim_with_backward` and with a normal optimizer step.

    python benchmarks/step_in_backward.py [--rounds 20] [--markdown FILE]

Models with different numbers of layers take turns, each with both kinds of step: forward, backward and AdamW. The batch
has few tokens, so that the overhead per parameter dominates.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from result_table import ResultTable, write_markdown
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from forgather.ml.optim.step_in_backward import StepInBackward

_NUM_LAYERS = (6, 12, 24, 48)
_MS, _US = 1e3, 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="steps per contender")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts = [f"torch {torch.__version__}, 1 thread", f"median of {arguments.rounds} rounds"]
    table = _measure(arguments.rounds)
    Console(width=None if sys.stdout.isatty() else 140).print(*facts, table.as_rich(), sep="\n", highlight=False)
    if arguments.markdown:
        write_markdown(arguments.markdown, facts, [table], [])


def _measure(num_rounds: int) -> ResultTable:
    steps = {(layers, fused): _step_of(layers, fused) for layers in _NUM_LAYERS for fused in (False, True)}
    seconds: dict[tuple[int, bool], list[float]] = {contender: [] for contender in steps}
    for number in range(num_rounds + 2):
        for contender, step in steps.items():
            started = time.perf_counter()
            step()
            if number >= 2:
                seconds[contender].append(time.perf_counter() - started)
    rows = []
    for layers in _NUM_LAYERS:
        normal, fused = (statistics.median(seconds[layers, one]) for one in (False, True))
        count = sum(1 for _ in _model(layers).parameters())
        per_parameter = [f"{one / count * _US:.0f}" for one in (normal, fused)]
        ratio = statistics.median(
            one / other for one, other in zip(seconds[layers, True], seconds[layers, False], strict=True)
        )
        rows.append([str(count), f"{normal * _MS:.1f}", f"{fused * _MS:.1f}", f"{ratio:.2f}", *per_parameter])
    columns = ["tensors", "normal ms", "fused ms", "fused / normal", "normal us per tensor", "fused us per tensor"]
    return ResultTable("Step time by number of parameter tensors", columns, rows, "")


def _model(num_layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            use_cache=False,
        )
    )


def _step_of(num_layers: int, fused: bool) -> Callable[[], None]:
    model = _model(num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.arange(16)[None]
    step_in_backward = StepInBackward(optimizer).__enter__() if fused else None

    def step() -> None:
        model(tokens).logits.square().mean().backward()
        if step_in_backward is None:
            torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
        else:
            step_in_backward()

    return step


if __name__ == "__main__":
    main()
