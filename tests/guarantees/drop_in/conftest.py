"""Fixture: log levels, which trainers set for their process."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def unchanged_log_levels() -> Iterator[None]:
    """Restore level and handlers of the loggers that a trainer with `log_level` changes."""
    loggers = [logging.getLogger(name) for name in ("transformers", "forgather")]
    before = [(one, one.level, list(one.handlers)) for one in loggers]
    yield
    for one, level, handlers in before:
        one.setLevel(level)
        one.handlers[:] = handlers
