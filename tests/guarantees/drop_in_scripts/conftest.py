"""Fixtures: results of the scripts, each computed once, and the log levels that scripts change."""

import logging
from collections.abc import Iterator

import datasets
import pytest
import transformers

from tests.guarantees.drop_in_scripts.script_runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def unchanged_log_levels() -> Iterator[None]:
    """Restore the log levels of libraries, which scripts set for their process."""
    levels = {name: logging.getLogger(name).level for name in ("transformers", "datasets", "forgather", "")}
    handlers = list(logging.getLogger("forgather").handlers)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    yield
    datasets.enable_progress_bars()
    transformers.utils.logging.enable_progress_bar()
    transformers.utils.logging.reset_format()
    logging.getLogger("forgather").handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
