"""FSDP2 benchmark: overhead of a step on two ranks over a bare fully_shard loop; checkpoints and memory by strategy.

    python benchmarks/fsdp2.py [--sizes nano 1M 10M] [--rounds 30] [--save-mb 300] [--save-rounds 3] [--markdown FILE]

The script starts the ranks on this machine, with gloo over localhost. The contenders of the step take turns in blocks
of steps, as in ddp.py. Saves, loads and memory are measured in fresh processes for each strategy, and the strategies
take turns. `--rounds 0` or `--save-rounds 0` skips a section.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_contenders import NUM_RANKS
from disk import directory_on_disk, file_system
from fsdp2_checkpoint_rank import KINDS
from fsdp2_contenders import BARE, CONTENDERS, OURS
from local_ranks import NUM_THREADS, RANKS_FACT, RESULT_FILE, measure_on_ranks, ratio_table, run_ranks
from result_table import ResultTable, write_markdown
from rich.console import Console
from step import MALLOC_NOTE, facts, spread, title_of
from step_contenders import SIZES

_GB, _MB = 1e9, 1e6
_NUM_REPEATS = 3
_SHARDED = "FSDP2Trainer"


def main() -> None:
    arguments = _parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 140)
    known = [
        *facts(list(CONTENDERS), arguments.rounds, NUM_THREADS),
        RANKS_FACT.format(NUM_RANKS),
        f"checkpoints: median of {arguments.save_rounds} x {_NUM_REPEATS} saves and loads, {file_system(arguments.dir)}",
    ]
    console.print(*known, sep="\n", highlight=False, soft_wrap=True)
    tables = []
    for size in (size for size in SIZES if arguments.rounds and size.name in arguments.sizes):
        costs = measure_on_ranks("fsdp2_rank.py", NUM_RANKS, [size.name, str(arguments.rounds), *CONTENDERS])
        tables.append(ratio_table(title_of(size, NUM_RANKS), costs, BARE, OURS))
        console.print(tables[-1].as_rich())
    if arguments.save_rounds:
        tables += _strategy_tables(_measure_strategies(arguments.dir, arguments.save_mb, arguments.save_rounds))
        console.print(*(table.as_rich() for table in tables[-2:]))
    console.print(*_NOTES, sep="\n", highlight=False, soft_wrap=True)
    if arguments.markdown:
        write_markdown(arguments.markdown, known, tables, _NOTES)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [size.name for size in SIZES]
    parser.add_argument("--sizes", nargs="*", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=30, help="blocks of steps per contender and size")
    parser.add_argument("--save-mb", type=int, default=300, help="size of the weights and both AdamW moments together")
    parser.add_argument("--save-rounds", type=int, default=3, help="fresh jobs per strategy")
    parser.add_argument("--dir", default=".", help="directory on the disk to measure")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    return parser.parse_args()


def _measure_strategies(parent: str, num_megabytes: int, num_rounds: int) -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with directory_on_disk(parent, ".fsdp2-benchmark-", int(3 * num_megabytes * _MB)) as directory:
        for _ in range(num_rounds):
            for kind, (_, _, num_ranks) in KINDS.items():
                arguments = [kind, str(num_megabytes), str(_NUM_REPEATS)]
                run_ranks("fsdp2_checkpoint_rank.py", num_ranks, str(directory), arguments)
                results[kind].append(json.loads(Path(directory, RESULT_FILE).read_text()))
    return results


def _strategy_tables(results: dict[str, list[dict[str, Any]]]) -> list[ResultTable]:
    size = results[_SHARDED][0]["num_bytes"]
    saves = [[*_name(kind), *_speeds(rounds, "saves"), *_speeds(rounds, "loads")] for kind, rounds in results.items()]
    memory = [
        [*_name(kind), f"{statistics.median(one['held'] / _MB for one in rounds):.0f}"]
        for kind, rounds in results.items()
    ]
    return [
        ResultTable(
            f"Save and load of one checkpoint, {size / _MB:.0f} MB",
            ["", "ranks", "save s", "save GB/s", "load s", "load GB/s"],
            saves,
            _SHARDED,
        ),
        ResultTable("Memory per rank", ["", "ranks", "weights and moments MB"], memory, _SHARDED),
    ]


def _name(kind: str) -> list[str]:
    return [kind, str(KINDS[kind][2])]


def _speeds(rounds: Sequence[dict[str, Any]], key: str) -> list[str]:
    seconds = [one for result in rounds for one in result[key]]
    num_bytes = rounds[0]["num_bytes"]
    return [spread(seconds, 2), spread([num_bytes / one / _GB for one in seconds], 2)]


_NOTES = [
    "CPU: time of all threads of rank 0. wall / bare: median of the ratios within each round.",
    "All loops shard the same layers, clip gradients to norm 1 and follow a linear schedule with fused AdamW. The "
    "benchmark compares the parameters after the first step to check this. The bare loop and the first Forgather loop "
    "take ready batches from the memory of the rank; dispatched: rank 0 makes the batches of both ranks.",
    "Forgather also counts targets, agrees with the other rank on every batch, and logs with its default callbacks.",
    "save: until all files are on disk. Trainer and DDPTrainer: one rank writes everything. FSDP2Trainer: each rank "
    "writes half of the full tensors. load: in the process of the saves, page cache warm. Seconds of the slowest rank.",
    "weights and moments: bytes on rank 0, between steps.",
    MALLOC_NOTE,
]


if __name__ == "__main__":
    main()
