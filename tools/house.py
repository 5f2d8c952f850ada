"""Measure the shape of the code: folders, class chains, shared attributes, traced calls, annotations and sizes.

    python tools/house.py [--root DIR] [--verbose] [--no-trace] [--json FILE] [--compare OLD.json]

The tool prints one row per figure, with its aim and whether the code meets it. The figures:

- files per folder: Python files directly in a folder of `src`, `__init__.py` included.
- chain: a trainer and its ancestors in this package.
- shared attributes: instance attributes (`self.name = ...`) that one class of the chain sets and another class reads.
  Public attributes of the contract do not count.
- step: one training step on rank 0 without logging, evaluation, saving and default callbacks. It lasts from the end of
  one step to the end of the next, including the batch that it reads. save: one `save_checkpoint()`. Functions and files
  are counted once. A file change is a call from one file of `src` into another. The figures are medians over several
  steps and saves after a warm-up.
- bare Any: share of annotations of arguments, results and variables that are exactly `Any`.
- function size: lines from `def` to the end. File size: all lines.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from house_static import (
    Sized,
    SourceTree,
    annotations,
    file_sizes,
    files_per_folder,
    function_sizes,
    is_bare_any,
    median,
    percentile_90,
    shared_attributes,
)
from house_trace import KINDS, Trace, trace_trainer

MAX_FOLDER_FILES = 18
MAX_SHARED_ATTRIBUTES = 10
MAX_BARE_ANY_PERCENT = 3.0
MEDIAN_FUNCTION_LINES = (6, 9)
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = {"src": 450, "tests": 600}
CHAIN_LENGTHS = {"Trainer": 2, "DDPTrainer": 3, "AccelTrainer": 3, "PipelineTrainer": 3, "HybridTrainer": 4}
MAX_STEP_FILES = {"DDPTrainer": 18, "PipelineTrainer": 22}
_NUM_LARGEST = 5


class TraceFigures(TypedDict):
    functions: int
    files: int
    file_changes: int
    file_names: list[str]


class Figures(TypedDict):
    """All measurements, in the form of the JSON file."""

    folders: dict[str, int]
    chains: dict[str, list[str]]
    attributes: dict[str, list[str]]
    traces: dict[str, dict[str, TraceFigures]]
    num_annotations: int
    num_bare_any: int
    num_functions: int
    function_median: float
    function_p90: int
    largest_functions: dict[str, int]
    largest_files: dict[str, dict[str, int]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure, and its aim if there is one."""

    name: str
    value: str
    aim: str = ""
    is_met: bool | None = None
    details: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return {None: "", True: "met", False: "NOT met"}[self.is_met]


# --- measuring


def measure(root: Path, has_traces: bool = True) -> Figures:
    tree = SourceTree(root / "src")
    chains = {kind.name: tree.chain(kind.qualified_name) for kind in KINDS}
    found = [annotation for parsed in tree.trees.values() for annotation in annotations(parsed)]
    functions = function_sizes(tree)
    lines = [function.lines for function in functions]
    return Figures(
        folders=files_per_folder(root / "src"),
        chains={name: [known.name for known in chain] for name, chain in chains.items()},
        attributes={name: shared_attributes(chain) for name, chain in chains.items()},
        traces=_traces(root) if has_traces else {},
        num_annotations=len(found),
        num_bare_any=sum(map(is_bare_any, found)),
        num_functions=len(functions),
        function_median=median(lines),
        function_p90=percentile_90(lines),
        largest_functions=_largest(sorted(functions, key=lambda size: -size.lines), MAX_FUNCTION_LINES),
        largest_files={name: _largest(file_sizes(root / name), limit) for name, limit in MAX_FILE_LINES.items()},
    )


def _traces(root: Path) -> dict[str, dict[str, TraceFigures]]:
    traces = {}
    for kind in KINDS:
        print(f"tracing {kind.name} on {kind.num_ranks} rank(s) ...", file=sys.stderr)
        traces[kind.name] = {what: _as_figures(trace) for what, trace in trace_trainer(root, kind).items()}
    return traces


def _as_figures(trace: Trace) -> TraceFigures:
    return TraceFigures(
        functions=trace.functions, files=trace.files, file_changes=trace.file_changes, file_names=trace.file_names
    )


def _largest(sizes: Sequence[Sized], limit: int) -> dict[str, int]:
    """Return the first few sizes, and all sizes over the limit."""
    return {size.name: size.lines for place, size in enumerate(sizes) if place < _NUM_LARGEST or size.lines > limit}


# --- rows


def rows_of(figures: Figures) -> list[Row]:
    return [
        *_folder_rows(figures),
        *_chain_rows(figures),
        *_attribute_rows(figures),
        *_trace_rows(figures),
        _any_row(figures),
        *_size_rows(figures),
    ]


def _folder_rows(figures: Figures) -> Iterator[Row]:
    folders = figures["folders"]
    name, count = next(iter(folders.items()))
    yield _at_most("files in the largest folder", count, MAX_FOLDER_FILES, (), note=name)
    yield Row("folders / files of src", f"{len(folders)} / {sum(folders.values())}")


def _chain_rows(figures: Figures) -> Iterator[Row]:
    for name, chain in figures["chains"].items():
        yield _at_most(f"chain of {name}", len(chain), CHAIN_LENGTHS[name], (" <- ".join(reversed(chain)),))


def _attribute_rows(figures: Figures) -> Iterator[Row]:
    for name, attributes in figures["attributes"].items():
        yield _at_most(f"shared attributes of {name}", len(attributes), MAX_SHARED_ATTRIBUTES, _wrapped(attributes))


def _trace_rows(figures: Figures) -> Iterator[Row]:
    for what in ("step", "save"):
        for name, traces in figures["traces"].items():
            trace = traces[what]
            value = f"{trace['functions']} / {trace['files']} / {trace['file_changes']}"
            limit = MAX_STEP_FILES.get(name) if what == "step" else None
            aim = "" if limit is None else f"at most {limit} files"
            is_met = None if limit is None else trace["files"] <= limit
            title = f"{what} of {name}: functions / files / file changes"
            yield Row(title, value, aim, is_met, tuple(trace["file_names"]))


def _any_row(figures: Figures) -> Row:
    bare, total = figures["num_bare_any"], figures["num_annotations"]
    percent = 100 * bare / max(total, 1)
    aim = f"under {MAX_BARE_ANY_PERCENT:g}%"
    return Row("bare Any among annotations", f"{percent:.1f}% ({bare} of {total})", aim, percent < MAX_BARE_ANY_PERCENT)


def _size_rows(figures: Figures) -> Iterator[Row]:
    low, high = MEDIAN_FUNCTION_LINES
    middle = figures["function_median"]
    yield Row("function lines, median", f"{middle:g}", f"{low} to {high}", low <= middle <= high)
    yield Row("function lines, 90th percentile", f"{figures['function_p90']} (of {figures['num_functions']} functions)")
    yield from _largest_rows("function", figures["largest_functions"], MAX_FUNCTION_LINES)
    for folder, limit in MAX_FILE_LINES.items():
        yield from _largest_rows(f"file of {folder}", figures["largest_files"][folder], limit)


def _largest_rows(what: str, largest: dict[str, int], limit: int) -> Iterator[Row]:
    name, lines = next(iter(largest.items()), ("", 0))
    details = tuple(f"{number:4d}  {each}" for each, number in largest.items())
    yield _at_most(f"lines of the largest {what}", lines, limit, details, note=name)
    over = [f"{each} ({number})" for each, number in largest.items() if number > limit]
    yield Row(f"number over {limit} lines: {what}", str(len(over)), "0", not over, tuple(over))


def _at_most(name: str, value: int, limit: int, details: tuple[str, ...], note: str = "") -> Row:
    text = f"{value} ({note})" if note else str(value)
    return Row(name, text, f"at most {limit}", value <= limit, details)


def _wrapped(names: Sequence[str], per_line: int = 6) -> tuple[str, ...]:
    return tuple(", ".join(names[start : start + per_line]) for start in range(0, len(names), per_line))


# --- printing


def as_text(rows: Sequence[Row], is_verbose: bool) -> str:
    """Return aligned columns; with `is_verbose`, list the counted items below each row."""
    cells = [("figure", "value", "aim", ""), *((row.name, row.value, row.aim, row.verdict) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    below = [[], *([f"    {detail}" for detail in row.details] if is_verbose else [] for row in rows)]
    return "\n".join(line for first, rest in zip(lines, below, strict=True) for line in (first, *rest))


def _folder_list(folders: dict[str, int]) -> str:
    return "\n".join(["files per folder of src", *(f"{count:5d}  {name}" for name, count in folders.items())])


def as_comparison(before: Sequence[Row], after: Sequence[Row]) -> str:
    """Return a Markdown table of both; a figure missing in `before` stays empty there."""
    old = {row.name: row.value for row in before}
    lines = ["| figure | before | after | aim | |", "|---|---|---|---|---|"]
    lines += [f"| {row.name} | {old.get(row.name, '')} | {row.value} | {row.aim} | {row.verdict} |" for row in after]
    return "\n".join(lines)


def main() -> None:
    arguments = _parse_arguments()
    figures = measure(arguments.root.resolve(), not arguments.no_trace)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    rows = rows_of(figures)
    if arguments.compare:
        print(as_comparison(rows_of(json.loads(arguments.compare.read_text())), rows))
    else:
        print(_folder_list(figures["folders"]), as_text(rows, arguments.verbose), sep="\n\n")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--root", type=Path, default=here, help="checkout to measure (default: this one)")
    parser.add_argument("--verbose", action="store_true", help="list the items of each figure")
    parser.add_argument("--no-trace", action="store_true", help="skip the figures that need training")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="print a Markdown table of old and new figures"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
