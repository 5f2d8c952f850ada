"""ShardedStates: the sharded tensors in the components of one save, and the exchange that brings them to their writers.

A state with sharded tensors is divided by name between the ranks of its shard group, unless one rank writes all of it
(REPLICATED). Snapshots create it, one per save.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.encoding.archive_writer import can_be_late
from forgather.ml.checkpoint.encoding.digest import leaves_by_path
from forgather.ml.checkpoint.errors import CheckpointSaveError
from forgather.ml.checkpoint.files.planned_file import PlannedFile
from forgather.ml.checkpoint.rank_layout import Ranks, ranks_text
from forgather.ml.checkpoint.sharding.exchange import ShardExchange, StreamItem
from forgather.ml.checkpoint.sharding.partition import parts_by_size
from forgather.ml.checkpoint.sharding.sharded_tensors import Shards, is_sharded, shards_of
from forgather.ml.checkpoint.weights.index import tensor_identity
from forgather.ml.distributed import Peers

_DIVIDED = (SharingPattern.PER_RANK, SharingPattern.PER_GROUP)
_WITH_ONE_HOLDER = (SharingPattern.GLOBAL, SharingPattern.PER_NODE)


@dataclass
class ShardedStates:
    """Sharded tensors of this rank, by component and path."""

    tensors: dict[str, Any] = field(default_factory=dict)
    shards: dict[str, Shards] = field(default_factory=dict)

    @property
    def ranks(self) -> Ranks | None:
        """Shard group of this rank; None without sharded tensors."""
        return next((shards.ranks for shards in self.shards.values()), None)

    def own_part(self, component: StateComponent, state: Any, is_weights: bool) -> Any:
        """Record the sharded tensors of a component's state, and return the part of the state that this rank writes."""
        found = self._record(component, state)
        if found and component.sharing_pattern in _WITH_ONE_HOLDER:
            # The other ranks are not asked for this state, so their slices would never arrive.
            raise CheckpointSaveError(
                f"Component {component.key!r} is {component.sharing_pattern.name}, so one rank supplies its state, but that "
                f"has sharded tensors (DTensor) such as {found[0].partition(':')[2]}: other ranks hold the rest of them. "
                "Declare it REPLICATED, so that all ranks take part and one rank writes the full tensors."
            )
        if not found or component.sharing_pattern not in _DIVIDED:
            return state
        shards = self.shards[next(iter(found))]
        if is_weights:
            return _own_weights(state, shards)
        divide = getattr(component.stateful, "part_of_state", None)
        if divide is None:
            raise CheckpointSaveError(
                f"Component {component.key!r} is {component.sharing_pattern.name}, and its state has sharded tensors (DTensor) "
                f"such as {next(iter(found)).partition(':')[2]}: ranks would write different slices under one name. Declare it "
                "REPLICATED, so that one rank writes the full tensors, or implement part_of_state(state, number, count)."
            )
        return divide(state, shards.position, len(shards.ranks))

    def _record(self, component: StateComponent, state: Any) -> list[str]:
        found = []
        for path, leaf in leaves_by_path(state).items():
            if is_sharded(leaf):
                key, what = f"{component.key}:{path}", f"Component {component.key!r}: {path}"
                self.tensors[key], self.shards[key] = leaf, shards_of(leaf, what)
                _require_streamable(leaf, what)
                found.append(key)
        if len({shards.ranks for shards in self.shards.values()}) > 1:
            groups = sorted({ranks_text(shards.ranks) for shards in self.shards.values()})
            raise CheckpointSaveError(
                f"The sharded tensors of this rank are divided over different groups of ranks: {'; '.join(groups)}. A "
                "checkpoint supports one group per rank. Use one mesh axis for all calls of fully_shard."
            )
        return found

    def exchange(self, files: Sequence[PlannedFile], peers: Peers) -> ShardExchange | None:
        """Return the exchange for the planned files; None on ranks without sharded tensors. Collective."""
        keys = {id(tensor): key for key, tensor in self.tensors.items()}
        stream = [
            StreamItem(keys[id(tensor)], tensor.numel() * tensor.element_size())
            for file in files
            for tensor in file.content.sharded_tensors()
        ]
        streams = dict(enumerate(peers.gather(stream, "planning the exchange of sharded tensors")))
        ranks = self.ranks
        return None if ranks is None else ShardExchange(self.tensors, self.shards, streams, ranks)

    def note(self, key: str) -> dict[str, object]:
        """Return the manifest entry about the sharding of a component; empty if it has no sharded tensors."""
        shards = next((one for name, one in self.shards.items() if name.startswith(f"{key}:")), None)
        return {} if shards is None else {"sharding": {"num_shards": len(shards.ranks), "placement": "Shard(0)"}}


def _own_weights(weights: Mapping[str, Tensor], shards: Shards) -> dict[str, Tensor]:
    """Return the weights that this rank writes in full; tied names stay together."""
    first: dict[object, str] = {}
    stored = {name: first.setdefault(tensor_identity(tensor), name) for name, tensor in weights.items()}
    sizes = {name: weights[name].numel() * weights[name].element_size() for name in first.values()}
    parts = parts_by_size(sizes, len(shards.ranks))
    return {name: tensor for name, tensor in weights.items() if parts[stored[name]] == shards.position}


def _require_streamable(leaf: Tensor, what: str) -> None:
    if not can_be_late(leaf):
        raise CheckpointSaveError(
            f"{what} is sharded and has dtype {leaf.dtype}, which cannot be streamed into a checkpoint. Keep it unsharded."
        )
