"""ReplicatedModel: a model with one copy per rank, and what must stay the same on all copies."""

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed import ProcessGroup

from forgather.ml.trainer.ranks.mutable_buffers import ChangingBuffers
from forgather.ml.trainer.ranks.same_model import require_same_model
from forgather.ml.trainer.ranks.team import RankTeam, Team


class ReplicatedModel:
    """Synchronises buffers that training changes, such as the running means of batch norms.

    `group` are the ranks with copies of the same part of the model; None for all ranks.
    """

    def __init__(self, model: nn.Module, team: Team, group: ProcessGroup | None = None) -> None:
        self._model = model
        self._team = team
        self._buffers = ChangingBuffers(model, team.peers, group) if isinstance(team, RankTeam) else None

    def require_same(self) -> None:
        """Raise the same error on all ranks if their models differ in names, shapes or dtypes; collective."""
        if isinstance(self._team, RankTeam):
            require_same_model(self._model, self._team.peers)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Context of a forward pass in training; the first one shows which buffers it changes."""
        if self._buffers is None or self._buffers.are_known:
            yield
            return
        with self._buffers.found_out():
            yield

    def share_buffers(self) -> None:
        """Give all copies the changing buffers of the first; collective."""
        if self._buffers is not None:
            self._buffers.share()
