"""GradientReducer: bucketed all-reduce of stage gradients over pipelines, overlapped with the backward pass.

All ranks of a group start their all-reduces in the same order. `HybridTrainer` creates the reducer, and `TrainedStage`
notifies it.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup

# The default bucket size of torch's DDP.
_BUCKET_BYTES = 25 * 2**20


class _Bucket:
    """Parameters with gradients that are reduced in one all-reduce."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.num_awaited = len(parameters)
        self.flat: Tensor | None = None
        self.work: Any = None

    def start(self, group: ProcessGroup) -> None:
        # A missing gradient counts as zero, with a flag: other pipelines may have a gradient for this parameter.
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters]
        # Filled on the device: a Python list would need a copy from the host, which waits for the device.
        present = gradients[0].new_ones(len(self.parameters))
        for number, one in enumerate(self.parameters):
            if one.grad is None:
                present[number] = 0
        self.flat = _flatten_dense_tensors([*gradients, present])
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def finish(self) -> None:
        assert self.flat is not None
        self.work.wait()
        num_present = self.flat[-len(self.parameters) :]
        totals = _unflatten_dense_tensors(self.flat[: -len(self.parameters)], self.parameters)
        for number, (one, total) in enumerate(zip(self.parameters, totals, strict=True)):
            # A parameter that no pipeline has used keeps grad=None, as on one device. The count is read only without a
            # local gradient, because bool() waits for the device.
            if one.grad is not None or bool(num_present[number] > 0):
                one.grad = total
        self.flat, self.work, self.num_awaited = None, None, len(self.parameters)


class GradientReducer:
    """Reducer that sums the gradients of this rank's stages over a group of ranks with the same stages.

    `watching` surrounds the last backward pass of a stage, and `reduce` follows when its gradients are complete.
    All-reduces start in the same order on all ranks. A parameter of two stages is reduced after both are done.
    """

    def __init__(self, stages: Mapping[int, nn.Module], group: ProcessGroup) -> None:
        self._group = group
        self.is_active = False
        """Whether the current batch is the last batch of its step."""
        stages_of: dict[int, list[int]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for index, module in stages.items():
            for one in module.parameters():
                if one.requires_grad:
                    stages_of.setdefault(id(one), []).append(index)
                    parameters[id(one)] = one
        alone = {index: [parameters[key] for key, found in stages_of.items() if found == [index]] for index in stages}
        self._buckets = {index: _buckets(own) for index, own in alone.items()}
        # A parameter of two stages gets gradients from both, so it is reduced in `finish`.
        self._shared = _buckets([parameters[key] for key, found in stages_of.items() if len(found) > 1])
        self._bucket_of = {
            id(one): bucket for buckets in self._buckets.values() for bucket in buckets for one in bucket.parameters
        }
        self._started: list[_Bucket] = []

    @contextlib.contextmanager
    def watching(self, stage_index: int) -> Iterator[None]:
        if not self.is_active:
            yield
            return
        # Hooks exist only for this pass: in earlier passes, gradients are not final.
        hooks = [
            one.register_post_accumulate_grad_hook(lambda parameter: self._note(stage_index, parameter))
            for bucket in self._buckets[stage_index]
            for one in bucket.parameters
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def reduce(self, stage_index: int) -> None:
        if self.is_active:
            for bucket in self._buckets[stage_index]:
                self._start(bucket)

    def finish(self) -> None:
        """Start all remaining all-reduces and wait for all of them."""
        # Stages without gradients in this step are reduced as well: other pipelines take part with theirs.
        for buckets in (*self._buckets.values(), self._shared):
            for bucket in buckets:
                self._start(bucket)
        for bucket in self._started:
            bucket.finish()
        self._started.clear()

    def _note(self, stage_index: int, parameter: Tensor) -> None:
        self._bucket_of[id(parameter)].num_awaited -= 1
        # Only in the order of the list: gradients may be ready in another order on other ranks.
        for bucket in self._buckets[stage_index]:
            if bucket.num_awaited > 0:
                break
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        if bucket.work is None:
            bucket.start(self._group)
            self._started.append(bucket)


def _buckets(parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
    """Group parameters of equal dtype and device into buckets, in reverse order: the last gradients are ready first."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for one in reversed(parameters):
        size = one.numel() * one.element_size()
        if room < size or (buckets[-1][0].dtype, buckets[-1][0].device) != (one.dtype, one.device):
            buckets.append([])
            room = _BUCKET_BYTES
        buckets[-1].append(one)
        room -= size
    return [_Bucket(bucket) for bucket in buckets]
