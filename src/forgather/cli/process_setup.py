"""Process-wide set-up: log levels of libraries, our log format, OpenMP wait policy."""

import logging
import os
import sys

_OF_STOP_REQUESTS = ("forgather.ml.trainer.loop.signals", "forgather.ml.trainer.trainer")


def silence_libraries() -> None:
    """Before torch and transformers are imported: their notes on optional parts that are not installed stay away."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Tokenizers are not used after workers are forked; without this they warn that they might be.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("torchao", "torch.utils._pytree", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)


def share_processors() -> None:
    """Before torch is imported: its threads sleep while they wait for each other.

    By default they spin, which on a machine that has other work to do makes a small model up to eight times slower;
    on one that has none, spinning wins some percent, and OMP_WAIT_POLICY=ACTIVE brings it back.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def make_current_directory_importable() -> None:
    """Let `class_path` find modules of the current directory, as `python -m` does, however the program was started.

    An installed script, and torchrun with its path, have the script's folder in its place. Python's -P keeps it out.
    """
    folder = os.getcwd()
    if not sys.flags.safe_path and not {"", folder} & set(sys.path):
        sys.path.insert(0, folder)


class _Formatter(logging.Formatter):
    """Plain sentences; the level and the rank only where they matter."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        return text if _rank() == 0 else f"rank {_rank()}: {text}"


def show_own_messages() -> None:
    """Warnings of everybody and news of forgather go to the error stream, above progress bars if there are any.

    Ranks other than 0 have no news of their own.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(message)s"))
    if _rank() != 0:
        handler.addFilter(_is_of_this_rank_alone)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("forgather").setLevel(logging.INFO)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _is_of_this_rank_alone(record: logging.LogRecord) -> bool:
    """Warnings, without those of a request to stop, which comes to all ranks and is told by rank 0."""
    return record.levelno >= logging.WARNING and record.name not in _OF_STOP_REQUESTS
