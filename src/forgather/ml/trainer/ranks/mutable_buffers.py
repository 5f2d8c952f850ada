"""Buffers that training changes, such as the running means of batch norms, where ranks have copies of a model."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from forgather.ml.distributed import Peers


class ChangingBuffers:
    """Finds these buffers in the first forward pass, and gives all copies those of the first.

    Other buffers are left alone: if they differ between copies, that is to be found out. `group` are the ranks with
    copies of the same part, None for all; `peers` are all ranks, which call each method together.
    """

    def __init__(self, model: nn.Module, peers: Peers, group: ProcessGroup | None = None) -> None:
        self._model = model
        self._peers = peers
        self._group = group
        self._names: list[str] | None = None

    @property
    def are_known(self) -> bool:
        return self._names is not None

    @contextlib.contextmanager
    def found_out(self) -> Iterator[None]:
        """The body is the first forward pass."""
        before = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        yield
        own = [
            name for name, buffer in self._model.named_buffers() if name not in before or not buffer.equal(before[name])
        ]
        self._names = sorted({name for names in self._peers.gather(own) for name in names})

    def share(self) -> None:
        """Give all ranks those of the first; none before the first forward pass."""
        buffers = dict(self._model.named_buffers())
        # A rank that has another part of the model knows other names, as do all that have copies of that part.
        for name in filter(buffers.__contains__, self._names or ()):
            dist.broadcast(buffers[name], group=self._group, group_src=0)
