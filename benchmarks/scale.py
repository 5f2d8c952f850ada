"""Scale benchmark: time and memory on rank 0 to prepare a trainer and plan a save, by number of ranks and parameters.

    python benchmarks/scale.py [--kinds DDP Accelerate Pipeline Hybrid] [--ranks 8 64 512 1024 4096] [--markdown FILE]

Rank 0 runs alone, with torch's fake process group and simulated declarations of the other ranks (`simulated_ranks.py`).
So the figures contain the work of one rank, and no time for messages. Each measurement runs in a separate process.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from result_table import ResultTable, write_markdown
from rich.console import Console
from scale_rank import KINDS, PIPELINE_SIZE, Scale
from step import facts

_NUM_RANKS = (8, 64, 512, 1024, 4096)
_NUM_LAYERS = 8
"""Layers of the model in the tables by ranks. A pipeline has one layer for each rank instead."""
_GROWTH_LAYERS = (8, 32, 128, 512)
_GROWTH_RANKS = 1024
_COLUMNS = (
    *("tensors", "model s", "prepare s", "1st plan s", "plan s", "manifest s", "read s"),
    *("manifest MB", "peak MB", "sent MB"),
)
_NOTES = [
    "Pipeline: one layer and one stage for each rank, so the model grows with the ranks. Hybrid: pipelines of "
    f"{PIPELINE_SIZE} ranks.",
    "model: construction of the model by model_init, not part of prepare (pipelines build it twice on "
    "rank 0, once on the meta device). prepare: from the constructor of the trainer to the first step.",
    "plan: collection of state, comparison of replicas and plan of all files. The first plan also builds the class of the "
    "model on the meta device.",
    "manifest: description and encoding on the rank that commits. read: parsing and verification, which every "
    "rank does at a load.",
    "peak: highest resident memory above the memory before the trainer was made. It includes the model. sent: bytes of "
    "the gathered values of all ranks, before equal values are merged.",
]


def main() -> None:
    arguments = _parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 160)
    known = [
        *facts([], 1, 1)[:2],
        "rank 0 of simulated ranks, torch's fake process group; one run for each row; CPU seconds",
    ]
    console.print(*known, sep="\n", highlight=False, soft_wrap=True)
    tables = []
    for kind in arguments.kinds:
        tables.append(_by_ranks(kind, arguments.ranks))
        console.print(tables[-1].as_rich())
    for kind in (kind for kind in arguments.kinds if kind != "Pipeline"):
        tables.append(_by_layers(kind))
        console.print(tables[-1].as_rich())
    console.print(*_NOTES, sep="\n", highlight=False, soft_wrap=True)
    if arguments.markdown:
        write_markdown(arguments.markdown, known, tables, _NOTES)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--ranks", nargs="+", type=int, default=_NUM_RANKS, help="numbers of ranks, multiples of 8")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    return parser.parse_args()


def _by_ranks(kind: str, numbers: Sequence[int]) -> ResultTable:
    found = [_measure(kind, number, number if kind == "Pipeline" else _NUM_LAYERS) for number in numbers]
    rows = [[f"{number:,}", *_cells(scale)] for number, scale in zip(numbers, found, strict=True)]
    return ResultTable(f"{kind} by number of ranks", ["ranks", *_COLUMNS], rows, f"{max(numbers):,}")


def _by_layers(kind: str) -> ResultTable:
    rows = [[f"{layers:,}", *_cells(_measure(kind, _GROWTH_RANKS, layers))] for layers in _GROWTH_LAYERS]
    return ResultTable(f"{kind} by number of layers, {_GROWTH_RANKS:,} ranks", ["layers", *_COLUMNS], rows, "")


def _measure(kind: str, num_ranks: int, num_layers: int) -> Scale:
    command = [sys.executable, str(Path(__file__).with_name("scale_rank.py")), kind, str(num_ranks), str(num_layers)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return Scale(**json.loads(done.stdout.splitlines()[-1]))


def _cells(scale: Scale) -> list[str]:
    seconds = (scale.building, scale.preparation, scale.first_planning, scale.planning, scale.manifest, scale.reading)
    megabytes = (scale.manifest_bytes / 1e6, scale.peak_bytes / 1e6)
    return [
        f"{scale.num_tensors:,}",
        *(f"{second:.2f}" for second in seconds),
        *(f"{megabyte:.2f}" if megabyte < 1 else f"{megabyte:.1f}" for megabyte in megabytes),
        f"{scale.gathered_bytes / 1e6:.1f}",
    ]


if __name__ == "__main__":
    main()
