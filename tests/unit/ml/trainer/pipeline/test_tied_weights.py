"""Process groups between copies of tied weights: few, shared, and with the timeout of the job."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from forgather.ml.distributed import environment
from forgather.ml.distributed.groups import new_disjoint_groups
from forgather.ml.trainer.pipeline.tied_weights import TiedWeights, tied_weights
from tests.support.ranks import run_on_ranks

# Positions of a pipeline of four ranks: two weights are tied between first and last, one between the middle ones.
SHARING = [["embedding", "head"], ["bias", "head_bias"], ["middle", "next"], ["one", "place"]]
NAMES_OF_RANKS = [["embedding", "bias"], ["middle"], ["next", "one", "place"], ["head", "head_bias"]]


def ties_of_a_pipeline() -> tuple[list[tuple[str, list[int], bool, float]], int, int]:
    rank = dist.get_rank()
    own = {name: nn.Parameter(torch.zeros(1)) for name in NAMES_OF_RANKS[rank]}
    weights = tied_weights(SHARING, NAMES_OF_RANKS, own, [range(4)])
    gathered: list[object] = [None] * 4

    def gather(value: object) -> list[object]:
        dist.all_gather_object(gathered, value)
        return gathered

    for weight in weights:
        weight.parameter.grad = torch.tensor([10.0**rank])
    TiedWeights(weights, gather).add_gradients()
    found = []
    for weight in weights:
        assert weight.parameter.grad is not None
        ranks = dist.get_process_group_ranks(weight.group)
        found.append((weight.name, ranks, weight.counts_here, weight.parameter.grad.item()))
    return found, len({id(weight.group) for weight in weights}), len(weights)


def groups_of_two_pipelines() -> tuple[list[int] | None, float | None]:
    environment._requested_timeout = timedelta(seconds=7)
    try:
        group = new_disjoint_groups([[0, 2], [1]])
    finally:
        environment._requested_timeout = None
    if group is None:
        return None, None
    options = group._get_backend(torch.device("cpu")).options
    return dist.get_process_group_ranks(group), options._timeout.total_seconds()


def groups_of_a_thousand_ranks() -> tuple[int, list[int]]:
    """Ties of 128 pipelines of eight ranks, as the first of 1,024 ranks; the fake group sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    pipelines = [range(first, first + 8) for first in range(0, 1024, 8)]
    names_of_ranks = [["embedding", "bias"], *([] for _ in range(6)), ["head", "head_bias"]]
    own = {name: nn.Parameter(torch.zeros(1)) for name in names_of_ranks[0]}
    before = dist.distributed_c10d._world.group_count
    weights = tied_weights(SHARING[:2], names_of_ranks, own, pipelines)
    num_groups = dist.distributed_c10d._world.group_count - before
    return num_groups, dist.get_process_group_ranks(weights[1].group)


def test_weights_with_copies_on_the_same_ranks_share_a_group() -> None:
    first, second, third, last = run_on_ranks(ties_of_a_pipeline, 4)
    outer, middle = [0, 3], [1, 2]
    assert first == ([("embedding", outer, True, 1001.0), ("bias", outer, True, 1001.0)], 1, 2)
    assert second == ([("middle", middle, True, 110.0)], 1, 1)
    assert third == ([("middle", middle, False, 110.0)], 1, 1)
    assert last == ([("embedding", outer, False, 1001.0), ("bias", outer, False, 1001.0)], 1, 2)


def test_groups_get_the_timeout_of_the_job() -> None:
    together, alone, others, outside = run_on_ranks(groups_of_two_pipelines, 4)
    assert together == others == ([0, 2], 7.0)
    assert alone == ([1], 7.0)
    assert outside == (None, None)


def test_a_pipeline_needs_one_group_for_all_its_tied_weights() -> None:
    assert run_on_ranks(groups_of_a_thousand_ranks, 1) == [(128, [0, 7])]
