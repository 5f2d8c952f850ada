"""Synchronisation of mutable buffers, such as the running means of batch norms, between replicas of a model.

Only buffers that a forward pass changes are broadcast, and all ranks broadcast the same names in the same order.
`ReplicatedModel` calls this module.
"""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from forgather.ml.distributed import Peers


class ChangingBuffers:
    """Buffers that the first forward pass changes; `share` broadcasts them from the first replica.

    Other buffers are not overwritten, so that differences between replicas can be detected. `group` holds the ranks with
    replicas of the same pipeline stages, None for all ranks. `peers` are all ranks; all of them call each method.
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
        """Find the changing buffers; the body of this context is the first forward pass. Collective."""
        before = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        yield
        own = [
            name for name, buffer in self._model.named_buffers() if name not in before or not buffer.equal(before[name])
        ]
        self.adopt(own)

    def adopt(self, own: list[str]) -> None:
        """Use the buffers that the first step has changed on any rank; collective."""
        # Union over all ranks, sorted: other stages have other buffers, and broadcasts need the same order everywhere.
        self._names = sorted({name for names in self._peers.gather(own) for name in names})

    def limit_broadcasts(self, wrapped: nn.Module) -> None:
        """Make DDP broadcast only the changing buffers before a forward pass; other modules are left as they are."""
        if not isinstance(wrapped, DistributedDataParallel) or self._names is None:
            return
        changing = {id(buffer) for name, buffer in self._model.named_buffers() if name in self._names}
        # DDP collects its buffers again before each broadcast, without the names in this set.
        wrapped.parameters_to_ignore |= {
            name for name, buffer in wrapped.module.named_buffers() if id(buffer) not in changing
        }
        wrapped.modules_buffers = [buffer for buffer in wrapped.modules_buffers if id(buffer) in changing]

    def share(self) -> None:
        """Broadcast the changing buffers from the first rank of the group; none before the first forward pass."""
        buffers = dict(self._model.named_buffers())
        # Each pipeline stage has its own subset of the names. All ranks of `group` hold the same stages, so they skip
        # the same names and take part in the same broadcasts.
        for name in filter(buffers.__contains__, self._names or ()):
            dist.broadcast(buffers[name], group=self._group, group_src=0)
