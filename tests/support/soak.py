"""Soak of random kills: `python -m tests.support.soak [--rounds 60] [--seed 0] [--kinds shards ddp]`.

Each round kills a random rank at a random time, one to three times, resumes the run after each kill, and compares the
end with an uninterrupted run bit for bit: weights, moments, schedule, random states, logs and checkpoints of all ranks.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.train_job import Scenario, Start, Stop, run_scenarios

BASE: dict[str, Any] = {"gradient_accumulation_steps": 2}
BEST: dict[str, Any] = {"eval_steps": 3, "load_best_model_at_end": True, "ema_decay": 0.9, "eval_ema": True}
KINDS: dict[str, dict[str, Any]] = {
    "shards": {"settings": BASE, "trainer": "fsdp2", "num_ranks": 2},
    "shards, own data": {
        "settings": {**BASE, "dispatch_batches": False},
        "data": "stream",
        "trainer": "fsdp2",
        "num_ranks": 2,
    },
    "shards, best": {"settings": {**BASE, **BEST}, "trainer": "fsdp2", "num_ranks": 2},
    "replicas": {
        "settings": {**BASE, "num_train_epochs": 4, "fsdp2": {"replicate_size": 2}},
        "trainer": "fsdp2",
        "num_ranks": 4,
        "data": "quiet map",
    },
    "ddp": {"settings": BASE, "trainer": "ddp", "num_ranks": 2},
}
NUM_PER_BATCH = 8
"""Rounds that one process forks, within the time limit of `run_scenarios`."""


def straight_runs(kinds: Sequence[str], directory: Path) -> dict[str, dict[str, Any]]:
    """Return the ends of the uninterrupted runs."""
    directory.mkdir()
    runs = run_scenarios([Scenario(kind, **KINDS[kind]) for kind in kinds], directory)
    ends = {}
    for kind, (start,) in runs.items():
        assert start.facts is not None, start.output
        ends[kind] = start.facts
    return ends


def random_round(name: str, kinds: Sequence[str], longest: float, chance: random.Random) -> Scenario:
    options = KINDS[chance.choice(kinds)]
    stops = tuple(
        Stop("timer", step=int(1000 * chance.uniform(0.02, longest)), ranks=(chance.randrange(options["num_ranks"]),))
        for _ in range(chance.randint(1, 3))
    )
    return Scenario(name, stops=stops, ends_survivors=True, **options)


def problems_of(
    scenario: Scenario, starts: Sequence[Start], ends: Mapping[str, dict[str, Any]]
) -> tuple[int, list[str]]:
    """Return the number of kills before the run ended, and how its end differs."""
    kind = next(kind for kind, options in KINDS.items() if all(getattr(scenario, k) == v for k, v in options.items()))
    for number, start in enumerate(starts):
        if start.exit_code == 0 and start.facts is not None:
            wrong = [part for part, value in ends[kind].items() if start.facts[part] != value]
            return number, [f"{kind}: {part} differs" for part in wrong]
    return len(starts), [f"{kind}: the last start exited with {starts[-1].exit_code}\n{starts[-1].output[-3000:]}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds until the latest kill of a start")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    num_kills = num_bad = num_saved = 0
    with tempfile.TemporaryDirectory() as directory:
        ends = straight_runs(arguments.kinds, Path(directory) / "straight")
        for first in range(0, arguments.rounds, NUM_PER_BATCH):
            numbers = range(first, min(first + NUM_PER_BATCH, arguments.rounds))
            scenarios = [random_round(str(one), arguments.kinds, arguments.longest, chance) for one in numbers]
            folder = Path(directory) / f"from {first}"
            folder.mkdir()
            for scenario, starts in zip(scenarios, run_scenarios(scenarios, folder).values(), strict=True):
                kills, problems = problems_of(scenario, starts, ends)
                num_kills += kills
                num_saved += sum(bool(start.saved) for start in starts[:kills])
                num_bad += bool(problems)
                print(*(f"round {scenario.name}: {problem}" for problem in problems), sep="\n", end="", flush=True)
    print(
        f"{arguments.rounds} rounds (seed {arguments.seed}): {num_kills} kills, {num_saved} of them after a save; "
        f"{num_bad} rounds ended differently"
    )
    sys.exit(num_bad > 0)


if __name__ == "__main__":
    main()
