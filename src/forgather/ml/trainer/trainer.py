"""The loop that all trainers share, on one device.

Read `_prepare` and `_train_loop` first, then `_train_epoch`, `_train_step` and `_after_step`. The hooks that users and
strategies override follow in the order of a run. Everything that is not the loop lives in files named after it.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.components import SharingPattern
from forgather.ml.checkpoint.manager import CheckpointManager
from forgather.ml.checkpoint.weights.module_weights import load_checkpoint as load_weights
from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments, TrainingArguments
from forgather.ml.trainer.base_trainer import BaseTrainer
from forgather.ml.trainer.loading.data_order import Part
from forgather.ml.trainer.loop import evaluation_sums as evaluation
from forgather.ml.trainer.loop.evaluator import Evaluator, Prediction
from forgather.ml.trainer.loop.gradients import clear_gradients
from forgather.ml.trainer.loop.interruptions import finish_interrupted_step, heed_stop_request
from forgather.ml.trainer.loop.loop_state import LoopState
from forgather.ml.trainer.loop.nonfinite import GradientWatch, NonFiniteError, step_if_finite
from forgather.ml.trainer.loop.optimization import Optimization
from forgather.ml.trainer.loop.reporter import Reporter
from forgather.ml.trainer.loop.saver import Saver, warn_of_nothing_to_resume
from forgather.ml.trainer.loop.signals import Preempted, StopSignals
from forgather.ml.trainer.loop.step_runner import StepRunner
from forgather.ml.trainer.loop.window import Window, prepared_once, samples_in, surrounded
from forgather.ml.trainer.periodic_function import PeriodicFunction
from forgather.ml.trainer.ranks.batch_notes import Feed
from forgather.ml.trainer.ranks.parallel_loading import DataLayout
from forgather.ml.trainer.ranks.team import SoloTeam, Team
from forgather.ml.trainer.recipes import Recipes
from forgather.ml.trainer.setup import phases, preparation
from forgather.ml.trainer.setup.declared_state import BY_LOADING, GLOBAL, PER_RANK, Shared
from forgather.ml.trainer.setup.devices import device_type, maybe_cleanup_memory, moved
from forgather.ml.trainer.setup.given_objects import explains_calls
from forgather.ml.trainer.setup.hook_checks import PIPELINE_HOOKS, is_overridden
from forgather.ml.trainer.setup.model_construction import compute_missing_buffers
from forgather.ml.trainer.setup.model_modes import enable_hf_activation_checkpointing, set_train
from forgather.ml.trainer.setup.optimizer_construction import build_scheduler
from forgather.ml.trainer.setup.seeding import seed_everything, seed_of_rank
from forgather.ml.trainer.setup.step_plan import StepPlan, batch_size_of
from forgather.ml.trainer.setup.torch_settings import torch_settings
from forgather.ml.trainer.step_loss.model_loss import ModelLoss
from forgather.ml.trainer.step_loss.training_loss import TrainingLoss
from forgather.ml.trainer.trainer_types import (
    BaseDataset,
    EnableCheckpointFnT,
    FusedLossFactoryT,
    LRSchedulerFactoryT,
    OptimizerFactoryT,
    TrainOutput,
)
from forgather.ml.trainer.trainer_types import TrainerState as BaseTrainerState
from forgather.ml.utils import count_parameters, flops_per_token, without_ddp

__all__ = [
    "MinimalTrainingArguments",
    "NonFiniteError",
    "Trainer",
    "TrainerState",
    "TrainingArguments",
    "enable_hf_activation_checkpointing",
    "maybe_cleanup_memory",
    "optimizer_hook",
    "set_train",
]

TTrainingArgs = TypeVar("TTrainingArgs", bound=TrainingArguments)
_NO_CONTEXT: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
StepResult = tuple[Tensor, Tensor | None, int | Tensor]
"""Loss, gradient norm and tokens of a step, on this rank."""


@dataclass(kw_only=True)
class TrainerState(BaseTrainerState):
    """Adds what the arithmetic of batches needs."""

    num_processes: int = 1
    epoch_train_steps: int = 0
    """Optimizer steps per epoch."""


class Trainer(BaseTrainer[TTrainingArgs]):
    """Trains on one device; the base of all strategies. Takes its arguments by name.

    Args:
        optimizer_factory: makes the optimizer from named parameters, or from parameter groups with `optimizer_groups`.
        optimizer_cls_and_kwargs: class and options of the optimizer, in place of a factory; the default is AdamW.
        lr_scheduler_factory: makes the schedule from the optimizer; the default follows `lr_scheduler_type`.
        enable_activation_checkpoint_fn: called as fn(rank, module) with `gradient_checkpointing=True`; None switches it off.
        fused_loss_factory: makes a loss of hidden states and labels from the output embeddings, fused with the head.
        optimizer_groups: parameter groups by regular expression, such as {"norms": {"regex": ..., "config": {...}}}.
    """

    handles_ranks: ClassVar[bool] = False
    """Whether several processes may train with it: a subclass that synchronises their models itself sets it to True."""
    uncalled_hooks: ClassVar[Mapping[str, str]] = dict.fromkeys(
        PIPELINE_HOOKS, "only PipelineTrainer and HybridTrainer divide a model into stages. Derive from one of them."
    )
    state_sharing: ClassVar[Mapping[str, Shared]] = {
        "model": GLOBAL,
        "optimizer": GLOBAL,
        "scheduler": GLOBAL,
        "ema": GLOBAL,
        "trainer": GLOBAL,
        "dataset": BY_LOADING,
        "rng": PER_RANK,
    }

    # Collaborators, made in preparation.
    layout: DataLayout
    feed: Feed
    step_loss: ModelLoss
    watch: GradientWatch
    loop: LoopState
    reporter: Reporter
    evaluator: Evaluator
    saver: Saver
    seed: int
    fused_head: nn.Module

    @explains_calls
    def __init__(
        self,
        *,
        args: TTrainingArgs | Mapping[str, Any],
        optimizer_factory: OptimizerFactoryT | None = None,
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        lr_scheduler_factory: LRSchedulerFactoryT | None = None,
        enable_activation_checkpoint_fn: EnableCheckpointFnT | None = enable_hf_activation_checkpointing,
        fused_loss_factory: FusedLossFactoryT | None = None,
        optimizer_groups: Mapping[str, Any] | None = None,
        **base_kwargs: Any,
    ) -> None:
        super().__init__(args, **base_kwargs)
        self.given = replace(self.given, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs)
        self.optimizer_factory, self.lr_scheduler_factory = optimizer_factory, lr_scheduler_factory
        self.enable_activation_checkpoint_fn = enable_activation_checkpoint_fn
        self.fused_loss_factory, self.use_fused_loss = fused_loss_factory, fused_loss_factory is not None
        self.optimizer_groups = optimizer_groups
        self.team: Team = SoloTeam()
        self.recipes = Recipes(self.args)
        self.plan = StepPlan(self.args, None)
        self.optimization: Optimization | None = None
        self.steps = StepRunner(self)
        self.weight_decay_groups = "all"
        self.evaluated_dataset: BaseDataset | None = None
        """The dataset of `eval_dataloader`."""
        self.claim: CheckpointManager | None = None
        self.wanted: bool | str | None = None
        """What preparation is asked to resume; None if only an evaluation follows."""
        self.resume_path: str | None = None
        self._to_be_loaded: bool | str = False
        self._falls_back = self._has_trained = self._loads_for_training = False
        hooks = ("_maybe_log_save_evaluate", "_setup_periodic_functions")
        self._decides_at_every_step = any(is_overridden(self, name) for name in hooks)
        self.on_cpu = True
        self.skips_updates = False
        """Whether a step without finite gradients is left out (nonfinite_grad="skip")."""
        self._signals: StopSignals | None = None
        phases.refuse(self)
        if is_overridden(self, "_prepare_batch"):
            vars(self)["_prepare_batch"] = prepared_once(self._prepare_batch, lambda: self.window)
        if is_overridden(self, "_forward_backward_step"):
            vars(self)["_forward_backward_step"] = surrounded(self._forward_backward_step, self._around_micro_batch)

    # --- the order of things

    def _prepare(self, train_dataset: BaseDataset | None, eval_dataset: BaseDataset | None) -> None:
        """Everything up to the first step of training; without training, up to an evaluation."""
        self.recipes.refuse_averages_in_model(
            "Training cannot begin inside averaged_weights(): leave the context first."
        )
        phases.prepare_ranks(self)
        phases.prepare_device(self)
        if self.wanted is not None:
            self._resolve_checkpoint()
        phases.prepare_data(self, train_dataset, eval_dataset)
        self._prepare_model()
        self._follow_model()
        seed_everything(seed_of_rank(self.seed, self.team.rank))
        self._wrap_loss_fn()
        phases.follow_loss(self)
        if self.args.torch_compile:
            self._compile_model()
        if self.wanted is not None:
            self._init_optimizer()
            self._follow_optimizer()
        phases.wrap(self)
        self._prepare_loop()
        if self.wanted is not None:
            phases.prepare_checkpoints(self)

    def _prepare_loop(self) -> None:
        """Make the state and the collaborators of the loop."""
        phases.prepare_loop(self)

    def _train_loop(self) -> TrainOutput:
        started, first_step, cadence = time.time(), self.state.global_step, self.loop.cadence
        self.settle_requests()
        cadence.log, cadence.evaluate, cadence.save = self._setup_periodic_functions()
        finish_interrupted_step(self)
        if cadence.is_last_step and self.state.global_step > self.state.epoch_start_step:
            # A checkpoint of the last step may be older than the evaluation that belongs to the end of its epoch.
            self._end_epoch()
        while cadence.has_more_epochs:
            self._train_epoch()
        return self._finalize_training(started, self.state.global_step - first_step)

    def _train_epoch(self) -> None:
        self.train_dataloader.set_epoch(self.state.raw_epoch)
        self._dispatch_event("on_epoch_begin")
        self.settle_requests()
        batches = self.steps.batches()
        while not self._leaves_epoch() and self.steps.run(batches):
            self._after_step()
        self._end_epoch()

    def _leaves_epoch(self) -> bool:
        control = self.control
        asked = control.should_epoch_stop or control.should_training_stop or control.should_abort_without_save
        return asked or (self.state.global_step >= self.plan.num_steps and self.plan.has_limit)

    def _train_step(self, data_iterator: Iterator[Mapping[str, Any]]) -> StepResult:
        """One optimizer update from a window of micro-batches."""
        loss: Tensor | None = None
        tokens: int | Tensor = 0
        window_is_done = False
        while not window_is_done:
            input_dict, labels = self._prepare_batch(next(data_iterator))
            self._dispatch_event("on_forward_backward_begin")
            share = self._forward_backward_step(input_dict, labels)
            self._dispatch_event("on_forward_backward_end")
            tokens = tokens + self._count_batch_tokens(input_dict, labels)
            loss = share if loss is None else loss + share
            window_is_done = self.steps.window is None or self.steps.window.is_last
        assert loss is not None
        return loss, self._update_parameters(), tokens

    def _update_parameters(self) -> Tensor | None:
        """Clip, step and clear the gradients of a whole window; returns their norm."""
        if not self._should_sync_gradients():
            raise RuntimeError(
                f"{type(self).__name__}._should_sync_gradients() is False for the last micro-batch of a step, so that ranks "
                "would update their models by gradients of their own. Return True there, or do not override it."
            )
        self.amp_context.unscale_(self.optimizer)
        grad_norm = self._clip_grad_norm(self.args.max_grad_norm)
        self._dispatch_event("on_pre_optimizer_step")
        if self.loop.left_out is not None:
            self.reporter.settle_schedule(self.lr_scheduler)
        if self.skips_updates and grad_norm is not None:
            step_if_finite(self.optimizer, grad_norm)
        elif self.recipes.step_in_backward is None:
            self.amp_context.optimizer_step(self.optimizer)
        if self.recipes.average is not None:
            self.recipes.update_average()
        self._dispatch_event("on_optimizer_step")
        self._advance_schedule()
        clear_gradients(self.optimizer)
        return grad_norm

    def _advance_schedule(self) -> None:
        """A step of the schedule, unless GradScaler has left out the optimizer's."""
        self.loop.left_out = self.amp_context.left_out
        if self.loop.left_out is None:
            self.lr_scheduler.step()
        elif self.on_cpu:
            self.reporter.settle_schedule(self.lr_scheduler)

    def _after_step(self) -> None:
        """Log, evaluate and save where that is due; the cadence depends on the global step alone."""
        if self.feed.gradients_look_bad or self.loop.interval.wants_settling:
            self.reporter.settle(self.lr_scheduler)
        self._dispatch_event("on_step_end")
        self.settle_requests("step")
        cadence = self.loop.cadence
        if self._is_busy() or self.state.global_step >= cadence.quiet_until:
            self._maybe_log_save_evaluate(*self.loop.interval.logs, cadence.log, cadence.evaluate, cadence.save)
            if not self._decides_at_every_step:
                cadence.look_ahead()
        if self.feed.stop_signal is not None:
            heed_stop_request(self)

    def _is_busy(self) -> bool:
        """Whether a callback asks for something, or a user's hook decides at every step."""
        control = self.control
        asked = control.should_log or control.should_evaluate or control.should_save
        return asked or control.should_training_stop or control.should_abort_without_save or self._decides_at_every_step

    def _end_epoch(self) -> None:
        """What happens once per epoch; a step limit in the middle of one leaves the epoch unfinished."""
        if not self.loop.cadence.is_last_step or self.loop.cadence.epoch_is_complete:
            self.loop.begin_next_epoch(self.args.gradient_accumulation_steps)
        self.control.should_epoch_stop = False
        if self.args.logging_strategy == "epoch":
            self._log_interval()
        if self.args.eval_strategy == "epoch" and self.state.global_step >= self.args.eval_delay:
            self.evaluator.evaluate_in_training()
        if self.args.save_strategy == "epoch":
            self.saver.save_in_training()
        self._dispatch_event("on_epoch_end")
        self.settle_requests()
        # What callbacks asked for at the end of the epoch is done now, and not only after the next step.
        if self.control.should_log:
            self._log_interval()
        if self.control.should_evaluate:
            self.evaluator.evaluate_in_training()
        if self.control.should_save:
            self.saver.save_in_training()
        heed_stop_request(self)

    # --- hooks of preparation, in its order

    def _init_distributed(self) -> None:
        """Find this process's place in the job; strategies also make their mesh and groups here."""
        env = self.dist
        self.num_processes = env.world_size
        self.is_local_process_zero, self.is_world_process_zero = env.local_rank == 0, env.rank == 0

    def _follow_ranks(self) -> None:
        """Make the mesh and the groups of a strategy, unless `_init_distributed` has."""

    def _init_device(self) -> None:
        """Choose the device of this process: `args.device`."""
        self.args.device = str(preparation.find_device(self.args, self.dist))

    def _resolve_checkpoint(self) -> None:
        """Take the output directory, and make `args.resume_from_checkpoint` a path or False."""
        self._falls_back = self.args.resume_from_checkpoint is True
        self.claim = phases.claim_output_dir(self)
        path = self.claim.resolve_checkpoint_path(self.args.resume_from_checkpoint)
        self.args.resume_from_checkpoint = path or False
        self.resume_path = path or self.claim.resolve_checkpoint_path(self._to_be_loaded)

    def _init_dataloaders(self, train_dataset: BaseDataset | None, eval_dataset: BaseDataset | None) -> None:
        """Set `train_dataloader` and `eval_dataloader`; any iterable of dicts is accepted."""
        if train_dataset is not None:
            self._loads_for_training = True
            self.train_dataloader = self._get_dataloader(train_dataset, self.args.per_device_train_batch_size)
        if eval_dataset is not None:
            self.load_for_evaluation(eval_dataset)

    def load_for_evaluation(self, dataset: BaseDataset) -> None:
        """Make `eval_dataloader` the loader of this dataset."""
        self._loads_for_training = False
        self.eval_dataloader = self._get_dataloader(dataset, self.args.per_device_eval_batch_size)
        self.evaluated_dataset = dataset

    def _get_dataloader(self, dataset: BaseDataset, batch_size: int) -> Any:
        """A loader of the batches of this rank."""
        seed = self.seed if self._loads_for_training else None
        build = preparation.loader_builder(self.args, dataset, batch_size, self.data_collator, self.device, seed)
        if not self._loads_for_training:
            return self.team.eval_loader(build, dataset, self._data_layout(for_training=False))
        return self.team.train_loader(build, dataset, self.layout, self.args.dataloader_drop_last, self.feed)

    def _update_training_steps(self) -> None:
        """Set `max_steps` and `epoch_train_steps` (batches per epoch) from the arguments and the length of the data."""
        self.plan = phases.plan_steps(self)
        self.max_steps, self.epoch_train_steps = self.plan.num_steps, self.plan.num_batches

    def _prepare_model(self) -> None:
        """Build the model unless it was given, and put it on the device; a fresh start begins with a fresh one."""
        with self.team.agreement("building the model"):
            if self.model is None or (self.starts_over and self.model_init is not None):
                self.model = phases.build(self, self.loads_weights)
            else:
                self.model = self.unwrapped_model().to(self.device)
            self.recipes.apply_layers(self.model)
            if self.args.gradient_checkpointing and self.enable_activation_checkpoint_fn is not None:
                self.enable_activation_checkpoint_fn(self.team.rank, self.model)

    def _follow_model(self) -> None:
        """Derive what a strategy needs of the model that `_prepare_model` has set."""

    def _initialize_non_persistent_buffers(self, model: nn.Module) -> None:
        """Compute buffers that no checkpoint holds, of a model that was built on the meta device."""
        assert self.model_init is not None
        compute_missing_buffers(model, self.model_init)

    def _wrap_loss_fn(self) -> None:
        """Make `loss_fn` a RescaleLoss that weighs micro-batches by their targets."""
        with self.team.agreement("making the loss"):
            phases.wrap_loss(self)

    def _maybe_get_fused_loss_fn(self, module: nn.Module, default_loss_fn: Any) -> Any:
        """The loss that is fused with the head of `module`, if `fused_loss_factory` makes one; else the default."""
        return phases.fused_loss(self, module, default_loss_fn)

    def _compile_model(self) -> None:
        """Compile the model for the forward pass; what is checkpointed stays the model itself."""
        self.model = torch.compile(self.model, **preparation.compile_options(self.args))

    def _init_optimizer(self) -> None:
        """Make `optimizer` and `lr_scheduler`."""
        with self.team.agreement("making the optimizer"):
            phases.init_optimizer(self)

    def _follow_optimizer(self) -> None:
        """Derive what belongs to the optimizer and schedule that `_init_optimizer` has set."""
        phases.follow_optimizer(self)

    def _init_scheduler(self) -> None:
        args, factory = self.args, self.lr_scheduler_factory
        self.lr_scheduler = build_scheduler(args, self.optimizer, factory, self.plan.schedule_steps)
        assert self.optimization is not None
        self.optimization.follow(self.lr_scheduler, self.optimizer)

    def _wrap(self) -> None:
        """Wrap `model` for a strategy; what it leaves in `self.model` runs forward. One device needs nothing."""

    def _init_state(self) -> BaseTrainerState:
        """Counters at zero; a checkpoint sets them to where training was."""
        args = self.args
        return TrainerState(
            logging_steps=args.logging_steps,
            eval_steps=args.eval_steps,
            save_steps=args.save_steps,
            train_batch_size=batch_size_of(self.train_dataset, args.per_device_train_batch_size),
            max_steps=self.max_steps or 0,
            num_train_epochs=args.num_train_epochs,
            max_eval_steps=args.max_eval_steps,
            is_local_process_zero=bool(self.is_local_process_zero),
            is_world_process_zero=bool(self.is_world_process_zero),
            num_processes=self.num_processes or 1,
            epoch_train_steps=self.plan.steps_per_epoch,
        )

    def _init_checkpoint_manager(self) -> CheckpointManager:
        """Make the manager for the state as it is declared now."""
        if self.checkpoint_manager is not None:
            self.checkpoint_manager.close()
        skipped = phases.skipped_components(self)
        return self._make_manager(skip_checkpoint_components=skipped, on_save_error=self.args.on_save_error)

    def _setup_periodic_functions(self) -> tuple[PeriodicFunction, PeriodicFunction, PeriodicFunction]:
        """When to log, to evaluate and to save."""
        cadence = self.loop.cadence
        return cadence.log, cadence.evaluate, cadence.save

    # --- hooks of the step

    def _prepare_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The inputs of the model and the labels, on the device."""
        inputs = dict(batch) if self.on_cpu else dict(moved(batch, self.device))
        return inputs, inputs.pop("labels", None)

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        """Forward and backward of one micro-batch; returns its share of the step's loss, detached."""
        loss = self._forward_step(input_dict, labels)
        self._backward(loss)
        return loss.detach()

    def _around_micro_batch(self) -> contextlib.AbstractContextManager[None]:
        """The context of `_forward_backward_step`, also of an override: strategies delay the reduction of gradients."""
        return contextlib.nullcontext()

    def _forward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        """The weighed loss; the logits are let go before the backward pass, which needs the memory."""
        window = self.steps.window
        is_stand_in = window is not None and window.is_stand_in
        with self.amp_context.autocast():
            with self.recipes.activations(self.unwrapped_model) if self.recipes.offloads else _NO_CONTEXT:
                forward = self.step_loss.forward(self.model, input_dict, labels, is_stand_in)
            if isinstance(self.loss_fn, TrainingLoss):
                return self.loss_fn.of(forward, labels)
            loss: Tensor = self.loss_fn(forward.logits, labels)
            return loss

    def _backward(self, loss: Tensor) -> None:
        self.amp_context.scale_loss(loss).backward()

    def _should_sync_gradients(self) -> bool:
        """Whether gradients of the present micro-batch are to be reduced: True for the last one of a window."""
        window = self.steps.window
        return window is None or window.is_last

    def _clip_grad_norm(self, max_grad_norm: float | None, norm_type: float = 2.0) -> Tensor | None:
        """The norm of all gradients, which are scaled down to `max_grad_norm` if it is given and exceeded."""
        assert self.optimization is not None
        norm = self.optimization.norm(norm_type)
        self.optimization.clip(max_grad_norm, norm)
        return norm

    def _count_batch_tokens(self, input_dict: dict[str, Any], labels: Any) -> int | Tensor:
        """The number of tokens the model processes for a batch; padding counts, since it costs the same."""
        window = self.steps.window
        if window is not None and window.is_stand_in:
            return 0
        for tokens in (input_dict.get("input_ids"), labels):
            if isinstance(tokens, Tensor):
                return tokens.numel()
        return samples_in(input_dict)

    def _agree_on_loss(self, loss: ModelLoss, batch: Mapping[str, Any] | None) -> None:
        """Let all ranks choose the same loss, before one of them computes it."""
        self.steps.agree_on_loss(loss, batch)

    # --- hooks of logs

    def _maybe_log_save_evaluate(
        self,
        loss_log: list[Tensor],
        total_norm_log: list[Tensor],
        tokens_log: list[int | Tensor],
        periodic_log: PeriodicFunction,
        periodic_eval: PeriodicFunction,
        periodic_save: PeriodicFunction,
    ) -> None:
        """Log, evaluate and save after a step, where that is due or a callback has asked for it."""
        cadence = self.loop.cadence
        if self.control.should_log or cadence.log_is_due(periodic_log):
            self._log_interval()
        if self.control.should_evaluate or periodic_eval.due(self.state.global_step):
            self.evaluator.evaluate_in_training()
        if self.control.should_save or cadence.is_due(periodic_save):
            self.saver.save_in_training()

    def _log_interval(self) -> None:
        """Log what happened since the last log; here, and only here, the device is waited for."""
        self.control.should_log = False
        interval = self.loop.interval
        if interval.num_steps == 0:
            return
        self._log_step(*interval.logs)
        if interval.num_steps:
            # An override has logged in its own way.
            self.reporter.close_interval(self.lr_scheduler)
        self.settle_requests("log")

    def _log_step(self, loss_log: list[Tensor], total_norm_log: list[Tensor], tokens_log: list[int | Tensor]) -> None:
        """Log the steps since the last log; the lists have this rank's values since ranks last settled them."""
        logs = self.reporter.interval_record(self.lr_scheduler)
        if self.device.type != "cpu" or is_overridden(self, "_distributed_peak_mem"):
            logs["peak_mem_allocated"] = self._distributed_peak_mem(phases.own_peak_memory(self.device))
        self._dispatch_event("on_log_step", logs=logs)
        self.log(logs)

    def _finalize_training(self, start_time: float, speed_metrics_steps: int) -> TrainOutput:
        """Log and save the last steps, load the best model, and log the record of the whole run."""
        if self.args.logging_strategy != "no":
            self._log_interval()
        if self.args.save_strategy != "no":
            self.saver.save_in_training()
        if self.args.load_best_model_at_end:
            self.load_best_model()
        metrics = self._end_train_loop(start_time, speed_metrics_steps)
        self.log(metrics)
        return TrainOutput(self.state.global_step, metrics)

    def _end_train_loop(self, start_time: float, train_steps: int) -> dict[str, Any]:
        """The final record; rates count the timed steps of this process only."""
        batch_size = self._calculate_effective_batch_size()
        return self.reporter.final_record(self.lr_scheduler, batch_size, self._distributed_tokens)

    def _calculate_effective_batch_size(self) -> int:
        size = batch_size_of(self.train_dataset, self.args.per_device_train_batch_size)
        return size * self.args.gradient_accumulation_steps * self.num_data_parallel_ranks

    def _compute_flops_per_token(self) -> float:
        return flops_per_token(count_parameters(self._whole_model()))

    def reduced_sums(self, sums: Tensor) -> Tensor:
        """Losses (the first row), tokens and samples of steps, over all data-parallel ranks."""
        return torch.stack([self._distributed_loss(sums[0]), *self._distributed_tokens(sums[1:])])

    def _distributed_loss(self, loss: Tensor) -> Tensor:
        """Mean of losses over data-parallel ranks; inside an evaluation the loss of this rank."""
        if self.evaluator.is_running:
            return loss
        total = self.team.sum(loss)
        return total if self._num_averaged == 1 else total / self._num_averaged

    def _distributed_tokens(self, tokens: Tensor) -> Tensor:
        """Counts, each summed over all data-parallel ranks."""
        return self.team.sum(tokens)

    def _distributed_norms(self, norms: list[float]) -> list[float]:
        """Norms of gradients, which are the same on every rank unless a strategy lets ranks step on their own."""
        return norms

    def _distributed_peak_mem(self, local_peak: int) -> list[int]:
        """Peak memory of each rank's accelerator."""
        return self.team.gather(local_peak)

    # --- evaluation

    def evaluate(self, eval_dataset: BaseDataset | None = None, *, use_ema: bool = False) -> dict[str, Any]:
        """The token-weighted loss over the evaluation set, and how long it took.

        `use_ema` evaluates the averaged weights (`ema_decay`) in place of the present ones.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        with torch_settings(self.args):
            self._prepare_to_evaluate(dataset)
            return self.evaluator.evaluate(dataset, use_ema)

    def _eval_loop(self) -> dict[str, Any]:
        """Add up the losses of the evaluation batches, `max_eval_steps` of them at most."""
        sums = self.evaluator.run()
        if sums.num_batches == 0:
            raise RuntimeError(self._zero_eval_batches_message())
        return self.evaluator.metrics(sums)

    def _prediction_step(self, input_dict: dict[str, Any], labels: Any) -> Prediction:
        """The mean loss of a batch on this rank, with logits and labels for callbacks."""
        with self.amp_context.autocast():
            # Without DDP, which exchanges buffers at each forward pass: ranks may have different numbers of batches.
            return self.evaluator.predict(without_ddp(self.model), input_dict, labels)

    def _shared_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The same on every rank, also those that callbacks have added, since the best model is chosen by them."""
        return self.team.broadcast(metrics)

    def _before_evaluation(self) -> None:
        """Synchronise state that an evaluation reads."""

    def _common_weights(self) -> contextlib.AbstractContextManager[None]:
        """In this context replicas have the same weights, also where a strategy lets them differ between steps."""
        return contextlib.nullcontext()

    def _zero_eval_batches_message(self) -> str:
        header, settings = self.evaluator.explain_no_batches(self._evaluation_settings())
        return self._format_zero_eval_batches_diagnostic(header, settings, evaluation.no_batches_explanation())

    def _format_zero_eval_batches_diagnostic(self, header: str, settings: Mapping[str, Any], explanation: str) -> str:
        return evaluation.no_batches_diagnostic(header, settings, explanation)

    def _evaluation_settings(self) -> dict[str, Any]:
        names = ("per_device_eval_batch_size", "dataloader_drop_last", "max_eval_steps")
        return {**{name: getattr(self.args, name) for name in names}, **self.team.settings}

    def _dispatch_eval_batches(self) -> bool:
        """Whether rank 0 reads the evaluation batches for all."""
        return self._dispatches(for_training=False)

    # --- checkpoints

    def _before_save(self) -> None:
        """Synchronise state that must be identical on all ranks."""
        self.recipes.refuse_averages_in_model(
            "A checkpoint cannot be saved inside averaged_weights(): it would have the average in place of the weights. "
            "Leave the context first; save_model() exports the average."
        )
        self.reporter.settle(self.lr_scheduler)
        self._require_whole_state()
        assert self.optimization is not None
        self.saver.look_at_weights(self.optimization.parameters, self.optimization.names)

    def save_model(self, output_dir: str | None = None, *, use_ema: bool = False) -> None:
        """Write the model alone, as a Hugging Face directory, by default into the output directory.

        `use_ema` writes the averaged weights (`ema_decay`) in place of the present ones.
        """
        self._prepare_to_evaluate(self.eval_dataset)
        with self.averaged_weights() if use_ema else self._common_weights():
            super().save_model(output_dir)

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """In this context the model has the averaged weights, which `ema_decay` keeps; on all ranks at once."""
        return self.recipes.averaged_weights()

    def load_best_model(self) -> None:
        """Load the weights of the best checkpoint, if there is one, and the average that belongs to them."""
        self.saver.load_best()

    def _load_weights_of(self, checkpoint_path: str) -> None:
        load_weights(checkpoint_path, self.unwrapped_model())

    def _save_now(self, checkpoint_path: str | None) -> str:
        return self.saver.save_by_hand(checkpoint_path)

    def _restore(self, resume: bool | str) -> None:
        if resume is False:
            self.recipes.begin_average()
            self.checkpoint_manager.begin_fresh_run()
        else:
            self._load_to_resume(None if self._falls_back else str(resume))
            if self.state.epoch_train_steps != self.plan.steps_per_epoch:
                phases.replan(self)
        # Gradients that a model brings along, or an interrupted step left, must not enter the first step.
        self.optimizer.zero_grad()

    def _load_state(self, path: str | None) -> str | None:
        self.recipes.forget_average()
        loaded = super()._load_state(path)
        if loaded is not None and not self.checkpoint_manager.is_own(loaded):
            self.loop.forget_best()
        self.recipes.begin_average()
        return loaded

    def _built_statefuls(self) -> dict[str, object]:
        own = self.optimization
        statefuls = super()._built_statefuls()
        statefuls["optimizer"] = None if own is None else own.state
        statefuls["scheduler"] = None if own is None else own.scheduler_state
        return {**statefuls, "ema": self.recipes.average} if self.args.ema_decay is not None else statefuls

    def _get_dataset_sharing_pattern(self) -> SharingPattern:
        layout = self._data_layout(for_training=True)
        reads_whole = layout.splits_streams or layout.part.num_parts == 1
        return SharingPattern.GLOBAL if reads_whole else SharingPattern.PER_RANK

    def state_dict(self) -> dict[str, Any]:
        return self.loop.state_dict()

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a `CheckpointLoadError` for a state that `load_state_dict` could not use."""
        self.loop.check_state_dict(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loop.load_state_dict(state_dict)

    def import_progress(self, global_step: int, epoch: float) -> None:
        self.loop.import_progress(global_step, epoch)

    def _own_state_keys(self) -> set[str]:
        return set(self.loop.state_dict())

    # --- a run

    @contextlib.contextmanager
    def _run_context(self) -> Iterator[None]:
        with StopSignals() as self._signals, preparation.run_settings(self.args) as self._run:
            self._run.push(self._close_after)
            yield

    def _enter_training(self, was_asked_to_resume: bool) -> None:
        if was_asked_to_resume and self.args.resume_from_checkpoint is False and self.team.rank == 0:
            warn_of_nothing_to_resume(self.args.output_dir)
        self._has_trained = True
        if self.recipes.step_in_backward is not None:
            self._run.enter_context(self.recipes.step_in_backward)
        if self.args.detect_anomaly:
            self._run.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=True))
        self._run.enter_context(set_train(self._forward_modules(), True))

    def _close_after(self, error_type: type[BaseException] | None, *_: object) -> None:
        """End workers and give the output directory back, however training ended."""
        self._signals = None
        if self.train_dataloader is not None:
            in_order = error_type is None or issubclass(error_type, Preempted)
            self.team.close_loader(self.train_dataloader, in_order)
        for manager in (self.claim, self.checkpoint_manager):
            if manager is not None:
                manager.close()

    def _prepare_to_train(self, resume: bool | str) -> None:
        self.wanted = resume
        super()._prepare_to_train(resume)

    def _prepare_to_evaluate(self, eval_dataset: BaseDataset | None) -> None:
        if self._is_prepared and not self.team.is_open:
            # Closed by an error that the caller has survived.
            phases.prepare_ranks(self)
            self.evaluator.dataset = None
        self.wanted = self.wanted if self._is_prepared else None
        super()._prepare_to_evaluate(eval_dataset)

    def _prepare_to_load(self, wanted: bool | str) -> None:
        # The checkpoint that is about to be loaded decides on the groups of the optimizer too.
        self._to_be_loaded = wanted
        try:
            self._prepare_to_train(False)
        finally:
            self._to_be_loaded = False

    def settle_requests(self, occasion: str = "epoch") -> None:
        """Make what callbacks have asked for the same on every rank; collective."""
        if occasion in self.team.occasions:
            self.team.settle(self.control, self.callbacks, occasion)

    def received_signal(self) -> str | None:
        """The stop signal that this process has received."""
        return None if self._signals is None else self._signals.received

    # --- properties and what strategies say of themselves

    @property
    def device(self) -> torch.device:
        return torch.device(self.args.device or "cpu")

    @device.setter
    def device(self, device: torch.device) -> None:
        self.args.device = str(device)
        self.on_cpu = device.type == "cpu"

    @property
    def window(self) -> Window | None:
        """The micro-batches of the present step; None outside of steps."""
        return self.steps.window

    @property
    def gradient_accumulation_step(self) -> int | None:  # type: ignore[override]
        """The number of the present micro-batch within its step, from 1; None outside of steps."""
        return None if self.window is None else self.window.number + 1

    @property
    def num_data_parallel_ranks(self) -> int:
        """How many ranks share the batches of a step."""
        return self.layout.part.num_parts

    @property
    def starts_over(self) -> bool:
        """Whether a trainer that has trained begins a fresh run."""
        return self._has_trained and self.wanted is not None and self.args.resume_from_checkpoint is False

    @property
    def loads_weights(self) -> bool:
        """Whether a checkpoint will fill the model."""
        resumes = self.wanted is not None and self.args.resume_from_checkpoint is not False
        return resumes and preparation.loads_component(self.args, "model")

    @property
    def _num_averaged(self) -> int:
        """The number of ranks that gradients are averaged over: shares of a step's loss are to be added."""
        return self.team.size

    def _make_amp_context(self) -> AMPContext:
        return AMPContext(self.args.mixed_precision, self.device.type)

    def _device_type(self) -> str:
        """The kind of device that `_init_device` will choose."""
        return device_type(self.args)

    def _common_settings(self) -> dict[str, str]:
        """What all ranks must have alike, as text: it decides which collectives they reach."""
        return phases.settings_of(self)

    def _dispatches(self, for_training: bool) -> bool:
        """Whether rank 0 reads the batches for all."""
        return False

    def _data_layout(self, for_training: bool) -> DataLayout:
        """How the batches of a step are divided between ranks."""
        return DataLayout(Part(self.team.rank, self.team.size))

    def _forward_modules(self) -> nn.Module:
        """The module that runs forward passes on this rank."""
        model: nn.Module = self.model
        return model

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer is given: the parameters of this rank, under the names of the whole model."""
        return list(self.unwrapped_model().named_parameters())

    def _names_elsewhere(self) -> list[str]:
        """The trainable parameters of the model that only other ranks have."""
        return []

    def _whole_model(self) -> nn.Module:
        """The model with all its modules; other ranks may have the values of some."""
        return self.unwrapped_model()

    def _is_pipeline_parallel(self) -> bool:
        return False

    def _is_model_parallel(self) -> bool:
        return False


def optimizer_hook(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Step an optimizer of one parameter as soon as its gradient is accumulated, and let go of the gradient."""
    optimizer.step()
    optimizer.zero_grad()
