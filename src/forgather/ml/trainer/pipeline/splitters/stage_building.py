"""Stage building blocks: shallow module copies, allocation of meta tensors, and streaming of values between ranks.

Only rank 0 ever holds the values of the full model; other ranks allocate just their own stages. Used by `PipelineModel`
and the splitters.
"""

import copy
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forgather.ml.trainer.pipeline.pipeline_utils import tensors_of

# Bounds the extra memory of rank 0, which copies each tensor to its device before it sends it.
_SENDS_IN_FLIGHT = 16


def twin_of(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module; its children and tensors can be replaced without changing the original."""
    twin = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        vars(twin)[name] = dict(vars(module)[name])
    return twin


class RankModel(nn.Module):
    """All stages of a rank merged into one module, under the FQNs of the full model."""

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
    # Two stages of a rank can hold different entries of one child, such as layers 0 and 4 of the same list.
    for name, alike in children.items():
        if len(alike) > 1:
            branch = nn.Module()
            _merge(branch, alike)
            alike = [branch]
        if alike:
            target._modules[name] = alike[0]


def materialise(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Allocate the meta tensors of these modules on `device`, without values; tied tensors stay tied."""
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
    """Send each rank the values of its tensors from the full model `source`, which only rank 0 of the group has.

    `names` lists the tensor names of each rank. Receivers allocate nothing besides their own tensors.
    """
    # Messages carry no names. Sender and receivers derive the same order from `names`, which is equal on all ranks.
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
        # detach(): a parameter that requires a gradient cannot be written in place.
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
            # A tied tensor is sent to a rank once, however many of its names that rank holds.
            elif (id(values[name]), number) not in sent:
                sent.add((id(values[name]), number))
                tensor = value.to(device, non_blocking=True).contiguous()
                under_way.append((dist.isend(tensor, group=group, group_dst=number), tensor))
            while len(under_way) > _SENDS_IN_FLIGHT:
                under_way.popleft()[0].wait()
    for work, _ in under_way:
        work.wait()


def _in_order(owners: Mapping[str, Sequence[int]], targets: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tensors of this rank in the order of the sends; a tensor with several names appears once."""
    tensors: dict[int, Tensor] = {}
    for name in owners:
        if name in targets:
            tensors.setdefault(id(targets[name]), targets[name])
    return list(tensors.values())


def _joined(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {name: tensor for module in modules for name, tensor in tensors_of(module).items()}
