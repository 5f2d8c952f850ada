"""Gradient norm and clipping for sharded parameters (DTensor): each rank reads its shards, one all-reduce adds them up.

The norm stays on the device, so a step has no host wait. `FSDP2Trainer` and `HybridTrainer` call it on every rank.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from forgather.ml.checkpoint.sharding.sharded_tensors import local_part
from forgather.ml.optim.gradient_trace import GradientTrace
from forgather.ml.trainer.loop.nonfinite import elementary_optimizers


class ShardedGradientNorm:
    """Total norm of gradients that are divided over the ranks of `group`; equal on all ranks. Collective.

    `trace` has the norms of this rank's shards, so that a non-finite norm can be attributed to parameters.
    """

    trace: GradientTrace | None = None

    def __init__(self, parameters: Sequence[Tensor], group: ProcessGroup, device: torch.device) -> None:
        self._parameters = parameters
        self._group = group
        self._device = device

    @torch.no_grad()
    def __call__(self, norm_type: float = 2.0) -> Tensor:
        parameters = [one for one in self._parameters if one.grad is not None]
        gradients = [local_part(one.grad) for one in parameters]
        if gradients:
            # Empty shards have norm 0. Sums of squares of low-precision gradients need float32.
            norms = torch._foreach_norm(gradients, norm_type, torch.float32)
            values = torch.stack(norms).to(self._device)
        else:
            values = torch.zeros(1, device=self._device)
        self.trace = GradientTrace(parameters, values) if parameters else None
        if norm_type == math.inf:
            total = values.max()
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self._group)
            return total
        total = values.pow(norm_type).sum()
        dist.all_reduce(total, group=self._group)
        return total.pow(1.0 / norm_type)


@torch.no_grad()
def clip_shards(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients so that their total norm is at most `max_norm`, as `clip_grads_with_norm_` does."""
    gradients = [local_part(one.grad) for one in parameters if one.grad is not None]
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


def release_gradients(root: FSDPModule) -> None:
    """Let FSDP reuse the memory of the gradients, once the work queued so far has used them."""
    # FSDP allocates gradients on a separate stream. Without this order, memory that is freed now could be reused there
    # while the optimizer still reads it.
    context = root._get_fsdp_state()._comm_ctx
    context.reduce_scatter_stream.wait_stream(context.device_handle.current_stream())


def refuse_unshardable(optimizer: object) -> None:
    """Raise ValueError for optimizers of torch that cannot update sharded parameters."""
    for one in elementary_optimizers(optimizer):
        if isinstance(one, torch.optim.Adafactor | torch.optim.LBFGS):
            raise ValueError(
                f"{type(one).__name__} cannot update sharded parameters: torch does not implement it for DTensor. Use an "
                "optimizer that updates each element separately, such as AdamW, or DDPTrainer."
            )
