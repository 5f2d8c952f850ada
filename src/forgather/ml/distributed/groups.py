"""Process groups (gloo) for control messages, and barriers.

The groups are created on first use and cached until torch.distributed is initialised again. `Peers` and
`main_process_first` use them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from forgather.ml.distributed.environment import get_local_rank, get_requested_timeout, get_world_size


@dataclass
class _ControlGroups:
    """Control groups of one initialisation of torch.distributed, identified by its WORLD group."""

    world: ProcessGroup
    everyone: ProcessGroup | None = None
    node: ProcessGroup | None = None


_control_groups: _ControlGroups | None = None


def get_global_process_group() -> ProcessGroup | None:
    """Return a gloo group over all ranks, or None if torch.distributed is not initialised.

    Collective on the first call. If WORLD itself uses gloo, it is returned, which saves a second set of connections.
    """
    groups = _groups_of_this_world()
    if groups is None:
        return None
    if groups.everyone is None:
        groups.everyone = groups.world if dist.get_backend() == "gloo" else _new_gloo_group(None)
    return groups.everyone


def get_local_process_group() -> ProcessGroup | None:
    """Return a gloo group over the ranks of this node, or None if torch.distributed is not initialised.

    Collective over all ranks on the first call.
    """
    groups = _groups_of_this_world()
    if groups is None:
        return None
    if groups.node is None:
        groups.node = _new_node_group()
    return groups.node


def new_disjoint_groups(groups: Sequence[Sequence[int]]) -> ProcessGroup | None:
    """Create groups without common ranks; return the group of this rank, None if it is in none of them.

    Collective over all ranks, which pass the same groups. A communicator that can be split (NCCL, bound to a device)
    makes all groups in one collective. Otherwise the groups are created one after another.
    """
    timeout = get_requested_timeout()
    divisible = _divisible_backend()
    if divisible is not None:
        # Only the backend of the device: the gloo part of a split group is named after the number of groups that each
        # member has created, which may differ between ranks.
        return dist.split_group(None, [list(ranks) for ranks in groups], timeout=timeout, backend=divisible)
    own: ProcessGroup | None = None
    # The option use_local_synchronization would spare other ranks the call, but names groups by the same number.
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timeout)
        if dist.get_rank() in ranks:
            own = group
    return own


def _divisible_backend() -> str | None:
    """Return the backend of the job's accelerator if its communicator can be split, such as "cuda:nccl"."""
    world = dist.group.WORLD
    device: torch.device | None = None if world is None else world.bound_device_id
    if world is None or device is None or not torch.accelerator.is_available():
        return None
    backend = world._get_backend(device)
    return f"{device.type}:{backend.name()}" if backend.supports_splitting else None


def reset_process_groups() -> None:
    """Clear the cached control groups; call it on every rank after destroying or replacing them."""
    global _control_groups
    _control_groups = None


def null_barrier(*args: object) -> None:
    """Do nothing: the barrier of a single process. Arguments are ignored."""


def get_barrier_fn(group: ProcessGroup | None = None) -> Callable[..., None]:
    """Return a barrier function of `group` (default: all ranks); it does nothing for a group of one process.

    Raises `RuntimeError` if the environment variable WORLD_SIZE is above 1 and torch.distributed is not initialised. A
    barrier without effect would let the ranks drift apart.
    """
    if not _is_initialized():
        _require_single_process()
        return null_barrier
    return null_barrier if dist.get_world_size(group) == 1 else partial(_barrier, group)


def _require_single_process() -> None:
    if (world_size := get_world_size()) > 1:
        raise RuntimeError(
            f"A barrier of {world_size} ranks (environment variable WORLD_SIZE) needs torch.distributed, which is not "
            "initialised. Create a DistributedEnvironment() first (or call torch.distributed.init_process_group), or unset "
            "WORLD_SIZE to run a single process."
        )


def _barrier(group: ProcessGroup | None, *args: object) -> None:
    dist.barrier(group=group)


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _groups_of_this_world() -> _ControlGroups | None:
    """Return the cached groups of the current WORLD, or None if torch.distributed is not initialised."""
    # Groups of an earlier initialisation are dropped, because they do not outlive their WORLD.
    global _control_groups
    world = dist.group.WORLD if _is_initialized() else None
    if world is None:
        _control_groups = None
    elif _control_groups is None or _control_groups.world is not world:
        _control_groups = _ControlGroups(world)
    return _control_groups


def _new_gloo_group(ranks: list[int] | None) -> ProcessGroup:
    group: ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=get_requested_timeout())
    return group


def _new_node_group() -> ProcessGroup:
    # The ranks of a node are consecutive, so the first rank identifies the node, also for nodes of unequal size.
    first_ranks = [0] * dist.get_world_size()
    dist.all_gather_object(first_ranks, dist.get_rank() - get_local_rank(), group=get_global_process_group())
    ranks_of_nodes: dict[int, list[int]] = {}
    for rank, first_rank in enumerate(first_ranks):
        ranks_of_nodes.setdefault(first_rank, []).append(rank)
    own: ProcessGroup | None = None
    # Torch requires every rank to call `new_group` for every group, also for groups without this rank.
    for _, ranks in sorted(ranks_of_nodes.items()):
        group = _new_gloo_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    assert own is not None, "every rank belongs to a node"
    return own
