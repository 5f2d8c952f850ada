"""Killed runs on two ranks with grouped lengths, or with a shuffled `datasets` stream, resume exactly."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.train_job import Scenario, Start, Stop, run_scenarios

KILL = (Stop("on_optimizer_step", step=4, ranks=(1,)),)
GROUPED = {"train_sampling_strategy": "group_by_length", "remove_unused_columns": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "grouped": {"data": "measured", "settings": {"gradient_accumulation_steps": 2, **GROUPED}},
    "shuffled stream": {"data": "shuffled stream", "settings": {"max_steps": 8, "optim": "adafactor"}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Start]]:
    common = {name: {"trainer": "ddp", "num_ranks": 2, **options} for name, options in SETTINGS.items()}
    straight = [Scenario(name, **options) for name, options in common.items()]
    killed = [Scenario(f"{name}, killed", stops=KILL, **options) for name, options in common.items()]
    directory: Path = tmp_path_factory.mktemp("sampling")
    return run_scenarios([*straight, *killed], directory)


@pytest.mark.parametrize("name", SETTINGS)
def test_killed_and_resumed_run_equals_uninterrupted_run(name: str, runs: dict[str, list[Start]]) -> None:
    (straight,), (killed, resumed) = runs[name], runs[f"{name}, killed"]
    assert straight.facts is not None, straight.output
    assert resumed.facts is not None, resumed.output
    assert killed.exit_code != 0 and resumed.began_at == 3
    for part, expected in straight.facts.items():
        assert resumed.facts[part] == expected, part
