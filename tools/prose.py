"""Measure the prose: markers of translated English, long sentences, clause headings, spelling, docstrings, comments.

    python tools/prose.py [PATH ...] [--root DIR] [--worst N] [--rule RULE] [--sample N --before REV [--seed N]]
    python tools/prose.py --beside DIR ...

prints one row per figure for each area (`src`, `docs`, ...), and the worst passages. With paths, only these files and
folders are read. `--sample` draws sentences of an earlier commit at random, and prints each with its successor.
`--beside` counts the markers in the docstrings and comments of other packages.
"""

import argparse
import difflib
import io
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from prose_rules import (
    CLAUSE,
    LONG,
    MAX_PAGE_LINE,
    RULES,
    SPELLING,
    TERM,
    WEIGHTS,
    Fault,
    faults_of,
    markers_in,
)
from prose_text import COMMENT, DOCSTRING, MESSAGE, TEST_NAME, Passage, Source, read_tree, words

AREAS = {
    "src": ["src"],
    "docs": ["docs", "README.md", "SECURITY.md"],
    "tests": ["tests"],
    "benchmarks, examples, tools": ["benchmarks", "examples", "tools"],
}
MAX_MARKERS = 5.0
COMMENT_SHARE = 5.0
_MIN_SAMPLE_WORDS = 6
_MIN_SIMILARITY = 0.5
# The strings of this test are faulty on purpose: each rule has an example there.
_FAULTY_EXAMPLES = "tests/unit/tools/test_prose.py"
_ROOT = Path(__file__).resolve().parent.parent


class Report:
    """Figures of one area: faults by rule, words, lines."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self.sources = list(sources)
        self.passages = [
            passage
            for source in self.sources
            for passage in source.passages
            if passage.kind != MESSAGE or source.file != _FAULTY_EXAMPLES
        ]
        self.faults = [fault for passage in self.passages for fault in faults_of(passage)]
        self.counts = Counter(fault.rule for fault in self.faults)

    @property
    def num_words(self) -> int:
        return sum(len(words(sentence)) for passage in self.passages for sentence in passage.sentences())

    def markers_per_10000(self, kinds: Sequence[str] = ()) -> float:
        passages = [passage for passage in self.passages if not kinds or passage.kind in kinds]
        sentences = [sentence for passage in passages for sentence in passage.sentences()]
        total = sum(len(words(sentence)) for sentence in sentences)
        return 1e4 * sum(len(markers_in(sentence)) for sentence in sentences) / max(total, 1)

    @property
    def comment_share(self) -> float:
        python = [source for source in self.sources if source.file.endswith(".py")]
        return 100 * sum(each.num_comment_lines for each in python) / max(sum(each.num_lines for each in python), 1)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.beside:
        for folder in options.beside:
            _print_beside(Path(folder))
        return 0
    if options.sample:
        print_sample(options.root, options.before, options.sample, options.seed)
        return 0
    areas = {"given paths": options.paths} if options.paths else AREAS
    reports = {name: Report(read_tree(options.root, paths)) for name, paths in areas.items()}
    for name, report in reports.items():
        _print_figures(name, report)
    faults = [fault for report in reports.values() for fault in report.faults]
    if options.rule:
        faults = [fault for fault in faults if fault.rule.startswith(options.rule)]
    _print_worst(faults, options.worst)
    _print_long_lines(options.root, areas)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure the prose of the project.")
    parser.add_argument("paths", nargs="*", help="files and folders to read; default: the whole project")
    parser.add_argument("--root", type=Path, default=_ROOT, help="root of the source tree")
    parser.add_argument("--worst", type=int, default=20, metavar="N", help="number of passages to print")
    parser.add_argument("--rule", help="print only faults of this rule (the start of its name)")
    parser.add_argument("--sample", type=int, metavar="N", help="print N random sentences, before and after")
    parser.add_argument("--before", default="HEAD", metavar="REV", help="the commit to draw them from")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--beside", nargs="+", metavar="DIR", help="packages to count the markers of")
    return parser


# --- figures


def _print_figures(name: str, report: Report) -> None:
    print(f"{name}: {len(report.sources)} files, {report.num_words} words of prose")
    code = report.markers_per_10000((DOCSTRING, COMMENT))
    rows = [
        ("markers in 10,000 words, docstrings and comments", f"{code:.1f}", f"at most {MAX_MARKERS:g}"),
        ("markers in 10,000 words, all prose", f"{report.markers_per_10000():.1f}", ""),
        ("comments, percent of Python lines", f"{report.comment_share:.1f}", f"about {COMMENT_SHARE:g} in src"),
        *((rule, str(report.counts[rule]), "0" if rule in (CLAUSE, LONG, SPELLING, TERM) else "") for rule in RULES),
    ]
    for title, value, aim in rows:
        print(f"  {title:52s} {value:>8s}  {aim}")


def _print_worst(faults: Iterable[Fault], number: int) -> None:
    by_passage: dict[Passage, list[Fault]] = {}
    for fault in faults:
        by_passage.setdefault(fault.passage, []).append(fault)
    ranked = sorted(by_passage.items(), key=lambda item: -sum(WEIGHTS[fault.rule] for fault in item[1]))
    for passage, found in ranked[:number]:
        print(f"\n{passage.file}:{passage.line} ({passage.kind})")
        for fault in found:
            print(f"  {fault.rule}: {' '.join(fault.text.split())[:300]}")


def _print_long_lines(root: Path, areas: dict[str, list[str]]) -> None:
    """Print the lines of documentation pages that are too long; tables and code blocks count too."""
    pages = [
        source.file for paths in areas.values() for source in read_tree(root, paths) if source.file.endswith(".md")
    ]
    for page in pages:
        lines = (root / page).read_text(encoding="utf-8").splitlines()
        numbers = [number for number, line in enumerate(lines, start=1) if len(line) > MAX_PAGE_LINE]
        if numbers:
            print(f"{page}: {len(numbers)} lines over {MAX_PAGE_LINE} characters, the first is line {numbers[0]}")


def _print_beside(folder: Path) -> None:
    report = Report(read_tree(folder.parent, [folder.name]))
    rate = report.markers_per_10000((DOCSTRING, COMMENT))
    print(f"{folder.name:24s} {rate:6.1f} markers in 10,000 words, {report.comment_share:.1f}% comment lines")


# --- sentences before and after


def print_sample(root: Path, before: str, number: int, seed: int) -> None:
    """Draw sentences of the commit `before`, and print each with its successor in the working tree."""
    folders = [folder for paths in AREAS.values() for folder in paths]
    with tempfile.TemporaryDirectory() as folder:
        _extract(root, before, folder)
        old = [passage for source in read_tree(Path(folder), folders) for passage in source.passages]
    new: dict[str, list[Passage]] = {}
    for source in read_tree(root, folders):
        new[source.file] = list(source.passages)
    sentences = [(passage, each) for passage in old for each in passage.sentences() if is_sentence(passage, each)]
    drawn = random.Random(seed).sample(sentences, number)
    for passage, sentence in drawn:
        print(
            f"{passage.file} ({passage.kind})\n  before: {sentence}\n  after:  {_successor(passage, sentence, new)}\n"
        )


def is_sentence(passage: Passage, text: str) -> bool:
    """Return whether a text is long enough to compare; shorter ones are labels, table cells and paths."""
    return len(words(text)) >= (4 if passage.kind == TEST_NAME else _MIN_SAMPLE_WORDS)


def _extract(root: Path, revision: str, folder: str) -> None:
    archive = subprocess.run(["git", "-C", str(root), "archive", revision], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")


def _successor(passage: Passage, sentence: str, new: dict[str, list[Passage]]) -> str:
    """Find the most similar sentence with the same kind and owner; else in the file, also of another kind."""
    passages = new.get(passage.file, [])
    same_kind = [each for each in passages if each.kind == passage.kind]
    same_owner = [each for each in same_kind if each.owner == passage.owner]
    found = _most_similar(sentence, same_owner or same_kind)
    # A docstring may have become a comment, or a comment may have moved to another function.
    moved = _most_similar(sentence, passages)
    is_moved = _similarity(sentence, found) < _MIN_SIMILARITY <= _similarity(sentence, moved)
    return (moved if is_moved else found) or "(removed)"


def _most_similar(sentence: str, passages: Iterable[Passage]) -> str:
    sentences = [each for passage in passages for each in passage.sentences()]
    return max(sentences, key=lambda each: _similarity(sentence, each), default="")


def _similarity(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, words(first.lower()), words(second.lower())).ratio()


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does. Python would fail again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
