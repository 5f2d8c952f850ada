"""What trainers have in common whose ranks have copies of one model: DDP, Accelerate and their kind."""

import dataclasses
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.trainer.coordinated import CoordinatedTrainer
from forgather.ml.trainer.ranks.mutable_buffers import ChangingBuffers
from forgather.ml.trainer.ranks.same_model import require_same_model
from forgather.ml.trainer.step_loss.model_loss import Window


class DataParallelTrainer(CoordinatedTrainer):
    """Ranks with copies of one model, each with its share of every step's batches. With one rank it is `Trainer`."""

    _compared_components: tuple[str, ...] = ("model", "optimizer", "ema")
    """Those whose copies are compared between ranks at every save."""
    _local_model: Any = None
    """The model, compiled or not, without what reduces its gradients."""
    _changing_buffers: ChangingBuffers | None = None

    def _make_mesh(self) -> DeviceMesh:
        return dist.device_mesh.init_device_mesh(
            self.env.device_type, (self.env.world_size,), mesh_dim_names=("data_parallel",)
        )

    def _prepare_model(self) -> None:
        with self._agreement("building the model"):
            super()._prepare_model()
        if self._is_parallel:
            require_same_model(self.unwrapped_model(), self._peers)

    def _compile_model(self) -> None:
        with self._agreement("making the loss"):
            super()._compile_model()

    # --- the step

    def _wrap(self) -> None:
        super()._wrap()
        self._local_model = self._forward_model
        if self._is_parallel:
            self._changing_buffers = ChangingBuffers(self.unwrapped_model(), self._peers)

    def _forward_backward_step(self, window: Window, number: int) -> Tensor:
        if self._changing_buffers is None or self._changing_buffers.are_known:
            return super()._forward_backward_step(window, number)
        with self._changing_buffers.found_out():
            return super()._forward_backward_step(window, number)

    def _backward(self, loss: Tensor) -> None:
        # Gradients are averaged over ranks, but the shares of a step's loss are to be added.
        self._run_backward(loss * self.env.world_size if self._is_parallel else loss)

    def _run_backward(self, loss: Tensor) -> None:
        super()._backward(loss)

    # --- evaluation

    def _evaluated_model(self) -> Any:
        # A wrapper exchanges buffers at each forward pass, of which ranks may have different numbers.
        return self._local_model

    def _evaluate_on(self, dataset: Any) -> dict[str, Any]:
        if self._changing_buffers is not None and getattr(self._forward_model, "forward_sync_buffers", False):
            self._changing_buffers.share()
        return super()._evaluate_on(dataset)

    # --- state

    def _before_save(self) -> None:
        super()._before_save()
        if self._changing_buffers is not None:
            self._changing_buffers.share()

    def get_state_components(self) -> list[StateComponent]:
        components = super().get_state_components()
        if not self._is_parallel:
            return components
        return [self._as_copies(one) if one.key in ("model", "optimizer", "ema") else one for one in components]

    def _as_copies(self, component: StateComponent) -> StateComponent:
        is_compared = component.key in self._compared_components
        return dataclasses.replace(
            component, sharing_pattern=SharingPattern.REPLICATED, validate_replication=is_compared
        )
