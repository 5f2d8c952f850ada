"""Process-wide set-up: log levels of libraries, log format, printable errors, OpenMP wait policy, import path.

The commands call these functions before torch and transformers are imported; `show_own_messages` comes later.
"""

import logging
import os
import sys
import traceback
import warnings
from types import TracebackType

from forgather._allocator import NVIDIA_DRIVER, request_expandable_segments
from forgather._terminal_text import printable
from forgather.config.class_paths import SAFE_BY_DEFAULT, SAFE_PATH, allow_modules_in

_OF_STOP_REQUESTS = ("forgather.ml.trainer.loop.signals", "forgather.ml.trainer.loop.interruptions")


def silence_libraries() -> None:
    """Silence advisory messages of torch, torchao and transformers; call before they are imported."""
    # Values that the user has set in the environment win.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Tokenizers are not used after workers are forked, but they warn about the fork without this variable.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("torchao", "torch.utils._pytree", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)


def share_processors() -> None:
    """Make OpenMP threads sleep while they wait (OMP_WAIT_POLICY=PASSIVE); call before torch is imported.

    By default they spin. On a machine with other work, spinning makes a small model up to eight times slower. On an
    idle machine spinning is a few percent faster; OMP_WAIT_POLICY=ACTIVE restores it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def reduce_fragmentation() -> None:
    """Request expandable segments of the CUDA allocator where an NVIDIA driver runs; call before torch is imported."""
    if os.path.exists(NVIDIA_DRIVER):
        request_expandable_segments(os.environ)


def import_libraries_safely() -> None:
    """Keep processes that libraries start, such as those of torch.compile, from importing the current directory."""
    if not os.environ.get(SAFE_PATH):
        # Workers inherit the variable, and recognise by its value that the user has not chosen -P.
        os.environ[SAFE_PATH] = "1" if sys.flags.safe_path else SAFE_BY_DEFAULT


def make_current_directory_importable() -> None:
    """Let a `class_path` name modules in the current directory that no installed library has.

    Python's option -P, and its variable PYTHONSAFEPATH, disable this.
    """
    import_libraries_safely()
    if os.environ[SAFE_PATH] == SAFE_BY_DEFAULT:
        allow_modules_in(os.getcwd())


class _Formatter(logging.Formatter):
    """Formatter that shows the level of warnings and errors only, and the rank unless it is 0.

    Control characters become visible, because messages quote files and other ranks.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = printable(super().format(record))
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        return text if _rank() == 0 else f"rank {_rank()}: {text}"


_format_warning = warnings.formatwarning


def make_errors_printable() -> None:
    """Show control characters of warnings, tracebacks and early log messages instead of sending them to the terminal."""
    warnings.formatwarning = lambda *message: printable(_format_warning(*message))
    sys.excepthook = _print_traceback
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Formatter("%(message)s"))


def _print_traceback(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
    sys.stderr.write(printable("".join(traceback.format_exception(error))))


def show_own_messages() -> None:
    """Log all warnings, and Forgather's info messages on rank 0, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(message)s"))
    if _rank() != 0:
        # Info messages, and warnings about stop requests, are the same on all ranks.
        handler.addFilter(_is_told_here)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("forgather").setLevel(logging.INFO)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _is_told_here(record: logging.LogRecord) -> bool:
    """Return whether a rank other than 0 logs a record: warnings, but those of stop requests once per node."""
    is_first_of_node = os.environ.get("LOCAL_RANK") == "0"
    return record.levelno >= logging.WARNING and (is_first_of_node or record.name not in _OF_STOP_REQUESTS)
