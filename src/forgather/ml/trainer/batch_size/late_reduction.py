"""Late gradient reduction: averages gradients over ranks after the last backward pass of a step, in buckets.

DDP reduces inside the backward pass, where a rank that runs out of memory would leave the others waiting. A step that may
be repeated therefore reduces only when all ranks have finished their passes. `DDPTrainer` uses it for
`auto_find_batch_size`.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup

_BUCKET_BYTES = 25 * 2**20


def share_weights(model: nn.Module, group: ProcessGroup) -> None:
    """Copy parameters and buffers of the first rank to all ranks, as DDP does at construction; collective."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def average_gradients(parameters: Sequence[Tensor], group: ProcessGroup, add: Callable[[Tensor], Tensor]) -> None:
    """Replace each gradient by its mean over the ranks of `group`; collective.

    A gradient that only some ranks have counts as zero on the others. A gradient that no rank has stays None. `add` sums a
    tensor of the CPU over the ranks.
    """
    # On the host, which would otherwise wait for the backward pass on the device.
    present = add(torch.tensor([one.grad is not None for one in parameters], dtype=torch.int64))
    used = [one for one, number in zip(parameters, present.tolist(), strict=True) if number]
    for one in used:
        if one.grad is None:
            one.grad = torch.zeros_like(one)
    num_ranks = dist.get_world_size(group)
    for bucket in _buckets([one.grad for one in used if one.grad is not None]):
        # Divided first, as in DDP: a sum in 16 bits could overflow.
        flat = _flatten_dense_tensors(bucket).div_(num_ranks)
        dist.all_reduce(flat, group=group)
        for gradient, mean in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(mean)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbours of one dtype, up to the size of a bucket."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        num_bytes = gradient.numel() * gradient.element_size()
        if bucket and (gradient.dtype != bucket[0].dtype or size + num_bytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += num_bytes
    if bucket:
        yield bucket
