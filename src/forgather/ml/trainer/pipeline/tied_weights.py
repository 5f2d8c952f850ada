"""Tied weights: one tensor of the full model, such as embedding and head, with copies on several pipeline ranks.

Copies stay equal because each gets the all-reduced gradient. They count once in the gradient norm, and are compared
before each save. Used by `PipelineTrainer`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forgather.ml.checkpoint.encoding.digest import tensor_digest
from forgather.ml.checkpoint.errors import ReplicationError
from forgather.ml.checkpoint.sharding.sharded_tensors import is_sharded, local_part, shards_of
from forgather.ml.checkpoint.weights.safetensors_io import SharingMetadataT
from forgather.ml.distributed.groups import new_disjoint_groups

Gather = Callable[[Any], list[Any]]


class TiedWeight(NamedTuple):
    """Copy of a tied weight on this rank: its first FQN in the full model, and the group of ranks with copies."""

    name: str
    parameter: nn.Parameter
    group: ProcessGroup
    counts_here: bool
    """Whether sums over all ranks, such as the gradient norm, use this copy."""

    @property
    def content(self) -> tuple[str, int]:
        """Name and first element of the rows that this rank holds; copies with the same content are equal."""
        return self.name, shards_of(self.parameter).start if is_sharded(self.parameter) else 0


def canonical_names(sharing: SharingMetadataT) -> dict[str, str]:
    """Return the first name of each tensor with several names, by each of its names."""
    return {name: group[0] for group in sharing for name in group}


def tied_weights(
    sharing: SharingMetadataT,
    names_of_ranks: Sequence[Sequence[str]],
    own: Mapping[str, nn.Parameter],
    pipelines: Sequence[Sequence[int]],
) -> list[TiedWeight]:
    """Return this rank's weights that have copies on other ranks; collective over all ranks of the job.

    `names_of_ranks` lists the FQNs at each position of a pipeline, `pipelines` the global ranks of each pipeline.
    """
    found = []
    groups: dict[tuple[int, ...], ProcessGroup | None] = {}
    # Only names matter here, so that every rank finds the same groups without communication.
    for names, places in zip(sharing, _places_of(sharing, names_of_ranks), strict=True):
        if len(places) < 2:
            continue
        # Weights with copies on the same ranks share a group. Groups of different pipelines are created together.
        if places not in groups:
            groups[places] = new_disjoint_groups([[ranks[place] for place in places] for ranks in pipelines])
        group = groups[places]
        parameter = next((own[name] for name in names if name in own), None)
        if group is not None and parameter is not None:
            found.append(TiedWeight(names[0], parameter, group, dist.get_rank(group) == 0))
    return found


def _places_of(sharing: SharingMetadataT, names_of_ranks: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """Return for each group of tied names the positions of a pipeline that hold one of them, in ascending order."""
    number_of = {name: number for number, names in enumerate(sharing) for name in names}
    places: list[dict[int, None]] = [{} for _ in sharing]
    for place, held in enumerate(names_of_ranks):
        for name in held:
            if name in number_of:
                places[number_of[name]][place] = None
    return [tuple(found) for found in places]


class TiedWeights:
    """Copies of tied weights on this rank: gradient sums, gradient norm and comparison."""

    def __init__(self, weights: Sequence[TiedWeight], gather: Gather) -> None:
        """Store the copies of this rank; collective, because `gather` collects a value from every rank."""
        self._weights = weights
        self._gather = gather
        self.are_anywhere = any(gather(bool(weights)))
        """Whether any rank has copies of a tied weight. Ranks without copies take part in `compare` too."""

    def counted(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return `parameters` without copies that another rank counts, for sums over all ranks."""
        copies = {id(weight.parameter) for weight in self._weights if not weight.counts_here}
        return [one for one in parameters if id(one) not in copies]

    def add_gradients(self) -> None:
        """Give every copy the all-reduced gradient of all copies, so that they stay equal."""
        works = []
        for weight in self._weights:
            if weight.parameter.requires_grad:
                # A copy without a gradient takes part as well: the other ranks wait for it.
                if weight.parameter.grad is None:
                    weight.parameter.grad = torch.zeros_like(weight.parameter)
                # Ranks of one pipeline hold the same rows of a sharded weight.
                gradient = local_part(weight.parameter.grad)
                works.append(dist.all_reduce(gradient, group=weight.group, async_op=True))
        for work in works:
            assert work is not None
            work.wait()

    def compare(self) -> None:
        """Raise ReplicationError on every rank if the copies of a weight differ; collective."""
        if not self.are_anywhere:
            return
        told = self._gather(
            {weight.content: tensor_digest(local_part(weight.parameter.detach())) for weight in self._weights}
        )
        for content in sorted({content for own in told for content in own}):
            name, ranks = content[0], dict[str, list[int]]()
            for rank, own in enumerate(told):
                if content in own:
                    ranks.setdefault(own[content], []).append(rank)
            if len(ranks) > 1:
                raise ReplicationError(
                    f"Replication validation failed for component 'model': the copies of the tied weight {name!r} differ "
                    f"between the ranks {' and '.join(map(str, ranks.values()))}."
                )


def norm_of_group(own: Tensor, norm_type: float, group: ProcessGroup) -> Tensor:
    """Return the norm over all ranks of a group, from the norm of each rank."""
    # Gathered and combined in rank order: pipelines that are copies of each other must compute identical bits.
    norms = own.new_empty(group.size(), dtype=torch.float32)
    dist.all_gather_into_tensor(norms, own.float().reshape(1), group=group)
    norm: Tensor = torch.linalg.vector_norm(norms, norm_type)
    return norm
