"""Post-local SGD: gradient all-reduce for some steps, then independent updates with periodic weight averaging.

Wraps torch's comm hook, averager and optimizer. Replicas are averaged before every save, so that a checkpoint holds one
model. Used by `DDPTrainer`.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from forgather.ml.checkpoint.state.tensor_checks import Where, check_mapping, whole_number
from forgather.ml.distributed import DistributedEnvInterface, Peers
from forgather.ml.distributed.groups import new_partition
from forgather.ml.trainer.ddp.ddp_arguments import PostLocalSGDArguments
from forgather.ml.trainer.trainer_types import OptimizerT


class PostLocalSGD:
    """torch's comm hook, averager and optimizer for post-local SGD; their step counters are the state for a resume."""

    def __init__(
        self, args: PostLocalSGDArguments, group: ProcessGroup, peers: Peers, env: DistributedEnvInterface
    ) -> None:
        self._group = group
        node_group = _node_group(peers, env) if args.post_local_gradient_allreduce else None
        self._hook_state = PostLocalSGDState(group, node_group, args.start_step, args.post_local_gradient_allreduce)
        self._optimizers: list[OptimizerT] = []
        self._step_of_average: int | None = None
        self._averager = PeriodicModelAverager(args.period, args.start_step, group)

    def attach(self, model: DistributedDataParallel, optimizer: OptimizerT) -> PostLocalSGDOptimizer:
        """Register the comm hook; return the averaging optimizer, which is stepped instead of `optimizer`."""
        model.register_comm_hook(self._hook_state, post_localSGD_hook)
        self._optimizers = getattr(optimizer, "optimizers", [optimizer])
        return PostLocalSGDOptimizer(optimizer, self._averager)

    @torch.no_grad()
    def average_replicas(self) -> None:
        """Average weights and moments over all replicas if they differ; a save needs equal replicas."""
        if not self._are_one:
            self._average(itertools.chain.from_iterable(map(_replicated_tensors, self._optimizers)))
            self._step_of_average = self._averager.step

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Swap in the averaged weights that a save would store, for an evaluation."""
        if self._are_one:
            yield
            return
        # Restored afterwards: an evaluation must not change the course of training.
        weights = [parameter.detach() for one in self._optimizers for parameter in _parameters(one)]
        own = [weight.clone() for weight in weights]
        try:
            self._average(weights)
            yield
        finally:
            torch._foreach_copy_(weights, own)

    @property
    def _are_one(self) -> bool:
        """Whether all replicas have equal weights at this step."""
        # Equal replicas are not averaged again, because rounding could change the last bit.
        step = self._averager.step
        return step <= self._averager.warmup_steps or step == self._step_of_average

    def _average(self, tensors: Iterable[Tensor]) -> None:
        world_size = dist.get_world_size(self._group)
        for tensor in tensors:
            # Sum and divide, because ReduceOp.AVG does not exist for Gloo.
            dist.all_reduce(tensor, group=self._group)
            tensor.div_(world_size)

    def state_dict(self) -> dict[str, Any]:
        return {"averager_step": self._averager.step, "hook_step": self._hook_state.iter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state_dict(state)
        # A checkpoint holds averaged replicas, so the replicas are equal at this step.
        self._averager.step = self._step_of_average = int(state["averager_step"])
        self._hook_state.iter = int(state["hook_step"])

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise `CheckpointLoadError` unless the state holds both step counters; change nothing."""
        where = Where("the saved state of post_local_sgd", "post_local_sgd")
        for name in ("averager_step", "hook_step"):
            whole_number(check_mapping(state, where).get(name), where.at(name), least=0)


def _parameters(optimizer: OptimizerT) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _replicated_tensors(optimizer: OptimizerT) -> Iterator[Tensor]:
    for parameter in _parameters(optimizer):
        yield parameter
        # Step counters are equal on all ranks, and some optimizers store them as float tensors.
        yield from (
            value
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.is_floating_point() and name != "step"
        )


def _node_group(peers: Peers, env: DistributedEnvInterface) -> ProcessGroup:
    # The global rank of its first process identifies a node.
    ranks_of_nodes: dict[int, list[int]] = {}
    for rank, first_rank in enumerate(peers.gather(env.rank - env.local_rank)):
        ranks_of_nodes.setdefault(first_rank, []).append(rank)
    return new_partition([ranks for _, ranks in sorted(ranks_of_nodes.items())])
