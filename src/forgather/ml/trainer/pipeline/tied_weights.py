"""Weights that are one tensor in the whole model and have copies on several ranks of a pipeline."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forgather.ml.checkpoint.encoding.digest import tensor_digest
from forgather.ml.checkpoint.errors import ReplicationError
from forgather.ml.checkpoint.weights.safetensors_io import SharingMetadataT
from forgather.ml.distributed.environment import get_requested_timeout
from forgather.ml.trainer.loop.gradients import GradientNorm

Gather = Callable[[Any], list[Any]]


class TiedWeight(NamedTuple):
    """A copy on this rank, under the name that the whole model knows it by, and the ranks that have one."""

    name: str
    parameter: nn.Parameter
    group: ProcessGroup
    counts_here: bool
    """Whether this copy is the one that a sum over all ranks takes."""


def canonical_names(sharing: SharingMetadataT) -> dict[str, str]:
    """The first name of each tensor that has several, by each of them."""
    return {name: group[0] for group in sharing for name in group}


def tied_weights(
    sharing: SharingMetadataT,
    names_of_ranks: Sequence[Sequence[str]],
    own: Mapping[str, nn.Parameter],
    pipelines: Sequence[Sequence[int]],
) -> list[TiedWeight]:
    """The weights of this rank of which others have copies; collective over all ranks of the job.

    `names_of_ranks` are the names that each place of a pipeline holds, `pipelines` the global ranks of each.
    """
    found = []
    for names in sharing:
        places = [place for place, held in enumerate(names_of_ranks) if set(names) & set(held)]
        if len(places) < 2:
            continue
        for ranks in pipelines:
            members = [ranks[place] for place in places]
            # Every rank takes part in making every group, its own or not: torch requires it.
            group = dist.new_group(members, timeout=get_requested_timeout())
            parameter = next((own[name] for name in names if name in own), None)
            if dist.get_rank() in members and parameter is not None:
                assert isinstance(group, ProcessGroup)
                found.append(TiedWeight(names[0], parameter, group, dist.get_rank() == members[0]))
    return found


class TiedWeights:
    """The copies of this rank, and what keeps all copies of a weight the same."""

    def __init__(self, weights: Sequence[TiedWeight], gather: Gather) -> None:
        """Collective: `gather` brings a value of every rank to all ranks."""
        self._weights = weights
        self._gather = gather
        self.are_anywhere = any(gather(bool(weights)))
        """Whether any rank has such copies."""

    def norm(self, parameters: Sequence[Tensor]) -> GradientNorm:
        """The gradient norm of parameters, without those that a sum over all ranks takes from another rank."""
        copies = {id(weight.parameter) for weight in self._weights if not weight.counts_here}
        return GradientNorm([one for one in parameters if id(one) not in copies])

    def add_gradients(self) -> None:
        """Give every copy the sum of the gradients of all copies, so that they stay one."""
        works = []
        for weight in self._weights:
            if weight.parameter.requires_grad:
                if weight.parameter.grad is None:
                    weight.parameter.grad = torch.zeros_like(weight.parameter)
                works.append(dist.all_reduce(weight.parameter.grad, group=weight.group, async_op=True))
        for work in works:
            assert work is not None
            work.wait()

    def compare(self) -> None:
        """Raise on every rank when the copies of a weight are no longer the same; collective."""
        if not self.are_anywhere:
            return
        told = self._gather({weight.name: tensor_digest(weight.parameter.detach()) for weight in self._weights})
        for name in sorted({name for own in told for name in own}):
            ranks: dict[str, list[int]] = {}
            for rank, own in enumerate(told):
                if name in own:
                    ranks.setdefault(own[name], []).append(rank)
            if len(ranks) > 1:
                raise ReplicationError(
                    f"Replication validation failed for component 'model': the copies of the tied weight {name!r} differ "
                    f"between the ranks {' and '.join(map(str, ranks.values()))}."
                )


def norm_of_group(own: Tensor, norm_type: float, group: ProcessGroup) -> Tensor:
    """The norm over all ranks of a group, from the norm of what each of them has."""
    # Gathered and added here, in the order of ranks: pipelines that are copies of each other must find the same bits.
    norms = own.new_empty(group.size(), dtype=torch.float32)
    dist.all_gather_into_tensor(norms, own.float().reshape(1), group=group)
    norm: Tensor = torch.linalg.vector_norm(norms, norm_type)
    return norm
