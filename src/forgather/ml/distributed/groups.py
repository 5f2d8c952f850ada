"""Process groups with the timeout of the job, meshes, gloo groups for control messages, and barriers.

Every group of this library is created by `new_group`. The control groups are created on first use and cached until
torch.distributed is initialised again. `Peers` and `main_process_first` use them.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from forgather.ml.distributed.environment import (
    default_timeout,
    get_local_rank,
    get_requested_timeout,
    get_world_size,
)


@dataclass
class _ControlGroups:
    """Control groups of one initialisation of torch.distributed, identified by its WORLD group."""

    world: ProcessGroup
    everyone: ProcessGroup | None = None
    background: ProcessGroup | None = None
    node: ProcessGroup | None = None


_control_groups: _ControlGroups | None = None


def new_group(
    ranks: Sequence[int] | None = None, backend: str | None = None, use_local_synchronization: bool = False
) -> ProcessGroup:
    """Create a group (default: all ranks, backend of WORLD) with the timeout of the job; collective over all ranks."""
    with _without_split() if backend == "gloo" else contextlib.nullcontext():
        group: ProcessGroup = dist.new_group(
            None if ranks is None else list(ranks),
            backend=backend,
            timeout=group_timeout(backend),
            use_local_synchronization=use_local_synchronization,
        )
    return group


def group_timeout(backend: str | None = None) -> timedelta:
    """Return the timeout of a new group with this backend (default: the backend of WORLD)."""
    return get_requested_timeout() or default_timeout(backend or str(dist.get_backend_config()))


def new_mesh(device_type: str, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Create a mesh of all ranks, with the timeout of the job in all of its groups; collective over all ranks."""
    forget_cached_meshes()
    # The function `init_device_mesh` gives its groups torch's default timeout.
    numbers = torch.arange(dist.get_world_size(), dtype=torch.int, device="cpu").view(*shape)
    if numbers.ndim == 1:
        return DeviceMesh.from_group(_world(), device_type, mesh_dim_names=tuple(names))
    parts = [numbers.movedim(axis, -1).reshape(-1, size).tolist() for axis, size in enumerate(shape)]
    groups = [_world() if len(part) == 1 else new_partition(part) for part in parts]
    return DeviceMesh.from_group(groups, device_type, mesh=numbers, mesh_dim_names=tuple(names))


def new_partition(partition: Sequence[Sequence[int]], backend: str | None = None) -> ProcessGroup:
    """Create a group for each part of all ranks, and return the group of this rank; collective over all ranks."""
    own: ProcessGroup | None = None
    # Torch requires every rank to call `new_group` for every group, also for groups without this rank.
    for ranks in partition:
        group = new_group(ranks, backend)
        own = group if dist.get_rank() in ranks else own
    assert own is not None, "every rank is in the partition"
    return own


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    return world


@contextlib.contextmanager
def _without_split() -> Iterator[None]:
    """Detach WORLD from its device while a gloo group is created."""
    # With a bound device, torch lets the ranks outside of a new group take part in a split of the NCCL communicator. The
    # members of a gloo group do not split it, so the other ranks would wait for them forever.
    world = _world()
    device = world.bound_device_id
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def get_global_process_group() -> ProcessGroup | None:
    """Return a gloo group over all ranks, or None if torch.distributed is not initialised.

    Collective on the first call. If WORLD itself uses gloo, it is returned, which saves a second set of connections.
    """
    groups = _groups_of_this_world()
    if groups is None:
        return None
    if groups.everyone is None:
        groups.everyone = groups.world if dist.get_backend() == "gloo" else new_group(backend="gloo")
    return groups.everyone


def get_background_group() -> ProcessGroup | None:
    """Return a gloo group over all ranks for background saves, or None if torch.distributed is not initialised.

    Collective on the first call. Never WORLD: collectives of two threads in one group would be matched with each other.
    """
    groups = _groups_of_this_world()
    if groups is None:
        return None
    if groups.background is None:
        groups.background = new_group(backend="gloo")
    return groups.background


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
    divisible = _divisible_backend()
    if divisible is not None:
        # Only the backend of the device: the gloo part of a split group is named after the number of groups that each
        # member has created, which may differ between ranks.
        return dist.split_group(None, [list(ranks) for ranks in groups], timeout=group_timeout(), backend=divisible)
    own: ProcessGroup | None = None
    # The option use_local_synchronization would spare other ranks the call, but names groups by the same number.
    for ranks in groups:
        group = new_group(ranks)
        own = group if dist.get_rank() in ranks else own
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
    """Clear the cached control groups and meshes; call it on every rank after destroying or replacing groups."""
    global _control_groups
    _control_groups = None
    forget_cached_meshes()


def forget_cached_meshes() -> None:
    """Clear DTensor's cache of operations, because its entries refer to meshes with destroyed process groups."""
    # Meshes with equal ranks and names are equal keys. A new DTensor would get the mesh of an earlier process group, and
    # its first collective would fail with "Could not resolve the process group".
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


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


def _new_node_group() -> ProcessGroup:
    # The ranks of a node are consecutive, so the first rank identifies the node, also for nodes of unequal size.
    own = torch.tensor([dist.get_rank() - get_local_rank()], device="cpu")
    first_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(first_ranks, own, group=get_global_process_group())
    ranks_of_nodes: dict[int, list[int]] = {}
    for rank, first_rank in enumerate(first_ranks):
        ranks_of_nodes.setdefault(int(first_rank), []).append(rank)
    return new_partition([ranks for _, ranks in sorted(ranks_of_nodes.items())], backend="gloo")
