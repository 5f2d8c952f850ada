"""Checkpoint benchmark: Forgather compared with torch.save, safetensors, torch's DCP and plain files, in one run.

    python benchmarks/checkpoint.py [--size-gb 2.4] [--rounds 3] [--dir .] [--markdown FILE] [--background]

Every saver and loader runs in fresh processes, and all take turns in rounds. All saves end on the disk: the measured
time includes the flush of data that a contender leaves in the page cache. `--background` measures only background saves.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from background_contenders import BACKGROUND, BackgroundMeasurement, measure_background
from contenders import (
    LOADERS,
    OURS,
    PRELOADED_MODULES,
    SAVERS,
    Loader,
    Measurement,
    Saver,
    forget_files,
    measure_digests,
    measure_loads,
    measure_saves,
)
from disk import directory_on_disk, file_system
from result_table import ResultTable
from rich.console import Console

_GB = 1e9
_ATTEMPTS = ("First", "Second")
_T = TypeVar("_T", bound=Saver | Loader)
_Result = TypeVar("_Result")


@dataclass
class Results:
    """Measurements; each list has one entry per round."""

    saves: dict[str, list[list[Measurement]]] = field(default_factory=lambda: defaultdict(list))
    cold_loads: dict[str, list[list[Measurement]]] = field(default_factory=lambda: defaultdict(list))
    warm_loads: dict[str, list[list[Measurement]]] = field(default_factory=lambda: defaultdict(list))
    digests: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    background: dict[str, list[list[BackgroundMeasurement]]] = field(default_factory=lambda: defaultdict(list))


def main() -> None:
    arguments = _parse_arguments()
    console = Console()
    num_bytes = int(arguments.size_gb * _GB)
    with directory_on_disk(arguments.dir, ".checkpoint-benchmark-", 2 * num_bytes) as directory:
        facts = _facts(directory, arguments.rounds)
        console.print(*facts, sep="\n", highlight=False, soft_wrap=True)
        results = _run(num_bytes, arguments.rounds, directory, arguments.background)
    tables = _tables(results)
    for table in tables:
        console.print(table.as_rich())
    console.print(*_NOTES, sep="\n", highlight=False, soft_wrap=True)
    if arguments.markdown:
        text = [*(f"- {fact}" for fact in facts), "", *(table.as_markdown() for table in tables)]
        text += [f"- {note}" for note in _NOTES]
        arguments.markdown.write_text("\n".join(text) + "\n")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size-gb", type=float, default=2.4, help="size of the weights and both AdamW moments together"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=".", help="directory on the disk to measure")
    parser.add_argument("--background", action="store_true", help="measure background saves only")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    return parser.parse_args()


def _facts(directory: Path, num_rounds: int) -> list[str]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return [
        f"{len(os.sched_getaffinity(0))} cores, {memory / 2**30:.0f} GiB of memory, {file_system(str(directory))}",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads",
        f"median of {num_rounds} rounds (smallest to largest); cold: page cache emptied by {forget_files(directory)}",
    ]


def _run(num_bytes: int, num_rounds: int, directory: Path, only_background: bool) -> Results:
    results = Results()
    progress = Console(stderr=True, log_path=False, highlight=False)
    for round_number in range(num_rounds):
        for name in _turned(list(BACKGROUND), round_number):
            progress.log(f"round {round_number + 1} of {num_rounds}: {name}")
            results.background[name].append(_in_fresh_process(measure_background, name, num_bytes, directory / "files"))
        if only_background:
            continue
        for saver in _rotated(SAVERS, round_number):
            progress.log(f"round {round_number + 1} of {num_rounds}: {saver.name}")
            _measure_saver(saver, round_number, num_bytes, directory / "files", results)
        for name, speed in _in_fresh_process(measure_digests, num_bytes).items():
            results.digests[name].append(speed)
    return results


def _measure_saver(saver: Saver, round_number: int, num_bytes: int, directory: Path, results: Results) -> None:
    """Measure a saver, and all loaders of its files."""
    results.saves[saver.name].append(_in_fresh_process(measure_saves, saver.name, num_bytes, directory))
    for loader in _rotated([one for one in LOADERS if one.saver == saver.name], round_number):
        for is_cold, loads in ((True, results.cold_loads), (False, results.warm_loads)):
            loads[loader.name].append(_in_fresh_process(measure_loads, loader.name, num_bytes, directory, is_cold))
    shutil.rmtree(directory)


def _turned(names: list[str], count: int) -> list[str]:
    return names if count % 2 == 0 else names[::-1]


def _rotated(contenders: Sequence[_T], count: int) -> list[_T]:
    start = count % max(1, len(contenders))
    return [*contenders[start:], *contenders[:start]]


def _in_fresh_process(function: Callable[..., _Result], *arguments: Any) -> _Result:
    # The fork server has only imported modules. Its children are as fresh as a new interpreter, but skip the imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(function, *arguments).result()


def _background_table(results: Results) -> ResultTable:
    columns = ["", "blocked s, first save", "blocked s, later saves", "steps during the save / without", "s in all"]
    rows = []
    for name, rounds in results.background.items():
        saves = [save for one in rounds for save in one]
        later = [save.blocked for one in rounds for save in one[1:]]
        rows.append(
            [
                name,
                _spread([one[0].blocked for one in rounds]),
                _spread(later),
                _spread([save.rate for save in saves]),
                _spread([save.total for save in saves]),
            ]
        )
    return ResultTable("Background saves", columns, rows, next(iter(BACKGROUND)))


def _tables(results: Results) -> list[ResultTable]:
    if not results.saves:
        return [_background_table(results)]
    size = next(iter(results.saves.values()))[0][0].num_bytes
    title = f"{{}} in a process, {size / _GB:.2f} GB"
    tables = [
        _save_table(title.format(f"{attempt} save"), results.saves, index) for index, attempt in enumerate(_ATTEMPTS)
    ]
    for cache, loads in (("cold", results.cold_loads), ("warm", results.warm_loads)):
        for index, attempt in enumerate(_ATTEMPTS):
            tables.append(_load_table(f"{title.format(f'{attempt} load')}, {cache} page cache", loads, index))
    rows = [[name, _spread([speed / _GB for speed in speeds], 1)] for name, speeds in results.digests.items()]
    tables.append(_background_table(results))
    return [*tables, ResultTable("Tensor-level validation, one thread", ["", "GB/s"], rows, OURS)]


def _save_table(title: str, saves: dict[str, list[list[Measurement]]], index: int) -> ResultTable:
    columns = [
        "",
        "blocked s",
        "durable s",
        "GB/s durable",
        "time / Forgather",
        "private GB added",
        "resident GB added",
    ]
    rows = []
    for saver in SAVERS:
        rounds = [one[index] for one in saves[saver.name]]
        ours = [one[index] for one in saves[OURS]]
        rows.append([saver.name, _spread([one.blocked for one in rounds]), *_common_cells(rounds, ours)])
    return ResultTable(title, columns, rows, OURS)


def _load_table(title: str, loads: dict[str, list[list[Measurement]]], index: int) -> ResultTable:
    columns = ["", "s", "GB/s", "time / Forgather", "private GB added", "resident GB added"]
    rows = []
    for loader in LOADERS:
        rounds = [one[index] for one in loads[loader.name]]
        rows.append([loader.name, *_common_cells(rounds, [one[index] for one in loads[OURS]])])
    return ResultTable(title, columns, rows, OURS)


def _common_cells(rounds: Sequence[Measurement], ours: Sequence[Measurement]) -> list[str]:
    return [
        _spread([one.durable for one in rounds]),
        _spread([one.num_bytes / one.durable / _GB for one in rounds]),
        _spread([one.durable / own.durable for one, own in zip(rounds, ours, strict=True)]),
        _spread([one.private_bytes / _GB for one in rounds]),
        _spread([one.resident_bytes / _GB for one in rounds]),
    ]


def _spread(values: Sequence[float], num_digits: int = 2) -> str:
    """Return the median as text, followed by the minimum and the maximum if they differ."""
    low, median, high = (f"{value:.{num_digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return median if low == high else f"{median} ({low}-{high})"


_NOTES = [
    "blocked: time until the save call returned. durable: time until the files and their directory entries were on "
    "disk. Savers that do not flush are followed by an fsync of files and directories.",
    "Forgather also hashes every byte, verifies every byte at a load, and replaces checkpoints atomically. Of the "
    "other savers, only DCP renames its metadata into place. No other loader verifies data: torch.load ignores the "
    "CRC in the archive of torch.save.",
    "time / Forgather: ratio to the time of Forgather in the same round. Values above 1 are slower than Forgather.",
    "private memory: anonymous and shared-anonymous pages, sampled every 10 ms. resident memory: high-water mark of "
    "the system, which includes mapped file pages. Both are peaks above the memory before the call. Neither includes "
    "the page cache of written and read files.",
    "A first load allocates the moments, two thirds of the state, so this memory is not overhead. Loaders that map the "
    "file (mmap, safetensors) copy the moments. Otherwise the optimizer would keep the mapping.",
    "DCP loads only into existing tensors. At a first load, its get_state_dict creates the moments by an optimizer "
    "step.",
]


if __name__ == "__main__":
    main()
