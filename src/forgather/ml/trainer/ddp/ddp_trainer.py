"""Data parallelism by torch's DistributedDataParallel."""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.trainer.data_parallel import DataParallelTrainer
from forgather.ml.trainer.ddp.ddp_arguments import DDPArguments, DDPTrainingArguments, PostLocalSGDArguments
from forgather.ml.trainer.ddp.post_local_sgd import PostLocalSGD
from forgather.ml.trainer.ddp.unused_parameters import explained, refuse_unused
from forgather.ml.trainer.step_loss.fused import fused_loss_refusal
from forgather.ml.trainer.step_loss.model_loss import Window

__all__ = ["DDPArguments", "DDPTrainer", "DDPTrainingArguments", "PostLocalSGDArguments"]

logger = logging.getLogger(__name__)


class DDPTrainer(DataParallelTrainer):
    """Every rank has the whole model; gradients are averaged over ranks while they are computed.

    Ranks with batch b train exactly like one device with as many times b on the same order of the data.
    """

    arguments_class = DDPTrainingArguments
    _component_keys = (*DataParallelTrainer._component_keys, "post_local_sgd")
    _local_sgd: PostLocalSGD | None = None
    _has_reduced = False

    def _dispatches(self, for_training: bool) -> bool:
        choice = self.args.dispatch_batches if for_training else self.args.dispatch_eval_batches
        return bool(self.args.dispatch_batches if choice is None else choice)

    @property
    def _ddp_group(self) -> ProcessGroup:
        assert self._mesh is not None
        return self._mesh.get_group()

    def get_process_groups(self) -> dict[str, ProcessGroup]:
        return {"ddp_group": self._ddp_group} if self._is_parallel else {}

    # --- preparation

    def _refuse_recipes(self) -> None:
        super()._refuse_recipes()
        if self._fused_loss_factory is not None and self.args.ddp.find_unused_parameters:
            raise fused_loss_refusal("ddp.find_unused_parameters=True")

    def _wrap(self) -> None:
        super()._wrap()
        trains = any(parameter.requires_grad for parameter in self.unwrapped_model().parameters())
        if not self._is_parallel or not trains:
            return
        options = dict(vars(self.args.ddp))
        self._forward_model = DistributedDataParallel(
            self._local_model,
            device_ids=None if self.device.type == "cpu" else [self.device],
            process_group=self._ddp_group,
            # The name that torch has for it now.
            forward_sync_buffers=options.pop("broadcast_buffers"),
            **options,
        )
        if self.args.post_local_sgd.enabled and self.optimizer is not None:
            self._local_sgd = PostLocalSGD(self.args.post_local_sgd, self._ddp_group, self._peers, self.env)
            self.optimizer = self._local_sgd.attach(self._forward_model, self.optimizer)

    # --- the step

    def _forward_backward_step(self, window: Window, number: int) -> Tensor:
        self._is_last_micro_batch = number + 1 == len(window.batches)
        if not isinstance(self._forward_model, DistributedDataParallel):
            return super()._forward_backward_step(window, number)
        if self._should_sync_gradients():
            return self._reduced_step(window, number)
        with self._forward_model.no_sync():
            return super()._forward_backward_step(window, number)

    def _reduced_step(self, window: Window, number: int) -> Tensor:
        try:
            return super()._forward_backward_step(window, number)
        except RuntimeError as error:
            better = explained(error, self.unwrapped_model())
            if better is None:
                raise
            raise better from error

    def _run_backward(self, loss: Tensor) -> None:
        super()._run_backward(loss)
        is_reduced = isinstance(self._forward_model, DistributedDataParallel) and self._should_sync_gradients()
        if self._has_reduced or not is_reduced:
            return
        # Before any talk with other ranks: one that has gradients for all still waits for those of this one.
        if not (self.args.ddp.find_unused_parameters or self.args.ddp.static_graph):
            refuse_unused(self.unwrapped_model())
        self._has_reduced = True

    def _should_sync_gradients(self) -> bool:
        return self._is_last_micro_batch

    def _distributed_norms(self, norms: list[float]) -> list[float]:
        if self._local_sgd is None or not norms:
            return norms
        # Each rank has gradients of its own between two averages.
        squares = self._sum(torch.tensor(norms, dtype=torch.float64).square())
        return (squares / self.env.world_size).sqrt().tolist()

    # --- state and evaluation

    def _common_weights(self) -> contextlib.AbstractContextManager[None]:
        return super()._common_weights() if self._local_sgd is None else self._local_sgd.averaged_weights()

    def _before_save(self) -> None:
        super()._before_save()
        if self._local_sgd is not None:
            self._local_sgd.average_replicas()

    def get_state_components(self) -> list[StateComponent]:
        components = super().get_state_components()
        if self._local_sgd is not None:
            components.append(
                StateComponent("post_local_sgd", self._local_sgd, SharingPattern.REPLICATED, required=False)
            )
        return components

    def _evaluation_settings(self) -> dict[str, Any]:
        names = ("dispatch_batches", "dispatch_eval_batches")
        settings: Mapping[str, Any] = {name: getattr(self.args, name) for name in names}
        effective = {"dispatch_eval_batches (effective)": self._dispatches(for_training=False)}
        return {**settings, **effective, **super()._evaluation_settings()}
