"""Optimizer companions: optimizer state by FQN, gradient norm, clipping, and the state of the learning-rate schedule.

They are rebuilt together whenever a hook replaces the optimizer or its schedule, so that checkpoints and norms always
refer to the objects in use. `phases` creates them; `Trainer` uses them in every step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.state.optimizer_state import OptimizerState
from forgather.ml.optim.gradient_trace import GradientTrace
from forgather.ml.trainer.loop.gradients import GradientNorm, is_narrow
from forgather.ml.trainer.loop.scheduler_state import SchedulerState
from forgather.ml.trainer.trainer_types import LRSchedulerT, OptimizerT

NormFunction = Callable[[float], Tensor]


class Optimization:
    """Objects derived from the current optimizer and learning-rate schedule."""

    def __init__(
        self, optimizer: OptimizerT, named: Sequence[tuple[str, nn.Parameter]], knows_configuration: bool
    ) -> None:
        """`knows_configuration`: whether the group options are still the values that the user configured."""
        self.made_for = optimizer
        self.state = OptimizerState(optimizer, named, knows_configuration=knows_configuration)
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in named}
        self.parameters: list[Tensor] = [one for group in optimizer.param_groups for one in group["params"]]
        self.is_narrow = any(map(is_narrow, self.parameters))
        """Whether some gradients have fewer than 32 bits, such as bfloat16."""
        self.norm: NormFunction = GradientNorm(self.parameters)
        self.scheduler_state: SchedulerState | None = None

    def follow(self, lr_scheduler: LRSchedulerT, optimizer: OptimizerT) -> None:
        """Use this schedule for checkpoints from now on."""
        self.scheduler_state = SchedulerState(lr_scheduler, optimizer)

    def clip(self, max_grad_norm: float | None, norm: Tensor) -> None:
        if max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, max_grad_norm, norm)

    @property
    def trace(self) -> GradientTrace | None:
        """The values behind the last gradient norm, or None if the norm function keeps none."""
        return getattr(self.norm, "trace", None)


def require_parameters_of(model: nn.Module, optimizer: OptimizerT, owner: str) -> None:
    """Raise ValueError if `_wrap` left an optimizer with parameters that are not in the model."""
    # Wrappers such as fully_shard replace parameters. An optimizer of the old ones would train nothing, unnoticed.
    own = {id(parameter) for parameter in model.parameters()}
    strangers = sum(id(one) not in own for group in optimizer.param_groups for one in group["params"])
    if strangers:
        raise ValueError(
            f"{strangers} parameters of the optimizer are not in self.model after {owner}._wrap(), so their updates would have "
            "no effect. Call wrappers that replace parameters, such as fully_shard, in _prepare_model, which runs before the "
            "optimizer is created; or create a new optimizer in _wrap."
        )
