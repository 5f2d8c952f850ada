"""Stages of a model that is never whole on one rank: parts of it on the meta device, filled with memory and values."""

import copy
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forgather.ml.trainer.pipeline.pipeline_utils import tensors_of

_SENDS_IN_FLIGHT = 16


def twin_of(module: nn.Module) -> nn.Module:
    """A module with the same parts, of which some can be replaced without touching the original."""
    twin = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        vars(twin)[name] = dict(vars(module)[name])
    return twin


class RankModel(nn.Module):
    """What a rank has of a model: the parts of all its stages, under the names of the whole model."""

    def __init__(self, modules: Sequence[nn.Module], whole: nn.Module) -> None:
        super().__init__()
        self.config = getattr(whole, "config", None)
        self.generation_config = getattr(whole, "generation_config", None)
        _merge(self, modules)


def _merge(target: nn.Module, modules: Sequence[nn.Module]) -> None:
    children: dict[str, list[nn.Module]] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            target._parameters.setdefault(name, parameter)
        for name, buffer in module._buffers.items():
            target._buffers.setdefault(name, buffer)
        target._non_persistent_buffers_set |= module._non_persistent_buffers_set
        for name, child in module._modules.items():
            if child is not None and all(child is not other for other in children.setdefault(name, [])):
                children[name].append(child)
    for name, alike in children.items():
        if len(alike) > 1:
            branch = nn.Module()
            _merge(branch, alike)
            alike = [branch]
        if alike:
            target._modules[name] = alike[0]


def materialise(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Give the tensors of these modules memory, without values; what was one tensor stays one."""
    memory: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in memory:
            empty = torch.empty_like(tensor, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            memory[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return memory[id(tensor)]

    for module in {id(part): part for one in modules for part in one.modules()}.values():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    table[name] = real(tensor)  # type: ignore[assignment]


def stream_values(
    source: nn.Module | None, own: Sequence[nn.Module], names: Sequence[Sequence[str]], group: ProcessGroup
) -> None:
    """Give each rank the values of its tensors from the whole model, which only rank 0 of the group has.

    `names` are those of each rank's tensors. Nothing but the tensors themselves is allocated where values arrive.
    """
    rank = dist.get_rank(group)
    targets = _joined(own)
    owners: dict[str, list[int]] = {}
    for number, held in enumerate(names):
        for name in held:
            owners.setdefault(name, []).append(number)
    if rank == 0:
        assert source is not None
        _send_values(tensors_of(source), owners, targets, group)
    else:
        works = [dist.irecv(tensor.detach(), group=group, group_src=0) for tensor in _in_order(owners, targets)]
        for work in works:
            assert work is not None
            work.wait()


def _send_values(
    values: Mapping[str, Tensor],
    owners: Mapping[str, Sequence[int]],
    targets: Mapping[str, Tensor],
    group: ProcessGroup,
) -> None:
    device = next(iter(targets.values())).device
    under_way: deque[tuple[Any, Tensor]] = deque()
    sent: set[tuple[int, int]] = set()
    for name, ranks in owners.items():
        value = values[name].detach()
        for number in ranks:
            if number == 0:
                targets[name].detach().copy_(value)
            elif (id(values[name]), number) not in sent:
                sent.add((id(values[name]), number))
                tensor = value.to(device, non_blocking=True).contiguous()
                under_way.append((dist.isend(tensor, group=group, group_dst=number), tensor))
            while len(under_way) > _SENDS_IN_FLIGHT:
                under_way.popleft()[0].wait()
    for work, _ in under_way:
        work.wait()


def _in_order(owners: Mapping[str, Sequence[int]], targets: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of this rank in the order in which they are sent, each once whatever its names are."""
    tensors: dict[int, Tensor] = {}
    for name in owners:
        if name in targets:
            tensors.setdefault(id(targets[name]), targets[name])
    return list(tensors.values())


def _joined(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {name: tensor for module in modules for name, tensor in tensors_of(module).items()}
