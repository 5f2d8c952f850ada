"""Expandable segments of torch's CUDA allocator: requested by an environment variable, before torch is imported.

They reduce fragmentation when batch sizes vary. Settings of the user take precedence. This module imports no torch,
because torch reads the variable when it is imported.
"""

import sys
from collections.abc import MutableMapping

EXPANDABLE = "expandable_segments:True"
NVIDIA_DRIVER = "/dev/nvidiactl"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def request_expandable_segments(environ: MutableMapping[str, str], platform: str = sys.platform) -> bool:
    """Set PYTORCH_ALLOC_CONF, unless the user configures the allocator; return whether it was set."""
    # CUDA supports expandable segments on Linux only, and torch would warn elsewhere.
    if platform != "linux" or any(name in environ for name in _VARIABLES):
        return False
    environ[_VARIABLES[0]] = EXPANDABLE
    return True
