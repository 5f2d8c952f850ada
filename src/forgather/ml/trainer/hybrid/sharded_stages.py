"""ShardedStages: parameters of pipeline stages, divided over the data-parallel axis with torch's fully_shard.

Parameters are all-gathered before the first batch of a step, and gradients are reduce-scattered in the last backward
pass of a step. A schedule keeps the weights and gradients of its stage for all micro-batches anyway, so gathering them
for each micro-batch would multiply communication by the number of micro-batches. In between, no collective of the
data-parallel group runs: pipelines may run different numbers of forward passes. `HybridTrainer` uses it with
dp_strategy="shard".
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FSDPModule, fully_shard, share_comm_ctx

from forgather.ml.trainer.fsdp2.sharded_model import require_shardable
from forgather.ml.trainer.hybrid.gradient_reduction import GradientReducer, bucketed, presence
from forgather.ml.trainer.pipeline.pipeline_model import PipelineModel


class _Unit(nn.Module):
    """Module for one call of fully_shard: all stages of a rank. A call shards some of their parameters.

    The stages run, and never this module. So the hooks of FSDP do not interfere with the passes of a schedule, and only
    a call of this module gathers its parameters.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            self.add_module(str(number), module)

    def forward(self) -> None:
        """Do nothing: the hooks of FSDP gather the parameters."""


class ReduceScatterBucket:
    """Bucket of sharded parameters: every rank gets the sums of the gradients of its shards."""

    def __init__(self, parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
        """Divide the parameters of `modules` over the ranks of a one-dimensional mesh, in place."""
        self._group: ProcessGroup = mesh.get_group()
        self._places = _places_of(parameters, modules)
        unit = _Unit(modules)
        chosen = set(map(id, parameters))
        others = {one for one in unit.parameters() if id(one) not in chosen}
        self.unit = fully_shard(unit, mesh=mesh, reshard_after_forward=False, ignored_params=others)
        # The loss is divided by the targets of all pipelines, so gradients are summed. fully_shard averages by default.
        self.unit.set_gradient_divide_factor(1.0)
        self.unit.set_force_sum_reduction_for_comms(True)
        # A parameter may have a gradient in some pipelines only. All of them take part in its reduction.
        self.unit.set_reduce_scatter_unused_params(True)
        # Freed in `finish`: backward passes of other parameters may still read these weights.
        self.unit.set_reshard_after_backward(False)
        self._missing: list[int] = []
        self._present: Any = None
        self._work: Any = None

    @property
    def _held(self) -> list[nn.Parameter]:
        """Parameters in the modules now: full ones between a gather and the next reshard, otherwise shards."""
        return [parameter for module, name in self._places if (parameter := module._parameters[name]) is not None]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [one for one in self._held if one.requires_grad]

    def start(self) -> None:
        parameters = self.parameters
        if not parameters:
            return
        self._missing = [number for number, one in enumerate(parameters) if one.grad is None]
        self._present = presence(parameters, parameters[0].detach())
        self._work = dist.all_reduce(self._present, group=self._group, async_op=True)
        for group in _state_of(self.unit)._fsdp_param_groups:
            group.post_backward()

    def finish(self) -> None:
        # Lets the current stream wait for the reduce-scatter, and resets the state of FSDP.
        _state_of(self.unit)._root_post_backward_final_callback()
        self.unit.reshard()
        if self._work is None:
            return
        self._work.wait()
        shards = self.parameters
        for number in self._missing:
            # As on one device, a parameter that no pipeline has used keeps grad=None. bool() waits for the device.
            if not bool(self._present[number] > 0):
                shards[number].grad = None
        self._missing, self._present, self._work = [], None, None


class ShardedStages:
    """Stages of this rank with parameters that are divided by rows over the ranks with the same stages.

    All ranks of the data-parallel group call each method together.
    """

    def __init__(self, pipeline: PipelineModel, mesh: DeviceMesh) -> None:
        """Divide the filled stages of a pipeline; `mesh` is the data-parallel axis."""
        require_shardable(pipeline.part)
        # `part` has its own tables of parameters where it merges stages, so it follows along with the stages.
        modules = [pipeline.part, *pipeline.own.values()]
        by_stage, shared = bucketed(
            pipeline.own, lambda found: ReduceScatterBucket(found, modules, mesh), only_trainable=False
        )
        self._units = [bucket.unit for buckets in (*by_stage.values(), shared) for bucket in buckets]
        share_comm_ctx(self._units)
        self.reducer = GradientReducer(by_stage, shared)
        self._num_users = 0

    def gather(self) -> None:
        """All-gather the parameters that are sharded now; the modules hold full parameters afterwards."""
        for unit in self._units:
            unit.unshard(async_op=True)
        for unit in self._units:
            # Waits for the all-gather.
            unit()  # type: ignore[operator]

    def reshard(self) -> None:
        """Free the full parameters; the modules hold shards afterwards."""
        for unit in self._units:
            unit.reshard()

    def release_gradients(self) -> None:
        """Let FSDP reuse the memory of the gradients, once the work queued so far has used them."""
        # FSDP allocates gradients on a separate stream. Without this order, memory that is freed now could be reused
        # there while the optimizer still reads it.
        context = _state_of(self._units[0])._comm_ctx
        context.reduce_scatter_stream.wait_stream(context.device_handle.current_stream())

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the parameters for forward passes; the outermost context frees them."""
        self.gather()
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            if self._num_users == 0:
                self.reshard()


def _places_of(parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Return for each parameter a module that holds it, and its name there."""
    places: dict[int, tuple[nn.Module, str]] = {}
    for root in modules:
        for module in root.modules():
            for name, parameter in module._parameters.items():
                places.setdefault(id(parameter), (module, name))
    return [places[id(one)] for one in parameters]


def _state_of(unit: FSDPModule) -> Any:
    # torch's own pipeline stages reduce gradients through this state too: the public methods of FSDPModule cannot.
    return fully_shard.state(unit)  # type: ignore[attr-defined]
