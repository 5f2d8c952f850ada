"""GradLogger and WeightNormLogger callbacks: gradient and weight norms of single parameters in log records.

Both read the device only when a record is logged, so that other steps never wait for it.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather.ml.checkpoint.sharding.sharded_tensors import is_sharded, local_part, shard_group
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)


class GradLogger(TrainerCallback):
    """Callback that adds `grad_norm/<parameter>` to each log record, for the gradients of the logged step.

    The norms are taken after clipping. `pattern` is a regular expression searched in the parameter names; None means
    all. With `logging_strategy="epoch"` nothing is added, because a step cannot tell whether it will be logged. With
    `fuse_optim_with_backward` nothing is added either, because no gradients remain after the backward pass.
    """

    changes_control = False

    def __init__(self, pattern: str | None = None) -> None:
        self._pattern = pattern
        self._names: list[str] = []
        self._norms: Tensor | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if getattr(args, "fuse_optim_with_backward", False):
            logger.warning(
                "GradLogger logs nothing: fuse_optim_with_backward=True frees gradients in the backward pass."
            )

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: object
    ) -> None:
        if not is_logged_next(args, state):
            return
        parameters = matching_parameters(model, self._pattern)
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        self._names = list(gradients)
        # Stays on the device until the record is built, when the trainer waits for the device anyway.
        self._norms = norms_of(list(gradients.values()))

    def on_log_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **kwargs: object,
    ) -> None:
        if self._norms is not None:
            logs.update(named_values("grad_norm", self._names, self._norms))
        self._norms = None


class WeightNormLogger(TrainerCallback):
    """Callback that adds `weight_norm/<parameter>` to each log record.

    `pattern` is a regular expression searched in the parameter names; None means all.
    """

    changes_control = False

    def __init__(self, pattern: str | None = None) -> None:
        self._pattern = pattern

    def on_log_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        logs: dict[str, Any],
        **kwargs: object,
    ) -> None:
        parameters = matching_parameters(model, self._pattern)
        norms = norms_of([parameter.detach() for parameter in parameters.values()])
        if norms is not None:
            logs.update(named_values("weight_norm", list(parameters), norms))


def is_logged_next(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether the current step will be logged."""
    step = state.global_step + 1
    if getattr(args, "logging_strategy", "steps") != "steps":
        return False
    is_first = step == 1 and getattr(args, "logging_first_step", False)
    return is_first or step == state.max_steps or step % state.logging_steps == 0


def matching_parameters(model: nn.Module, pattern: str | None) -> dict[str, nn.Parameter]:
    """Return the parameters with names that match the regular expression."""
    parameters = dict(model.named_parameters())
    if pattern is None:
        return parameters
    expression = re.compile(pattern)
    return {name: parameter for name, parameter in parameters.items() if expression.search(name)}


@torch.no_grad()
def norms_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the Euclidean norms as one tensor; None without tensors.

    Norms of sharded tensors (DTensor) cover all shards. All ranks with shards must call this; collective.
    """
    if not tensors:
        return None
    norms = [torch.linalg.vector_norm(local_part(tensor), dtype=torch.float32) for tensor in tensors]
    sharded = [number for number, tensor in enumerate(tensors) if is_sharded(tensor)]
    if sharded:
        # Parameters of one model have one mesh, so one all-reduce adds up the squares of all shards.
        squares = torch.stack([norms[number] for number in sharded]).square()
        dist.all_reduce(squares, group=shard_group(tensors[sharded[0]]))
        for number, norm in zip(sharded, squares.sqrt(), strict=True):
            norms[number] = norm
    # One tensor, so that reading the norms waits for the device only once.
    return torch.stack([norm.to(norms[0].device, non_blocking=True) for norm in norms])


def named_values(prefix: str, names: Sequence[str], values: Tensor) -> Mapping[str, float]:
    """Return log entries `<prefix>/<name>`."""
    return {f"{prefix}/{name}": value for name, value in zip(names, values.tolist(), strict=True)}
