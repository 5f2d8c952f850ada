"""Logging with a rank prefix, restricted to selected ranks.

Scripts call `prefix_logger_rank` on their logger. By default rank 0 logs everything, other ranks warnings and errors.
"""

import logging
from collections.abc import Callable
from typing import TextIO

from forgather.ml.distributed.environment import get_rank

DEFAULT_FORMAT = "[rank %(rank)s] %(levelname)s:%(name)s: %(message)s"
RankRuleT = Callable[[int], bool]


class _RankHandler(logging.StreamHandler[TextIO]):
    """Handler that writes records of selected ranks to stderr, and makes `%(rank)s` available to the format."""

    def __init__(self, format: str, rule: RankRuleT | None) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(format))
        self._rule = rule

    def filter(self, record: logging.LogRecord) -> bool:
        # Read for every record, because loggers are often set up before the environment variables are.
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
    """Prefix the log lines of `logger` and its children with the rank; return the logger.

    `filter` is called with the rank and returns whether this rank logs. By default rank 0 logs everything and the other
    ranks log warnings and errors only; with `show_all_ranks=True` every rank logs everything. `format` is a logging
    format that may use `%(rank)s`. Lines go to stderr and no longer to the handlers of parent loggers, where they would
    appear again without the prefix. A repeated call replaces the earlier configuration.
    """
    if filter is not None and not callable(filter):
        raise TypeError(
            f"filter={filter!r} cannot be used. Pass a function that returns whether a rank logs, such as "
            "lambda rank: rank == 0. To filter records, call logger.addFilter(...)."
        )
    rule = _every_rank if filter is None and show_all_ranks else filter
    for handler in [handler for handler in logger.handlers if isinstance(handler, _RankHandler)]:
        logger.removeHandler(handler)
    logger.addHandler(_RankHandler(DEFAULT_FORMAT if format is None else format, rule))
    logger.propagate = False
    return logger


def _every_rank(rank: int) -> bool:
    return True
