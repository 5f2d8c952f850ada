"""malloc thresholds of glibc for training on the CPU (`tune_malloc`): freed memory stays in the process.

By default glibc returns the memory of freed activations to the system in every step, and the next step takes it again:
a page fault per 4 KiB. The setting is process-wide and cannot be read back, so it outlives the run. `prepare_device`
calls this before the model is built.
"""

import ctypes
import logging
import os
from collections.abc import Mapping

import torch

logger = logging.getLogger(__name__)

# From <malloc.h>.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
# Larger blocks are mapped one by one. glibc refuses a threshold above 32 MiB.
_MMAP_BYTES = 32 * 2**20
# Free memory at the end of the heap that the process keeps: activations of a step, freed in its backward pass.
_TRIM_BYTES = 2**30
_PAD_BYTES = 16 * 2**20
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def tune_malloc(device: torch.device, environ: Mapping[str, str] = os.environ) -> bool:
    """Raise the malloc thresholds for training on the CPU; return whether they were set."""
    reason = _reason_against(device, environ)
    if reason is not None:
        logger.debug("tune_malloc has no effect: %s.", reason)
        return False
    libc = ctypes.CDLL(None)
    values = {_MMAP_THRESHOLD: _MMAP_BYTES, _TRIM_THRESHOLD: _TRIM_BYTES, _TOP_PAD: _PAD_BYTES}
    # mallopt returns 1 if it accepts a value.
    refused = [parameter for parameter, value in values.items() if libc.mallopt(parameter, value) != 1]
    if refused:
        logger.debug("tune_malloc has only a partial effect: mallopt refused the parameters %s.", refused)
    else:
        logger.debug("malloc keeps up to %d MiB of freed memory for the next step.", _TRIM_BYTES // 2**20)
    return not refused


def _reason_against(device: torch.device, environ: Mapping[str, str]) -> str | None:
    """Return why the thresholds stay as they are, or None to set them."""
    if device.type != "cpu":
        return f"training runs on {device.type}"
    if not is_glibc():
        return "the C library is not glibc"
    chosen = [name for name in _VARIABLES if name in environ]
    if "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        chosen.append("GLIBC_TUNABLES")
    return f"{', '.join(chosen)} configures malloc already" if chosen else None


def is_glibc() -> bool:
    """Return whether the C library of this process is glibc."""
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        # macOS and musl do not know the name.
        return False
    return version is not None and hasattr(ctypes.CDLL(None), "mallopt")
