"""ReplicatedModel: checks and buffer synchronisation for a model with one replica per rank.

Replicas must have the same parameters and the same mutable buffers. The DDP, Accelerate and hybrid trainers call it.
"""

import contextlib
from collections.abc import Callable, Iterator

from torch import nn
from torch.distributed import ProcessGroup

from forgather.ml.trainer.ranks.mutable_buffers import ChangingBuffers
from forgather.ml.trainer.ranks.same_model import require_same_model
from forgather.ml.trainer.ranks.team import RankTeam, Team


class ReplicatedModel:
    """Replica of a model: compares replicas, and synchronises buffers that training changes (batch norm means).

    `group` holds the ranks with replicas of the same pipeline stages; None for all ranks. In a single process all
    methods do nothing.
    """

    def __init__(self, model: nn.Module, team: Team, group: ProcessGroup | None = None) -> None:
        self._model = model
        self._team = team
        self._buffers = ChangingBuffers(model, team.peers, group) if isinstance(team, RankTeam) else None

    def require_same(self) -> None:
        """Raise the same ValueError on all ranks if their models differ in names, shapes or dtypes; collective."""
        if isinstance(self._team, RankTeam):
            require_same_model(self._model, self._team.peers)

    @contextlib.contextmanager
    def forward(self, wrapped: nn.Module | None = None) -> Iterator[None]:
        """Wrap a forward pass of training; the first pass finds the buffers that it changes.

        If `wrapped` is the DDP module of this model, it broadcasts only these buffers from then on.
        """
        if self._buffers is None or self._buffers.are_known:
            yield
            return
        with self._buffers.found_out():
            yield
        if wrapped is not None:
            self._buffers.limit_broadcasts(wrapped)

    def note_changes(self, changed: Callable[[], list[str]]) -> None:
        """Find the changing buffers after the first step instead of in its first forward pass; collective."""
        if self._buffers is not None and not self._buffers.are_known:
            self._buffers.adopt(changed())

    def share_buffers(self) -> None:
        """Broadcast the changing buffers of the first replica to all replicas; collective."""
        if self._buffers is not None:
            self._buffers.share()
