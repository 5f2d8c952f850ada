"""Fixtures for all tests: no rank worker outlives the session, and no test leaves a trace in the next one."""

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from forgather.ml.distributed import reset_process_groups
from tests.support.launch import kill_leftovers
from tests.support.rank_pool import worker_variables
from tests.support.ranks import close_pool

# As the ranks have it: where a name look-up is not answered, a store of ours would wait five seconds for it, not one.
os.environ["RES_OPTIONS"] = worker_variables()["RES_OPTIONS"]

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="session", autouse=True)
def rank_workers() -> Iterator[None]:
    """End the workers of `run_on_ranks` with the session."""
    yield
    close_pool()


@pytest.fixture(autouse=True)
def single_process() -> Iterator[None]:
    """Every test begins as a process alone, and what it initialises in the test process itself is undone."""
    variables = {name: os.environ.pop(name, None) for name in RANK_VARIABLES}
    yield
    kill_leftovers()
    if dist.is_initialized():
        dist.destroy_process_group()
    reset_process_groups()
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
