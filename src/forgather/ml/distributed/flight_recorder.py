"""NCCL flight recorder: the last collectives of each rank, written to the output directory after a failure.

Torch keeps them in a ring buffer. Its watchdog writes them when a collective times out, and trainers after an error.
`torchfrtrace --prefix nccl_trace_rank_ <output_dir>` compares the files of all ranks. Used with NCCL only.
"""

import logging
import os
from collections.abc import Callable, MutableMapping

import torch.distributed as dist
from torch._C import _distributed_c10d

from forgather._run_files import open_in_run

logger = logging.getLogger(__name__)

FILE_PREFIX = "nccl_trace_rank_"
_NUM_ENTRIES = "2000"
_SIZE_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"

# The prefix that `direct_traces` has set, to distinguish it from a value that the user has set.
_own_prefix: str | None = None


def enable(backend: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Turn the recorder on for process groups that are created afterwards, if the backend is NCCL.

    Variables that the user has set are not changed. A buffer size of 0 turns the recorder off.
    """
    if "nccl" not in backend:
        return
    if not any(name in environ for name in _SIZE_NAMES):
        environ[_SIZE_NAMES[0]] = _NUM_ENTRIES
    environ.setdefault(_DUMP_ON_TIMEOUT, "1")


def direct_traces(output_dir: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Make torch's watchdog write its traces into the output directory, unless the user has chosen a file prefix."""
    global _own_prefix
    if not uses_nccl() or _prefix_of_user(environ) is not None:
        return
    # Torch does not create the directory. It reads the variable when it writes its first trace.
    os.makedirs(output_dir, exist_ok=True)
    _own_prefix = environ[_FILE_NAMES[0]] = os.path.join(os.path.abspath(output_dir), FILE_PREFIX)


def write_trace(output_dir: str, rank: int) -> str | None:
    """Write the collectives that this rank has recorded with NCCL; return the path, or None without a recorder."""
    # Builds of torch without NCCL do not have the function.
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    if dump is None or not uses_nccl():
        return None
    return write_dump(dump, _prefix_of_user(os.environ) or os.path.join(output_dir, FILE_PREFIX), rank)


def write_dump(dump: Callable[[], bytes], prefix: str, rank: int) -> str | None:
    """Write the result of `dump` to the file of this rank; return its path, or None if the write fails."""
    path = f"{prefix}{rank}"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open_in_run(*os.path.split(path), "wb") as file:
            file.write(dump())
    except (OSError, RuntimeError) as error:
        # The run has already failed, and its error matters more than this one.
        logger.warning("The NCCL trace %s could not be written: %s", path, error)
        return None
    logger.warning("The last NCCL collectives of this rank are in %s", path)
    return path


def uses_nccl() -> bool:
    """Return whether the default process group has NCCL as one of its backends."""
    return dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend_config()


def _prefix_of_user(environ: MutableMapping[str, str]) -> str | None:
    chosen = next((environ[name] for name in _FILE_NAMES if name in environ), None)
    return None if chosen == _own_prefix else chosen
