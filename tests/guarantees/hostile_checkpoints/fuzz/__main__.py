"""Checkpoint fuzzer: `python -m tests.guarantees.hostile_checkpoints.fuzz --examples 20000 [--seed N]`.

This process imports torch once and forks a child for each example, so it must not start threads.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.guarantees.hostile_checkpoints.fuzz import limits
from tests.guarantees.hostile_checkpoints.fuzz.mutations import KINDS, Mutation, mutations_of
from tests.guarantees.hostile_checkpoints.fuzz.runner import BAD, GOOD, Fuzzer, Result
from tests.guarantees.hostile_checkpoints.fuzz.self_check import misbehaving_outcomes

_RESUME_EVERY = 5
# Further time-outs show nothing new, and the run would take hours.
_MOST_HANGS = 12


class GaveUp(Exception):
    """Raised when too many examples hang."""


@dataclass
class Example:
    """Mutation and its result."""

    number: int
    mutation: Mutation
    result: Result
    checks_resume: bool

    @property
    def replay(self) -> str:
        resume = " --resume" if self.checks_resume else ""
        return (
            f"python -m tests.guarantees.hostile_checkpoints.fuzz --replay{resume} {_quoted(self.mutation.to_json())}"
        )


@dataclass
class Run:
    """Fuzz run with all examples so far."""

    fuzzer: Fuzzer
    seed: int
    max_hangs: int
    examples: list[Example] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    seen: set[str] = field(default_factory=set)

    def try_one(self, mutation: Mutation) -> None:
        number = len(self.examples)
        checks_resume = number % _RESUME_EVERY == 0
        result = self.fuzzer.run(mutation, checks_resume)
        self.examples.append(Example(number, mutation, result, checks_resume))
        if sum(one.result.outcome == "hung" for one in self.examples) > self.max_hangs:
            raise GaveUp(f"more than {self.max_hangs} examples took longer than {limits.WALL_SECONDS:g} s")

    @property
    def failures(self) -> list[Example]:
        return [one for one in self.examples if not one.result.is_good]

    def try_kind(self, kind: str, count: int, seed: int) -> None:
        """Try up to `count` new examples of a kind; some kinds have fewer."""
        known = len(self.examples)

        @hypothesis.seed(seed)
        @settings(
            # Hypothesis draws the simplest examples first, and some of them were tried before.
            max_examples=2 * count + 20,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(mutations_of(kind, self.fuzzer.file_names))
        def examples(mutation: Mutation) -> None:
            text = mutation.to_json()
            if text not in self.seen and len(self.examples) - known < count:
                self.seen.add(text)
                self.try_one(mutation)

        examples()

    def try_all(self, num_examples: int) -> None:
        """Try each kind by its share, and fill up with examples of the two largest kinds."""
        total = sum(kind.share for kind in KINDS.values())
        for number, (name, kind) in enumerate(KINDS.items()):
            self.try_kind(name, max(1, num_examples * kind.share // total), self.seed + number)
        more = self.seed
        while len(self.examples) < num_examples:
            more += 1_000_003
            missing = num_examples - len(self.examples)
            self.try_kind("state.replace", (missing + 1) // 2, more)
            self.try_kind("json.replace", (missing + 1) // 2, more)

    def as_json(self) -> dict[str, object]:
        return {
            "examples": len(self.examples),
            "seconds": time.monotonic() - self.started,
            "outcomes": Counter(one.result.outcome for one in self.examples),
            "kinds": Counter(one.mutation.kind for one in self.examples),
            "is_pristine": self.fuzzer.is_pristine,
            "retries": self.fuzzer.num_retries,
            "failures": [{**asdict(one), "replay": one.replay} for one in self.failures],
        }


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def print_report(run: Run) -> None:
    seconds = time.monotonic() - run.started
    print(f"{len(run.examples)} examples, seed {run.seed}, {seconds:.0f} s, {len(run.examples) / seconds:.0f} a second")
    _print_table(run)
    slowest = sorted(run.examples, key=lambda one: -one.result.seconds)[:5]
    print("\nSlowest:")
    for one in slowest:
        print(f"  {one.result.seconds:6.2f} s  {one.result.outcome}: {one.mutation.to_json()[:200]}")
    if run.fuzzer.num_retries:
        print(f"{run.fuzzer.num_retries} examples were tried again because they took too long.")
    peak = max(run.examples, key=lambda one: one.result.peak_bytes)
    print(
        f"Peak memory beyond the start: {peak.result.peak_bytes / limits.MIB:.0f} MiB  {peak.mutation.to_json()[:200]}"
    )
    _print_failures(run)


def _print_table(run: Run) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for one in run.examples:
        counts[one.mutation.kind][one.result.outcome] += 1
    outcomes = [name for name in (*GOOD, *BAD) if any(count[name] for count in counts.values())]
    print(f"\n{'':20}" + "".join(f"{name:>16}" for name in outcomes))
    for kind, count in counts.items():
        print(f"{kind:20}" + "".join(f"{count[name] or '':>16}" for name in outcomes))
    totals = Counter(one.result.outcome for one in run.examples)
    print(f"{'all':20}" + "".join(f"{totals[name]:>16}" for name in outcomes))


def _print_failures(run: Run) -> None:
    """Print failures grouped by cause: the same error at the same line."""
    groups: dict[tuple[str, ...], list[Example]] = defaultdict(list)
    for one in run.failures:
        result = one.result
        groups[(result.outcome, result.where, result.detail.split(":")[0])].append(one)
    print(f"\n{len(run.failures)} failures in {len(groups)} groups")
    for (outcome, where, _), examples in sorted(groups.items(), key=lambda item: BAD.index(item[0][0])):
        print(f"\n{outcome} ({len(examples)}x) {where}")
        kinds = Counter(one.mutation.kind for one in examples)
        print("  " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
        for one in sorted(examples, key=lambda one: len(one.mutation.to_json()))[:3]:
            print(f"  example {one.number}: {one.result.detail[:400]}")
            print(f"    {one.replay}")


def _with_fuzzer(work: Callable[[Fuzzer], int], is_verbose: bool) -> int:
    """Run `work` with a fuzzer, in memory if possible, because copying checkpoints is most of the work."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-", dir=parent))
    try:
        fuzzer = Fuzzer(scratch, is_verbose)
        fuzzer.prepare()
        return work(fuzzer)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fuzz(fuzzer: Fuzzer, arguments: argparse.Namespace) -> int:
    noticed = misbehaving_outcomes(fuzzer)
    run = Run(fuzzer, arguments.seed, arguments.max_hangs)
    gave_up = ""
    try:
        run.try_all(arguments.examples)
    except GaveUp as reason:
        gave_up = str(reason)
    except KeyboardInterrupt:
        gave_up = "interrupted"
    print_report(run)
    if gave_up:
        print(f"\nGave up: {gave_up}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**run.as_json(), "gave_up": gave_up, "noticed": noticed}))
    return 1 if run.failures or gave_up or not fuzzer.is_pristine else 0


def _replay(fuzzer: Fuzzer, arguments: argparse.Namespace) -> int:
    result = fuzzer.run(Mutation.from_json(arguments.mutation), arguments.resume)
    print(json.dumps(asdict(result), indent=2))
    return 0 if result.is_good else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guarantees.hostile_checkpoints.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="-1 draws a new seed")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--max-hangs", type=int, default=_MOST_HANGS)
    parser.add_argument("--replay", action="store_true", help="try one mutation again")
    parser.add_argument("--resume", action="store_true", help="with --replay: also resume and save")
    parser.add_argument("mutation", nargs="?", help="with --replay: mutation as printed by the report")
    arguments = parser.parse_args()
    if arguments.seed < 0:
        arguments.seed = random.SystemRandom().randrange(2**32)
    # Some of the malformed tensors make torch warn.
    warnings.simplefilter("ignore")
    work = _replay if arguments.replay else _fuzz
    return _with_fuzzer(lambda fuzzer: work(fuzzer, arguments), arguments.replay)


if __name__ == "__main__":
    sys.exit(main())
