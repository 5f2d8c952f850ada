"""Log lines that say which rank they come from."""

import logging
from collections.abc import Callable

from forgather.ml.distributed.environment import get_rank

DEFAULT_FORMAT = "[rank %(rank)s] %(levelname)s:%(name)s: %(message)s"


class _RankHandler(logging.StreamHandler):
    """Writes to stderr what passes the rank rule, and makes `%(rank)s` available to the format."""

    def __init__(self, format: str, show_all_ranks: bool) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(format))
        self._show_all_ranks = show_all_ranks

    def filter(self, record: logging.LogRecord) -> bool:
        # Asked for with every record: loggers are often set up before the environment gives the rank.
        rank = get_rank()
        record.rank = rank
        if rank != 0 and not self._show_all_ranks and record.levelno < logging.WARNING:
            return False
        return super().filter(record)


def prefix_logger_rank(
    logger: logging.Logger,
    filter: Callable[[logging.LogRecord], bool] | logging.Filter | None = None,
    format: str | None = None,
    show_all_ranks: bool = False,
) -> None:
    """Prefix what `logger` and its children log with the rank, and keep the ranks from repeating each other.

    Rank 0 logs everything, the others only warnings and errors, unless `show_all_ranks`. Records must also pass
    `filter`; `format` is a logging format that may use `%(rank)s`. The lines go to stderr and no longer to the handlers
    of the logger's parents, where they would appear a second time without the prefix. A repeated call replaces the
    earlier one.
    """
    for handler in [handler for handler in logger.handlers if isinstance(handler, _RankHandler)]:
        logger.removeHandler(handler)
    handler = _RankHandler(DEFAULT_FORMAT if format is None else format, show_all_ranks)
    if filter is not None:
        handler.addFilter(filter)
    logger.addHandler(handler)
    logger.propagate = False
