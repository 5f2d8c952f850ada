"""Rehearsal device: CUDA tensors and NCCL's rules in a CPU build of torch, for tests of host waits and copies."""

import contextlib
from typing import Any


def watching() -> contextlib.AbstractContextManager[Any]:
    """Record host waits ("sync"), copies ("h2d", "d2h") and hazards: `record.count(kind)`, `record.summary()`."""
    import rehearsal  # type: ignore[import-not-found]

    return rehearsal.watching()  # type: ignore[no-any-return]
