"""Logging with a rank prefix, and a rule for which ranks log."""

import logging
from collections.abc import Callable
from typing import TextIO

from forgather.ml.distributed.environment import get_rank

DEFAULT_FORMAT = "[rank %(rank)s] %(levelname)s:%(name)s: %(message)s"
RankRuleT = Callable[[int], bool]


class _RankHandler(logging.StreamHandler[TextIO]):
    """Writes the records of ranks that log to stderr, and makes `%(rank)s` available to the format."""

    def __init__(self, format: str, rule: RankRuleT | None) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(format))
        self._rule = rule

    def filter(self, record: logging.LogRecord) -> bool:
        # Asked for with every record: loggers are often set up before the environment gives the rank.
        rank = get_rank()
        record.rank = rank
        if self._rule is None:
            is_shown = rank == 0 or record.levelno >= logging.WARNING
        else:
            is_shown = self._rule(rank)
        return is_shown and super().filter(record)


def prefix_logger_rank(
    logger: logging.Logger,
    filter: RankRuleT | None = None,
    format: str | None = None,
    show_all_ranks: bool = False,
) -> logging.Logger:
    """Prefix what `logger` and its children log with the rank; returns the logger.

    `filter` gets the rank and says whether this rank logs. Without one, rank 0 logs everything and the others only
    warnings and errors; `show_all_ranks=True` lets every rank log everything. `format` is a logging format that may use
    `%(rank)s`. The lines go to stderr and no longer to the handlers of the logger's parents, where they would appear a
    second time without the prefix. A repeated call replaces the earlier one.
    """
    if filter is not None and not callable(filter):
        raise TypeError(
            f"filter={filter!r} cannot be used: give a function that gets the rank and says whether this rank logs, such as "
            "lambda rank: rank == 0. Filters of records belong to the logger: logger.addFilter(...)."
        )
    rule = _every_rank if filter is None and show_all_ranks else filter
    for handler in [handler for handler in logger.handlers if isinstance(handler, _RankHandler)]:
        logger.removeHandler(handler)
    logger.addHandler(_RankHandler(DEFAULT_FORMAT if format is None else format, rule))
    logger.propagate = False
    return logger


def _every_rank(rank: int) -> bool:
    return True
