"""NCCL of the rehearsal device, as `torch.distributed` expects it in its C++ module."""

import importlib
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from tests.support.rehearsal.activation import native

DEFAULT_TIMEOUT = timedelta(minutes=10)


class Options:
    """Options of a process group; data travels by gloo, so only the time limit and the ranks have an effect."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = DEFAULT_TIMEOUT
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.group_desc = ""
        self.split_from: Any = None
        self.split_color = 0
        self.config = SimpleNamespace()


def install() -> None:
    """Add the process group to torch's C++ module, before `torch.distributed` looks for it."""
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    native().bind_process_group()
    group: Any = native().ProcessGroupNCCL
    group.Options = Options
    c10d.ProcessGroupNCCL = group
    c10d._DEFAULT_PG_NCCL_TIMEOUT = DEFAULT_TIMEOUT
