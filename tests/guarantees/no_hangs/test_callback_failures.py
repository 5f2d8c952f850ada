"""Callbacks that fail on one rank: all ranks raise the same error, which names rank, event, callback and cause."""

import re
from typing import NamedTuple

import pytest

from tests.support.callback_failure_job import MESSAGE, NUM_RANKS
from tests.support.sampling import sampled
from tests.support.warm_ranks import EndedRank, run_warm_ranks

OWN_EVENTS = ("on_forward_backward_begin", "on_forward_backward_end", "on_train_metrics", "on_log_step")
"""Events that transformers has not."""
EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_forward_backward_begin",
    "on_forward_backward_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_train_metrics",
    "on_step_end",
    "on_log_step",
    "on_log",
    "on_prediction_step",
    "on_evaluate",
    "on_save",
    "on_predict",
    "on_epoch_end",
    "on_train_end",
)
EVENTS_OF_TRANSFORMERS = (*(one for one in EVENTS if one not in OWN_EVENTS), "on_substep_end")


class Case(NamedTuple):
    """Strategy, event, kind of failure, and failing rank."""

    kind: str
    event: str
    how: str = "raise"
    rank: int = 1


SAMPLE = [
    Case("ddp", "on_step_end", rank=0),
    Case("ddp", "on_epoch_end", "exit"),
    Case("ddp", "on_train_end", "exit"),
    Case("ddp", "on_evaluate", "evaluate"),
    Case("fsdp2", "hook"),
    Case("pipeline", "on_log"),
    Case("hf", "on_substep_end"),
]
EVERYTHING = [
    Case(kind, event, how, rank)
    for kind, number in NUM_RANKS.items()
    if kind != "single"
    for event in (EVENTS if kind != "hf" else EVENTS_OF_TRANSFORMERS)
    # Only the last stage of a pipeline predicts.
    for rank in ((0, number - 1) if event != "on_prediction_step" else (number - 1,))
    for how in ("raise", "exit")
] + [
    *SAMPLE,
    *(Case(kind, "hook") for kind in ("ddp", "accelerate", "pipeline", "hybrid")),
    *(Case(kind, "on_save", "save") for kind in ("ddp", "fsdp2", "pipeline")),
]
CASES = list(dict.fromkeys(sampled(EVERYTHING, SAMPLE)))


def name_of(case: Case) -> str:
    return "_".join(map(str, case))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[EndedRank]]:
    directory = tmp_path_factory.mktemp("callbacks")
    plans = {}
    for case in CASES:
        own = directory / name_of(case)
        own.mkdir()
        plans[name_of(case)] = (NUM_RANKS[case.kind], [str(own), *map(str, case)])
    return run_warm_ranks("tests.support.callback_failure_job", plans, timeout=120.0 + 10.0 * len(plans))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_all_ranks_raise_the_error_of_the_failing_rank(case: Case, jobs: dict[str, list[EndedRank]]) -> None:
    ranks = jobs[name_of(case)]
    cause = "SystemExit: 0" if case.how == "exit" else f"ValueError: {MESSAGE}"
    during = "in [a-z/]+ of step 3" if case.event == "hook" else f"calling {case.event} of the callback FullDisk"
    expected = re.compile(rf"DistributedError: rank {case.rank} failed while {during}: {cause}")
    for number, rank in enumerate(ranks):
        assert rank.code == 1, rank.output
        if number == case.rank and case.how == "exit":
            assert "SystemExit: 0" in rank.output
        elif number == case.rank and case.event == "hook":
            assert f"\n[rank{number}]: ValueError: {MESSAGE}" in rank.output
        else:
            assert expected.search(rank.output), rank.output
            assert "in fail" in rank.output
