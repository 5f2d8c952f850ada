"""Fixtures for all tests: stop rank workers at the end of the session, and isolate tests from each other."""

import os
import secrets
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from forgather._job_secret import SECRET_VARIABLE
from forgather.ml.distributed import reset_process_groups
from tests.support.launch import kill_leftovers
from tests.support.rank_pool import worker_variables
from tests.support.ranks import close_pool

# Same DNS timeout as on the ranks. Without a reachable name server, a TCPStore would wait five seconds instead of one.
os.environ["RES_OPTIONS"] = worker_variables()["RES_OPTIONS"]

# Launchers of tests must not make a secret in the home directory.
os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="session", autouse=True)
def rank_workers() -> Iterator[None]:
    """Stop the workers of `run_on_ranks` at the end of the session."""
    yield
    close_pool()


@pytest.fixture(scope="module", autouse=True)
def environment_of_module() -> Iterator[None]:
    """Undo what fixtures of a module change in the environment, for example by a command that runs in this process."""
    variables, path = dict(os.environ), list(sys.path)
    yield
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = path


@pytest.fixture(autouse=True)
def single_process() -> Iterator[None]:
    """Run each test without rank variables and process group, and undo its own initialisation in this process."""
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
