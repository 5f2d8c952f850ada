"""Data-parallel benchmark: overhead of a step on two ranks over a bare DDP loop, for Forgather and other trainers.

    python benchmarks/ddp.py [--sizes nano 10M] [--rounds 40] [--only NAME...] [--markdown FILE]

The script starts the ranks on this machine, with gloo over localhost. On each rank all loops stay alive, each in a
separate thread, and exactly one thread runs. They take turns in blocks of steps, in the same random order on both
ranks. The ranks wait for each other between turns. Rank 0 measures. Contenders with a missing package are skipped. The
docstring of step.py describes how to include Lightning.
"""

import argparse
import sys
from pathlib import Path

from ddp_contenders import BARE, CONTENDERS, NUM_RANKS, OURS, OURS_SHARDED
from local_ranks import NUM_THREADS, RANKS_FACT, measure_on_ranks, ratio_table
from result_table import write_markdown
from rich.console import Console
from step import MALLOC_NOTE, facts, title_of
from step_contenders import SIZES, installed


def main() -> None:
    arguments = _parse_arguments()
    kept = CONTENDERS if arguments.only is None else (BARE, OURS, OURS_SHARDED, *arguments.only)
    names = [name for name in installed(CONTENDERS) if name in kept]
    console = Console(width=None if sys.stdout.isatty() else 140)
    known = [*facts(names, arguments.rounds, NUM_THREADS), RANKS_FACT.format(NUM_RANKS)]
    console.print(*known, sep="\n", highlight=False, soft_wrap=True)
    tables = []
    for size in (size for size in SIZES if size.name in arguments.sizes):
        costs = measure_on_ranks("ddp_rank.py", NUM_RANKS, [size.name, str(arguments.rounds), *names])
        tables.append(ratio_table(title_of(size, NUM_RANKS), costs, BARE, OURS))
        console.print(tables[-1].as_rich())
    console.print(*_NOTES, sep="\n", highlight=False, soft_wrap=True)
    if arguments.markdown:
        write_markdown(arguments.markdown, known, tables, _NOTES)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=[size.name for size in SIZES], default=["nano", "10M"])
    parser.add_argument("--rounds", type=int, default=40, help="blocks of steps per contender and size")
    parser.add_argument("--only", nargs="+", help="contenders besides the bare loop and Forgather")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    return parser.parse_args()


_NOTES = [
    "CPU: time of all threads of rank 0. wall / bare: median of the ratios within each round.",
    "Every loop logs the loss in its usual way, with its default callbacks and progress bars. No loop saves or clips "
    "gradients. dispatched: rank 0 makes the batches of both ranks. ZeRO-1: dispatched, with ddp.shard_optimizer. "
    "replica_check_steps: dispatched, with a sample of the replicas compared every 1 or 100 steps.",
    "Forgather also measures the gradient norm at every step. By default it sets gradient_as_bucket_view, so that "
    "gradients are views of DDP's buckets. The bare loop with Forgather settings does both. All other loops leave DDP "
    "at its defaults.",
    "The benchmark checks that each rank gets its own batches, and that all ranks end with the same parameters.",
    MALLOC_NOTE,
]


if __name__ == "__main__":
    main()
