"""Nothing that ranks send each other is a pickle: training, evaluation, saving and resuming, in every strategy."""

import pickle
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from tests.support.callback_failure_job import NUM_RANKS
from tests.support.callback_failure_job import train as train_job
from tests.support.ranks import run_on_ranks


def forbidden(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("an object of another rank would be unpickled")


def train_without_pickles(directory: str, kind: str) -> None:
    module = dist.distributed_c10d
    known = module._tensor_to_object
    module._tensor_to_object = forbidden
    pickle.loads, loads = forbidden, pickle.loads
    try:
        # Twice: the second run resumes.
        for _ in range(2):
            train_job([directory, kind, "none", "raise", "-1"])
    finally:
        module._tensor_to_object = known
        pickle.loads = loads


@pytest.mark.parametrize("kind", [kind for kind, number in NUM_RANKS.items() if number > 1])
def test_ranks_exchange_no_pickles(tmp_path: Path, kind: str) -> None:
    run_on_ranks(train_without_pickles, NUM_RANKS[kind], str(tmp_path), kind)
    assert list(tmp_path.rglob("checkpoint-6"))
