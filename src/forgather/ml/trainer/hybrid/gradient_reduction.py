"""GradientReducer: bucketed reduction of stage gradients over pipelines, overlapped with the backward pass.

Replicated stages all-reduce their gradients here; sharded stages reduce-scatter them (`sharded_stages`). All ranks of a
group start their reductions in the same order. `HybridTrainer` creates the reducer, and `TrainedStage` notifies it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup

# The default bucket size of torch's DDP.
_BUCKET_BYTES = 25 * 2**20


class Bucket(Protocol):
    """Parameters with gradients that are reduced together."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Trainable parameters that the backward pass gives gradients to."""
        ...

    def start(self) -> None:
        """Start the reduction. All ranks of the group start their buckets in the same order."""
        ...

    def finish(self) -> None:
        """Wait for the reduction. Afterwards, gradients are sums over all pipelines."""
        ...


TBucket = TypeVar("TBucket", bound=Bucket)


class AllReduceBucket:
    """Bucket of replicated parameters: every rank gets the sums of all gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        self.parameters = parameters
        self._group = group
        self._flat: Tensor | None = None
        self._work: Any = None

    def start(self) -> None:
        # A missing gradient counts as zero, with a flag: other pipelines may have a gradient for this parameter.
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters]
        self._flat = _flatten_dense_tensors([*gradients, presence(self.parameters, gradients[0])])
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def finish(self) -> None:
        assert self._flat is not None
        self._work.wait()
        num_present = self._flat[-len(self.parameters) :]
        totals = _unflatten_dense_tensors(self._flat[: -len(self.parameters)], self.parameters)
        for number, (one, total) in enumerate(zip(self.parameters, totals, strict=True)):
            # A parameter that no pipeline has used keeps grad=None, as on one device. The count is read only without a
            # local gradient, because bool() waits for the device.
            if one.grad is not None or bool(num_present[number] > 0):
                one.grad = total
        self._flat, self._work = None, None


def presence(parameters: Sequence[nn.Parameter], like: Tensor) -> Tensor:
    """Return 1 for each parameter with a gradient and 0 for the others, with dtype and device of `like`."""
    # Filled on the device: a Python list would need a copy from the host, which waits for the device.
    present = like.new_ones(len(parameters))
    for number, one in enumerate(parameters):
        if one.grad is None:
            present[number] = 0
    return present


class GradientReducer:
    """Reducer that sums the gradients of this rank's stages over a group of ranks with the same stages.

    `watching` surrounds the last backward pass of a stage, and `reduce` follows when its gradients are complete.
    Reductions start in the same order on all ranks. Buckets in `shared` have parameters of several stages, so they are
    reduced when all stages are done.
    """

    def __init__(self, buckets: Mapping[int, Sequence[Bucket]], shared: Sequence[Bucket]) -> None:
        self.is_active = False
        """Whether the current batch is the last batch of its step."""
        self._buckets = buckets
        self._shared = shared
        self._awaited: dict[int, int] = {}
        self._started: dict[int, Bucket] = {}

    @contextlib.contextmanager
    def watching(self, stage_index: int) -> Iterator[None]:
        if not self.is_active:
            yield
            return
        # Hooks exist only for this pass: in earlier passes, gradients are not final.
        hooks = []
        for bucket in self._buckets[stage_index]:
            self._awaited[id(bucket)] = len(bucket.parameters)
            note = partial(self._note, stage_index, bucket)
            hooks += [one.register_post_accumulate_grad_hook(note) for one in bucket.parameters]
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
        """Start all remaining reductions and wait for all of them."""
        # Stages without gradients in this step are reduced as well: other pipelines take part with theirs.
        for buckets in (*self._buckets.values(), self._shared):
            for bucket in buckets:
                self._start(bucket)
        for bucket in self._started.values():
            bucket.finish()
        self._started.clear()
        self._awaited.clear()

    def _note(self, stage_index: int, bucket: Bucket, _: Tensor) -> None:
        self._awaited[id(bucket)] -= 1
        # Only in the order of the list: gradients may be ready in another order on other ranks.
        for one in self._buckets[stage_index]:
            if self._awaited[id(one)] > 0:
                break
            self._start(one)

    def _start(self, bucket: Bucket) -> None:
        if id(bucket) not in self._started:
            self._started[id(bucket)] = bucket
            bucket.start()


def bucketed(
    stages: Mapping[int, nn.Module], make: Callable[[list[nn.Parameter]], TBucket], *, only_trainable: bool = True
) -> tuple[dict[int, list[TBucket]], list[TBucket]]:
    """Return buckets of the parameters of each stage, and buckets of the parameters that several stages share."""
    stages_of: dict[int, list[int]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for index, module in stages.items():
        for one in module.parameters():
            if one.requires_grad or not only_trainable:
                stages_of.setdefault(id(one), []).append(index)
                parameters[id(one)] = one
    alone = {index: [parameters[key] for key, found in stages_of.items() if found == [index]] for index in stages}
    # A parameter of two stages gets gradients from both.
    shared = [parameters[key] for key, found in stages_of.items() if len(found) > 1]
    by_stage = {index: [make(own) for own in _by_size(held)] for index, held in alone.items()}
    return by_stage, [make(own) for own in _by_size(shared)]


def _by_size(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters of equal dtype and device, in reverse order: the last gradients are ready first."""
    groups: list[list[nn.Parameter]] = []
    room = 0
    for one in reversed(parameters):
        size = one.numel() * one.element_size()
        if room < size or (groups[-1][0].dtype, groups[-1][0].device) != (one.dtype, one.device):
            groups.append([])
            room = _BUCKET_BYTES
        groups[-1].append(one)
        room -= size
    return groups
