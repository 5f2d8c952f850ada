"""Trainer: the training loop for one device, and the base class of all parallel strategies.

Read `_prepare` and `_train_loop` first, then `_train_epoch`, `_train_step` and `_after_step`. The hooks that users and
strategies override follow in the order of a run. Other work is delegated to collaborators in subpackages.
Invariant: hooks that contain collectives run at the same step on every rank.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.components import SharingPattern
from forgather.ml.checkpoint.manager import CheckpointManager
from forgather.ml.distributed.failure_reports import raised_on_all_ranks
from forgather.ml.distributed.watch import EVALUATION_START, OPTIMIZER, note
from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments, TrainingArguments
from forgather.ml.trainer.base_trainer import BaseTrainer
from forgather.ml.trainer.batch_size.finder import BatchFinder
from forgather.ml.trainer.control.desk import Desk
from forgather.ml.trainer.diagnostics.failures import reporting_failures
from forgather.ml.trainer.elastic.attempt import Attempt
from forgather.ml.trainer.elastic.global_batch import settle_global_batch
from forgather.ml.trainer.elastic.preemption_mark import remove_mark
from forgather.ml.trainer.elastic.restart_policy import checkpoint_after_failures
from forgather.ml.trainer.loading.data_order import Part
from forgather.ml.trainer.loop import evaluation_sums as evaluation
from forgather.ml.trainer.loop.evaluation_sums import EvaluationInterrupted
from forgather.ml.trainer.loop.evaluator import Evaluator, Prediction
from forgather.ml.trainer.loop.gradients import clear_gradients
from forgather.ml.trainer.loop.interruptions import finish_interrupted_step, heed_stop_request
from forgather.ml.trainer.loop.loop_state import LoopState
from forgather.ml.trainer.loop.nonfinite import GradientWatch, NonFiniteError, step_if_finite
from forgather.ml.trainer.loop.optimization import Optimization
from forgather.ml.trainer.loop.rank_facts import RankFacts
from forgather.ml.trainer.loop.reporter import Reporter
from forgather.ml.trainer.loop.saver import Saver, warn_of_nothing_to_resume
from forgather.ml.trainer.loop.signals import Aborted, Preempted, StopSignals
from forgather.ml.trainer.loop.step_runner import StepRunner
from forgather.ml.trainer.loop.window import Window, prepared_once, samples_in, surrounded
from forgather.ml.trainer.metrics.named_datasets import first_dataset
from forgather.ml.trainer.periodic_function import PeriodicFunction
from forgather.ml.trainer.ranks.batch_notes import Feed
from forgather.ml.trainer.ranks.parallel_loading import DataLayout
from forgather.ml.trainer.ranks.replica_check import ReplicaCheck
from forgather.ml.trainer.ranks.team import SoloTeam, Team
from forgather.ml.trainer.ranks.watch import watched
from forgather.ml.trainer.recipes import Recipes
from forgather.ml.trainer.samples.columns import UsedColumns
from forgather.ml.trainer.samples.skipped import SkippedData
from forgather.ml.trainer.setup import phases, preparation
from forgather.ml.trainer.setup.declared_state import BY_LOADING, GLOBAL, PER_RANK, Shared
from forgather.ml.trainer.setup.devices import device_type, maybe_cleanup_memory
from forgather.ml.trainer.setup.given_objects import explains_calls
from forgather.ml.trainer.setup.hook_checks import PIPELINE_HOOKS, is_overridden
from forgather.ml.trainer.setup.model_construction import compute_missing_buffers
from forgather.ml.trainer.setup.model_modes import enable_hf_activation_checkpointing, set_train
from forgather.ml.trainer.setup.optimizer_construction import build_scheduler
from forgather.ml.trainer.setup.seeding import seed_everything, seed_of_rank
from forgather.ml.trainer.setup.step_plan import StepPlan, batch_size_of
from forgather.ml.trainer.setup.torch_settings import torch_settings
from forgather.ml.trainer.step_loss.known_masks import to_device
from forgather.ml.trainer.step_loss.model_loss import ModelLoss
from forgather.ml.trainer.step_loss.training_loss import TrainingLoss
from forgather.ml.trainer.trainer_types import (
    BaseDataset,
    EnableCheckpointFnT,
    FusedLossFactoryT,
    LRSchedulerFactoryT,
    OptimizerFactoryT,
    OptimizerT,
    TrainOutput,
)
from forgather.ml.trainer.trainer_types import TrainerState as BaseTrainerState
from forgather.ml.utils import count_parameters, flops_per_token, without_ddp

if TYPE_CHECKING:
    from transformers.trainer_utils import PredictionOutput

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
"""Loss, gradient norm and number of tokens of one step, on this rank."""


@dataclass(kw_only=True)
class TrainerState(BaseTrainerState):
    """Trainer state with the number of processes and the length of an epoch."""

    num_processes: int = 1
    epoch_train_steps: int = 0
    """Optimizer steps per epoch."""


class Trainer(BaseTrainer[TTrainingArgs]):
    """Trainer for one device, and base class of all strategies. All arguments are keyword-only.

    Args:
        optimizer_factory: builds the optimizer from named parameters, or from parameter groups with `optimizer_groups`.
        optimizer_cls_and_kwargs: optimizer class and its options, instead of a factory. Default: AdamW.
        lr_scheduler_factory: builds the learning-rate scheduler from the optimizer. Default: see `lr_scheduler_type`.
        enable_activation_checkpoint_fn: called as fn(rank, module) if `gradient_checkpointing` is True or "full".
            None disables checkpointing.
        fused_loss_factory: builds a fused loss of (hidden states, labels) from the output embeddings.
        optimizer_groups: parameter groups by regular expression, such as {"norms": {"regex": ..., "config": {...}}}.
    """

    handles_ranks: ClassVar[bool] = False
    trains_adapters: ClassVar[bool] = True
    """Whether multiple processes may train with this class. A subclass that synchronises the model itself sets True."""
    unrepeatable: ClassVar[str] = ""
    """Reason why this class cannot repeat a step with smaller batches (`auto_find_batch_size`); empty if it can."""
    # An override of a hook that is never called would silently do nothing, so the constructor rejects it.
    uncalled_hooks: ClassVar[Mapping[str, str]] = dict.fromkeys(
        PIPELINE_HOOKS, "only PipelineTrainer and HybridTrainer split a model into stages. Subclass one of them."
    )
    state_sharing: ClassVar[Mapping[str, Shared]] = {
        "model": GLOBAL,
        "optimizer": GLOBAL,
        "scheduler": GLOBAL,
        "ema": GLOBAL,
        "trainer": GLOBAL,
        # GLOBAL if one process reads for all ranks, else PER_RANK (see `_get_dataset_sharing_pattern`).
        "dataset": BY_LOADING,
        "rng": PER_RANK,
    }

    # Collaborators. `_prepare` builds them, because they depend on the model, the data and the ranks.
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
        self.columns = UsedColumns(self)
        self.skipped = SkippedData()
        self.batch_finder: BatchFinder | None = None
        self.replica_check: ReplicaCheck | None = None
        self.steps = StepRunner(self)
        self.weight_decay_groups = "all"
        self.evaluated_dataset: BaseDataset | None = None
        """Dataset of `eval_dataloader`."""
        self.claim: CheckpointManager | None = None
        self.wanted: bool | str | None = None
        """Requested value of `resume_from_checkpoint`; None if only an evaluation follows."""
        self.resume_path: str | None = None
        self._to_be_loaded: bool | str = False
        self.attempt: Attempt | None = None
        self.rank_facts = RankFacts()
        self._falls_back = self._has_trained = self._loads_for_training = False
        # Overrides of these hooks may act at any step, so `_after_step` must not skip quiet steps.
        hooks = ("_maybe_log_save_evaluate", "_setup_periodic_functions")
        self._decides_at_every_step = any(is_overridden(self, name) for name in hooks)
        self.on_cpu = True
        self.skips_updates = False
        """Whether updates with non-finite gradients are skipped (nonfinite_grad="skip")."""
        self._signals: StopSignals | None = None
        self.desk: Desk | None = None
        """Requests of `forgather control` during `train`; None if `control_socket` is False."""
        phases.refuse(self)
        # Targets are counted on the labels that `_prepare_batch` returns, before the first forward pass. An override
        # may draw random numbers, so it must not run a second time when the step reaches the same micro-batch.
        if is_overridden(self, "_prepare_batch"):
            vars(self)["_prepare_batch"] = prepared_once(self._prepare_batch, lambda: self.window)
        # An override must not have to know that a strategy delays the gradient all-reduce (`no_sync`).
        if is_overridden(self, "_forward_backward_step"):
            vars(self)["_forward_backward_step"] = surrounded(self._forward_backward_step, self._around_micro_batch)

    # --- order of a run

    def _prepare(self, train_dataset: BaseDataset | None, eval_dataset: BaseDataset | None) -> None:
        """Run all set-up before the first training step, or before an evaluation without training."""
        self.recipes.refuse_averages_in_model(
            "Training cannot start inside averaged_weights(). Leave the context first."
        )
        phases.prepare_ranks(self)
        phases.prepare_device(self)
        if self.wanted is not None:
            # Before the model is built: a model that a checkpoint will fill needs no initialised weights.
            self._resolve_checkpoint()
            if self.desk is not None:
                # The output directory is locked now.
                self.desk.open()
        phases.prepare_data(self, train_dataset, eval_dataset)
        self._prepare_model()
        self._follow_model()
        # All ranks build the model with the same seed. From here on, each rank needs its own dropout masks.
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
            # Last: the checkpoint manager reads the declared state, which now refers to the final objects.
            phases.prepare_checkpoints(self)

    def _prepare_loop(self) -> None:
        """Build the trainer state and the collaborators of the loop."""
        phases.prepare_loop(self)

    def _train_loop(self) -> TrainOutput:
        started, first_step, cadence = time.time(), self.state.global_step, self.loop.cadence
        phases.tune_memory(self)
        # A handler of on_train_begin may have made a request, possibly on one rank only.
        self.settle_requests()
        cadence.log, cadence.evaluate, cadence.save = self._setup_periodic_functions()
        # A preempted run saves without the evaluation that was due at its last step.
        finish_interrupted_step(self)
        self.saver.begin()
        if self.args.eval_on_start and self.state.global_step == 0:
            self.evaluator.evaluate_in_training()
        if cadence.is_last_step and self.state.global_step > self.state.epoch_start_step:
            # The checkpoint of the last step may have been saved before the evaluation at the end of its epoch.
            self._end_epoch()
        while cadence.has_more_epochs:
            self._train_epoch()
        return self._finalize_training(started, self.state.global_step - first_step)

    def _train_epoch(self) -> None:
        self.train_dataloader.set_epoch(self.state.raw_epoch)
        self._dispatch_event("on_epoch_begin")
        self.settle_requests()
        batches = self.steps.batches()
        # Checked before the first step too: a resumed run may already be at its end.
        while not self._leaves_epoch() and self.steps.run(batches):
            self._after_step()
        self._end_epoch()

    def _leaves_epoch(self) -> bool:
        control = self.control
        asked = control.should_epoch_stop or control.should_training_stop or control.should_abort_without_save
        return asked or (self.state.global_step >= self.plan.num_steps and self.plan.has_limit)

    def _train_step(self, data_iterator: Iterator[Mapping[str, Any]]) -> StepResult:
        """Run one optimizer step on a window of micro-batches (gradient accumulation)."""
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
        """Clip the gradients of a full window, step the optimizer, clear the gradients, and return their norm."""
        if not self._should_sync_gradients():
            raise RuntimeError(
                f"{type(self).__name__}._should_sync_gradients() is False for the last micro-batch of a step. Ranks would "
                "update their models with different gradients. Return True there, or do not override it."
            )
        if self.batch_finder is not None:
            self.batch_finder.settle()
        note(OPTIMIZER)
        # Clipping compares the true norm with max_grad_norm, so the loss scale has to be removed first.
        self.amp_context.unscale_(self.optimizer)
        grad_norm = self._clip_grad_norm(self.args.max_grad_norm)
        self.saver.before_update()
        self._dispatch_event("on_pre_optimizer_step")
        if self.loop.left_out is not None:
            # The scheduler step of the previous update is still pending (see `_advance_schedule`).
            self.reporter.settle_schedule(self.lr_scheduler)
        if self.skips_updates and grad_norm is not None:
            step_if_finite(self.optimizer, grad_norm)
        elif self.recipes.step_in_backward is None:
            # With fuse_optim_with_backward the update has already happened, during the backward pass.
            self.amp_context.optimizer_step(self.optimizer)
        if self.recipes.average is not None:
            self.recipes.update_average()
        # As in transformers, handlers of this event still see the gradients.
        self._dispatch_event("on_optimizer_step")
        self._advance_schedule()
        clear_gradients(self.optimizer)
        return grad_norm

    def _advance_schedule(self) -> None:
        """Step the learning-rate scheduler, unless GradScaler skipped the optimizer step."""
        # On an accelerator the host does not yet know whether GradScaler skipped the step, and reading the flag now
        # would block. The scheduler step is therefore postponed to the next update, log or checkpoint.
        self.loop.left_out = self.amp_context.left_out
        if self.loop.left_out is None:
            self.lr_scheduler.step()
        elif self.on_cpu:
            self.reporter.settle_schedule(self.lr_scheduler)

    def _after_step(self) -> None:
        """Log, evaluate and save if due. The cadence depends only on the global step, so a resume does not shift it."""
        # `settle` is a collective. Both conditions are equal on all ranks: the first comes from the batch metadata
        # that the ranks exchange, the second counts steps.
        if self.feed.gradients_look_bad or self.loop.interval.wants_settling:
            self.reporter.settle(self.lr_scheduler)
        if self.attempt is not None:
            self.attempt.step = self.state.global_step
        if self.replica_check is not None:
            self.replica_check.look(self.state.global_step)
        self._dispatch_event("on_step_end")
        self.settle_requests("step")
        self.saver.look_after_step()
        cadence = self.loop.cadence
        # Most steps have nothing due. One comparison is cheaper than three periodic functions at every step.
        if self._is_busy() or self.state.global_step >= cadence.quiet_until:
            self._maybe_log_save_evaluate(*self.loop.interval.logs, cadence.log, cadence.evaluate, cadence.save)
            if not self._decides_at_every_step:
                cadence.look_ahead()
        if self.desk is not None and self.feed.num_requests > self.desk.num_served:
            self.desk.serve(self.feed.num_requests)
        if self.feed.stop_signal is not None:
            heed_stop_request(self)

    def _is_busy(self) -> bool:
        """Return whether a callback has a pending request, or an overridden hook must run at every step."""
        control = self.control
        asked = control.should_log or control.should_evaluate or control.should_save
        return asked or control.should_training_stop or control.should_abort_without_save or self._decides_at_every_step

    def _end_epoch(self) -> None:
        """Run the actions of an epoch's end. A step limit inside an epoch leaves that epoch unfinished."""
        # If training ends inside an epoch, the epoch number stays, so that a resume can finish the epoch.
        if not self.loop.cadence.is_last_step or self.loop.cadence.epoch_is_complete:
            self.loop.begin_next_epoch(self.args.gradient_accumulation_steps)
        self.control.should_epoch_stop = False
        self._act_at_epoch_end()
        self._dispatch_event("on_epoch_end")
        self.settle_requests()
        # Serve requests from on_epoch_end now. The next step may never come, or belongs to the next epoch.
        if self.control.should_log:
            self._log_interval()
        if self.control.should_evaluate:
            self.evaluator.evaluate_in_training()
        if self.control.should_save:
            self.saver.save_in_training()
        heed_stop_request(self)

    def _act_at_epoch_end(self) -> None:
        """Log, evaluate and save with the strategy "epoch"."""
        if self.args.logging_strategy == "epoch":
            self._log_interval()
        if self.args.eval_strategy == "epoch" and self.state.global_step >= self.args.eval_delay:
            self.evaluator.evaluate_in_training()
        if self.args.save_strategy == "epoch":
            self.saver.save_in_training()

    # --- set-up hooks, in call order

    def _init_distributed(self) -> None:
        """Set world size and main-process flags from `dist`. Strategies also build their mesh and groups here."""
        env = self.dist
        self.num_processes = env.world_size
        self.is_local_process_zero, self.is_world_process_zero = env.local_rank == 0, env.rank == 0

    def _follow_ranks(self) -> None:
        """Build the mesh and process groups of a strategy, unless `_init_distributed` did so."""

    def _init_device(self) -> None:
        """Choose the device of this process and store it in `args.device`."""
        self.args.device = str(preparation.find_device(self.args, self.dist))

    def _resolve_checkpoint(self) -> None:
        """Lock the output directory, and resolve `args.resume_from_checkpoint` to a path or False."""
        # True means "the newest": a damaged checkpoint is then skipped for an older one. A named path is not.
        self._falls_back = self.args.resume_from_checkpoint is True
        self.claim = phases.claim_output_dir(self)
        path = self.claim.resolve_checkpoint_path(self.args.resume_from_checkpoint)
        if self._falls_back and path is not None:
            chosen = checkpoint_after_failures(self.team, self.claim, self.args.output_dir, path)
            self._falls_back, path = chosen == path, chosen
        self.attempt = Attempt(self.team, self.args.output_dir, path)
        self.args.resume_from_checkpoint = path or False
        self.resume_path = path or self.claim.resolve_checkpoint_path(self._to_be_loaded)

    def _init_dataloaders(self, train_dataset: BaseDataset | None, eval_dataset: BaseDataset | None) -> None:
        """Set `train_dataloader` and `eval_dataloader`. Overrides may set any iterable of dicts."""
        if train_dataset is not None:
            self._loads_for_training = True
            self.train_dataloader = self._get_dataloader(train_dataset, self.args.per_device_train_batch_size)
        if eval_dataset is not None:
            self.load_for_evaluation(first_dataset(eval_dataset))

    def load_for_evaluation(self, dataset: BaseDataset) -> None:
        """Set `eval_dataloader` to a loader of this dataset."""
        # An attribute, because the signature of the hook `_get_dataloader` has no room for the purpose.
        self._loads_for_training = False
        self.eval_dataloader = self._get_dataloader(dataset, self.args.per_device_eval_batch_size)
        self.evaluated_dataset = dataset

    def _get_dataloader(self, dataset: BaseDataset, batch_size: int) -> Any:
        """Return a dataloader of this rank's batches."""
        seed = self.seed if self._loads_for_training else None
        shares = settle_global_batch(self.args, dataset, self.layout) if self._loads_for_training else None
        size = batch_size if shares is None else shares.largest
        lengths = phases.sample_lengths(self, dataset) if self._loads_for_training else None
        dataset, collator = self.columns.of(dataset), self.columns.collator()
        build = preparation.loader_builder(
            self.args, dataset, size, collator, self.device, seed, shares, lengths, self.skipped
        )
        if not self._loads_for_training:
            return self.team.eval_loader(build, dataset, phases.data_layout(self, for_training=False))
        return self.team.train_loader(build, dataset, self.layout, self.args.dataloader_drop_last, self.feed)

    def _update_training_steps(self) -> None:
        """Set `max_steps` and `epoch_train_steps` (batches per epoch) from the arguments and the dataloader length."""
        self.plan = phases.plan_steps(self)
        self.max_steps, self.epoch_train_steps = self.plan.num_steps, self.plan.num_batches

    def _prepare_model(self) -> None:
        """Build the model, or move the given model to the device. A fresh run after training rebuilds it."""
        builds = self.model is None or (self.starts_over and self.model_init is not None)
        for is_own_turn in self.team.turns(builds and phases.builds_on_host(self)):
            # User code may fail on one rank only. An agreement raises its error on all ranks, which would otherwise wait
            # for the failed rank in the next collective. The same holds for the loss and the optimizer.
            with self.team.agreement("building the model"):
                if is_own_turn:
                    phases.make_model(self, builds)

    def _follow_model(self) -> None:
        """Derive the objects of a strategy from the model that `_prepare_model` has set."""

    def _initialize_non_persistent_buffers(self, model: nn.Module) -> None:
        """Compute the non-persistent buffers of a model built on the meta device; no checkpoint contains them."""
        assert self.model_init is not None
        compute_missing_buffers(model, self.model_init)

    def _wrap_loss_fn(self) -> None:
        """Wrap `loss_fn` in a RescaleLoss that weights micro-batches by their number of targets."""
        with self.team.agreement("making the loss"):
            phases.wrap_loss(self)

    def _maybe_get_fused_loss_fn(self, module: nn.Module, default_loss_fn: Any) -> Any:
        """Return the loss that `fused_loss_factory` fuses with the head of `module`, or `default_loss_fn`."""
        return phases.fused_loss(self, module, default_loss_fn)

    def _compile_model(self) -> None:
        """Compile the model for the forward pass. Checkpoints still contain the uncompiled model."""
        with self.team.agreement("compiling the model"):
            self.model = preparation.compiled(self.model, self.args)

    def _init_optimizer(self) -> None:
        """Build `optimizer` and `lr_scheduler`."""
        with self.team.agreement("making the optimizer"):
            phases.init_optimizer(self)

    def _follow_optimizer(self) -> None:
        """Derive checkpoint state, gradient norm and EMA from the optimizer and scheduler of `_init_optimizer`."""
        phases.follow_optimizer(self)

    def _adapt_optimizer(self, optimizer: OptimizerT, named: Sequence[tuple[str, nn.Parameter]]) -> OptimizerT:
        """Return the optimizer with the updates that arguments or a strategy require; called before the schedule."""
        return self.recipes.precise(optimizer, named, self.seed)

    def _init_scheduler(self) -> None:
        args, factory = self.args, self.lr_scheduler_factory
        self.lr_scheduler = build_scheduler(args, self.optimizer, factory, self.plan.schedule_steps)
        assert self.optimization is not None
        self.optimization.follow(self.lr_scheduler, self.optimizer)

    def _wrap(self) -> None:
        """Wrap `model` for a strategy. `self.model` then runs the forward pass. One device needs no wrapper."""

    def _init_state(self) -> BaseTrainerState:
        """Return a state with all counters at zero. Loading a checkpoint sets them."""
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
        """Return a checkpoint manager for the currently declared state."""
        if self.checkpoint_manager is not None:
            # The old manager holds the lock of the output directory.
            self.checkpoint_manager.close()
        skipped = phases.skipped_components(self)
        args = self.args
        return self._make_manager(
            skip_checkpoint_components=skipped,
            on_save_error=args.on_save_error,
            async_save=args.async_save,
            async_save_memory=args.async_save_memory,
        )

    def _setup_periodic_functions(self) -> tuple[PeriodicFunction, PeriodicFunction, PeriodicFunction]:
        """Return the periodic functions of logging, evaluation and saving."""
        cadence = self.loop.cadence
        return cadence.log, cadence.evaluate, cadence.save

    # --- step hooks

    def _prepare_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return model inputs and labels of a micro-batch, on the device."""
        inputs = dict(batch) if self.on_cpu else to_device(batch, self.device)
        return inputs, inputs.pop("labels", None)

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        """Run forward and backward of one micro-batch. Return its contribution to the step's loss, detached."""
        loss = self._forward_step(input_dict, labels)
        self._backward(loss)
        return loss.detach()

    def _around_micro_batch(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for `_forward_backward_step`, including overrides. DDP delays the all-reduce here."""
        return contextlib.nullcontext()

    def _forward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        """Return the weighted loss."""
        # A separate method: the logits go out of scope at its end, which frees them before the backward pass.
        window = self.steps.window
        is_stand_in = window is not None and window.is_stand_in
        with self.amp_context.autocast():
            # Offloading excludes the loss: its activations are needed first in the backward pass.
            with self.recipes.activations(self.unwrapped_model) if self.recipes.offloads else _NO_CONTEXT:
                forward = self.step_loss.forward(self.model, input_dict, labels, is_stand_in)
            if isinstance(self.loss_fn, TrainingLoss):
                return self.loss_fn.of(forward, labels)
            # An override of `_wrap_loss_fn` has set its own RescaleLoss.
            loss: Tensor = self.loss_fn(forward.logits, labels)
            return loss

    def _backward(self, loss: Tensor) -> None:
        self.amp_context.scale_loss(loss).backward()

    def _should_sync_gradients(self) -> bool:
        """Return whether to all-reduce gradients after the current micro-batch: True for the last of a window."""
        window = self.steps.window
        return window is None or window.is_last

    def _clip_grad_norm(self, max_grad_norm: float | None, norm_type: float = 2.0) -> Tensor | None:
        """Return the norm of all gradients, and clip them to `max_grad_norm` if it is set."""
        assert self.optimization is not None
        # Computed even without clipping: the norm is logged and checked for NaN and infinity.
        norm = self.optimization.norm(norm_type)
        self.optimization.clip(max_grad_norm, norm)
        return norm

    def _count_batch_tokens(self, input_dict: dict[str, Any], labels: Any) -> int | Tensor:
        """Return the number of tokens that the model processes. Padding counts, because it costs the same compute."""
        window = self.steps.window
        if window is not None and window.is_stand_in:
            return 0
        for tokens in (input_dict.get("input_ids"), labels):
            if isinstance(tokens, Tensor):
                return tokens.numel()
        return samples_in(input_dict)

    def _agree_on_loss(self, loss: ModelLoss, batch: Mapping[str, Any] | None) -> None:
        """Make all ranks choose the same loss before any rank computes it; collective."""
        self.steps.agree_on_loss(loss, batch)

    # --- logging hooks

    def _maybe_log_save_evaluate(
        self,
        loss_log: list[Tensor],
        total_norm_log: list[Tensor],
        tokens_log: list[int | Tensor],
        periodic_log: PeriodicFunction,
        periodic_eval: PeriodicFunction,
        periodic_save: PeriodicFunction,
    ) -> None:
        """Log, evaluate and save after a step if due or requested by a callback."""
        cadence = self.loop.cadence
        if self.control.should_log or cadence.log_is_due(periodic_log):
            self._log_interval()
        if self.control.should_evaluate or periodic_eval.due(self.state.global_step):
            self.evaluator.evaluate_in_training()
        if self.control.should_save or cadence.is_due(periodic_save):
            self.saver.save_in_training()

    def _log_interval(self) -> None:
        """Log the steps since the last log. This waits for the device, and is a collective."""
        self.control.should_log = False
        interval = self.loop.interval
        if interval.num_steps == 0:
            return
        self._collect_rank_facts()
        self._log_step(*interval.logs)
        if interval.num_steps:
            # An override of `_log_step` did not build the standard record, which would have closed the interval.
            self.reporter.close_interval(self.lr_scheduler)
        self.settle_requests("log")

    def _collect_rank_facts(self) -> None:
        """Collect facts about all ranks for the run record; collective."""
        self.rank_facts.collect_memory(self.team, self.device)

    def _log_step(self, loss_log: list[Tensor], total_norm_log: list[Tensor], tokens_log: list[int | Tensor]) -> None:
        """Log the steps since the last log. The lists hold this rank's values since ranks last summed them."""
        logs = self.reporter.interval_record(self.lr_scheduler)
        # On the CPU the value is 0, so the gather over all ranks is skipped.
        if self.device.type != "cpu" or is_overridden(self, "_distributed_peak_mem"):
            logs["peak_mem_allocated"] = self._distributed_peak_mem(phases.own_peak_memory(self.device))
        self._dispatch_event("on_log_step", logs=logs)
        self.log(logs)

    def _finalize_training(self, start_time: float, speed_metrics_steps: int) -> TrainOutput:
        """Log and save the last steps, load the best model, and log the final record of the run."""
        if self.replica_check is not None:
            self.replica_check.settle()
        if self.args.logging_strategy != "no":
            self._log_interval()
        # Save first: the last checkpoint must contain the last weights, not the best weights.
        if self.args.save_strategy != "no":
            self.saver.save_in_training()
        if self.args.load_best_model_at_end:
            self.load_best_model()
        metrics = self._end_train_loop(start_time, speed_metrics_steps)
        self.log(metrics)
        return TrainOutput(self.state.global_step, metrics)

    def _end_train_loop(self, start_time: float, train_steps: int) -> dict[str, Any]:
        """Return the final record. Rates count only the timed steps of this process."""
        batch_size = self._calculate_effective_batch_size()
        return self.reporter.final_record(self.lr_scheduler, batch_size, self._distributed_tokens)

    def _calculate_effective_batch_size(self) -> int:
        if self.args.global_batch_size is not None:
            return int(self.args.global_batch_size)
        size = batch_size_of(self.train_dataset, self.args.per_device_train_batch_size)
        return size * self.args.gradient_accumulation_steps * self.num_data_parallel_ranks

    def _compute_flops_per_token(self) -> float:
        return flops_per_token(count_parameters(self._whole_model()))

    def reduced_sums(self, sums: Tensor) -> Tensor:
        """Reduce per-step losses (first row), tokens and samples over all data-parallel ranks."""
        return torch.stack([self._distributed_loss(sums[0]), *self._distributed_tokens(sums[1:])])

    def _distributed_loss(self, loss: Tensor) -> Tensor:
        """Return the mean of losses over data-parallel ranks. During an evaluation, return this rank's loss."""
        if self.evaluator.is_running:
            # Overrides of `_prediction_step` call this per batch. The evaluation loop reduces once, at its end.
            return loss
        total = self.team.sum(loss)
        return total if self._num_averaged == 1 else total / self._num_averaged

    def _distributed_tokens(self, tokens: Tensor) -> Tensor:
        """Sum each count over all data-parallel ranks."""
        return self.team.sum(tokens)

    def _distributed_norms(self, norms: list[float]) -> list[float]:
        """Combine gradient norms of the ranks. They are equal unless a strategy lets ranks update independently."""
        return norms

    def _distributed_peak_mem(self, local_peak: int) -> list[int]:
        """Gather the peak memory of each rank's accelerator."""
        return self.team.gather(local_peak)

    # --- evaluation

    def evaluate(
        self, eval_dataset: BaseDataset | None = None, *, use_ema: bool = False, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Return the token-weighted loss over the evaluation set, other metrics, and the run time.

        A dict of datasets is evaluated one by one, with metrics such as `eval_<name>_loss`. `use_ema` evaluates the EMA
        weights (`ema_decay`) instead of the current weights. The names of all metrics start with `metric_key_prefix`.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        with torch_settings(self.args), watched(self, EVALUATION_START), raised_on_all_ranks(EvaluationInterrupted):
            self._prepare_to_evaluate(dataset)
            return self.evaluator.evaluate(dataset, use_ema, metric_key_prefix)

    def predict(self, test_dataset: BaseDataset, metric_key_prefix: str = "test") -> "PredictionOutput":
        """Return the predictions and labels of all samples, in the order of the dataset, and metrics; on every rank.

        The dataset needs no labels. Without labels, the result has neither a loss nor other metrics.
        """
        with torch_settings(self.args), watched(self, EVALUATION_START), raised_on_all_ranks(EvaluationInterrupted):
            self._prepare_to_evaluate(test_dataset)
            return self.evaluator.predict_dataset(test_dataset, metric_key_prefix)

    def _eval_loop(self) -> dict[str, Any]:
        """Sum the losses of at most `max_eval_steps` evaluation batches, and return the metrics."""
        sums = self.evaluator.run()
        if sums.num_batches == 0:
            raise RuntimeError(self._zero_eval_batches_message())
        return self.evaluator.metrics(sums)

    def _prediction_step(self, input_dict: dict[str, Any], labels: Any) -> Prediction:
        """Return the mean loss of a batch on this rank, with logits and labels for callbacks."""
        with self.amp_context.autocast():
            # Bypass DDP: it broadcasts buffers at each forward pass, and ranks may have unequal numbers of batches.
            return self.evaluator.predict(without_ddp(self.model), input_dict, labels)

    def _shared_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Broadcast the metrics of rank 0, including entries added by callbacks; collective."""
        # The best model is chosen by these metrics. If they differed, ranks would keep different checkpoints.
        return self.team.broadcast(metrics)

    def _before_evaluation(self) -> None:
        """Synchronise state that an evaluation reads."""

    def _common_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with equal weights on all replicas, for strategies that let them differ between steps."""
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
        """Return whether rank 0 reads the evaluation batches for all ranks."""
        return self._dispatches(for_training=False)

    # --- checkpoints

    def _before_save(self) -> None:
        """Synchronise state that must be identical on all ranks."""
        self.recipes.refuse_averages_in_model(
            "A checkpoint cannot be saved inside averaged_weights(): it would contain the EMA instead of the weights. "
            "Leave the context first. save_model() exports the EMA."
        )
        if self.replica_check is not None:
            self.replica_check.settle()
        # A checkpoint stores counters summed over all ranks, and no pending scheduler step.
        self.reporter.settle(self.lr_scheduler)
        self._require_whole_state()
        assert self.optimization is not None
        self.saver.look_at_weights(self.optimization.parameters, self.optimization.names)

    def save_model(self, output_dir: str | None = None, *, use_ema: bool = False) -> None:
        """Write only the model, as a Hugging Face directory. The default is the output directory.

        `use_ema` writes the EMA weights (`ema_decay`) instead of the current weights.
        """
        self._prepare_to_evaluate(self.eval_dataset)
        if self.checkpoint_manager is not None and not self.checkpoint_manager.is_read_only:
            self.saver.finish_save()
        with self.averaged_weights() if use_ema else self._common_weights():
            super().save_model(output_dir)

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that swaps the EMA weights (`ema_decay`) into the model. All ranks must enter it."""
        return self.recipes.averaged_weights()

    def load_best_model(self) -> None:
        """Load weights and EMA of the best checkpoint, if any."""
        self.saver.load_best()

    def _load_weights_of(self, checkpoint_path: str) -> None:
        from forgather.ml.checkpoint.weights.module_weights import load_checkpoint as load_weights

        load_weights(checkpoint_path, self.unwrapped_model())

    def save_checkpoint(self, checkpoint_path: str | None = None) -> str:
        with raised_on_all_ranks():
            if self.checkpoint_manager is not None and not self.checkpoint_manager.is_read_only:
                # Its on_save must not be taken for that of this save.
                self.saver.finish_save()
            return super().save_checkpoint(checkpoint_path)

    def _announce_save(self, path: str) -> None:
        with self.team.final_agreement("reporting a save"):
            super()._announce_save(path)

    def _save_now(self, checkpoint_path: str | None) -> str:
        return self.saver.save_by_hand(checkpoint_path)

    def _restore(self, resume: bool | str) -> None:
        if resume is False:
            self.recipes.begin_average()
            # Retention must not delete checkpoints of an older run in this directory. The first save moves them away.
            self.checkpoint_manager.begin_fresh_run()
        else:
            self._load_to_resume(None if self._falls_back else str(resume))
            # Another batch size or number of ranks: the steps of the checkpoint have another size.
            if self.state.epoch_train_steps != self.plan.steps_per_epoch:
                phases.replan(self)
        # Gradients of a given model, or of an interrupted step, must not enter the first step.
        self.optimizer.zero_grad()

    def _load_state(self, path: str | None) -> str | None:
        self.recipes.forget_average()
        loaded = super()._load_state(path)
        self._after_load()
        if loaded is not None and not self.checkpoint_manager.is_own(loaded):
            # The best checkpoint of another run is not in this output directory.
            self.loop.forget_best()
        # A checkpoint without EMA leaves none: the average then starts at the loaded weights.
        self.recipes.begin_average()
        return loaded

    def _after_load(self) -> None:
        """Synchronise weights that a loaded state has set on some ranks only."""

    def _built_statefuls(self) -> dict[str, object]:
        own = self.optimization
        statefuls = super()._built_statefuls()
        statefuls["optimizer"] = None if own is None else own.state
        statefuls["scheduler"] = None if own is None else own.scheduler_state
        return {**statefuls, "ema": self.recipes.average} if self.args.ema_decay is not None else statefuls

    def _get_dataset_sharing_pattern(self) -> SharingPattern:
        layout = self._data_layout(for_training=True)
        # A rank that reads the full stream is at the same position as all others. Else each has its own. Steps of
        # global_batch_size samples have one position in the global order, so that checkpoints move between world sizes.
        reads_whole = layout.splits_streams or layout.part.num_parts == 1 or self.args.global_batch_size is not None
        return SharingPattern.GLOBAL if reads_whole else SharingPattern.PER_RANK

    def state_dict(self) -> dict[str, Any]:
        return self.loop.state_dict()

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise `CheckpointLoadError` for a state that `load_state_dict` cannot use."""
        self.loop.check_state_dict(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loop.load_state_dict(state_dict)

    def import_progress(self, global_step: int, epoch: float) -> None:
        self.loop.import_progress(global_step, epoch)

    def _own_state_keys(self) -> set[str]:
        return set(self.loop.state_dict())

    # --- run context

    @contextlib.contextmanager
    def _run_context(self) -> Iterator[None]:
        with (
            watched(self),
            StopSignals() as self._signals,
            preparation.run_settings(self.args) as self._run,
        ):
            self.desk = Desk(self, self._signals) if self.args.control_socket else None
            self._run.push(self._close_after)
            # Innermost: a failing rank leaves its report before its connections close.
            with reporting_failures(self), raised_on_all_ranks(Preempted, Aborted):
                yield

    def _finish_saves(self) -> None:
        self.saver.finish_save()

    def _end_training(self) -> None:
        with self.team.final_agreement("ending the training"):
            super()._end_training()

    def _enter_training(self, was_asked_to_resume: bool) -> None:
        if was_asked_to_resume and self.args.resume_from_checkpoint is False and self.team.rank == 0:
            warn_of_nothing_to_resume(self.args.output_dir, self.args.checkpoint_layout)
        self._has_trained = True
        if self.team.rank == 0:
            remove_mark(self.args.output_dir)
        if self.attempt is not None:
            self.attempt.begin(self.state.global_step)
        if self.recipes.step_in_backward is not None:
            self._run.enter_context(self.recipes.step_in_backward)
        if self.args.detect_anomaly:
            self._run.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=True))
        self._run.enter_context(set_train(self._forward_modules(), True))

    def _close_after(self, error_type: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Stop dataloader workers and release the output directory, after success or failure."""
        self._signals = None
        desk, self.desk = self.desk, None
        if desk is not None:
            # Before the lock is released: the next job puts its own socket into the directory.
            desk.close(error)
        if self.train_dataloader is not None:
            # Closing in order is a collective. After an error on this rank, the other ranks may never reach it.
            in_order = error_type is None or issubclass(error_type, (Preempted, Aborted))
            self.team.close_loader(self.train_dataloader, in_order)
        # Until the manager exists, `claim` holds the lock of the output directory.
        for manager in (self.claim, self.checkpoint_manager):
            if manager is not None:
                manager.close()

    def _prepare_to_train(self, resume: bool | str) -> None:
        self.wanted = resume
        super()._prepare_to_train(resume)

    def _prepare_to_evaluate(self, eval_dataset: BaseDataset | None) -> None:
        if self._is_prepared and not self.team.is_open:
            # An error closed the links between ranks, and the caller caught it.
            phases.prepare_ranks(self)
            self.evaluator.dataset = None
        self.wanted = self.wanted if self._is_prepared else None
        super()._prepare_to_evaluate(eval_dataset)

    def _prepare_to_load(self, wanted: bool | str) -> None:
        # The optimizer's parameter groups depend on the checkpoint, so set-up must know the path before loading.
        self._to_be_loaded = wanted
        try:
            self._prepare_to_train(False)
        finally:
            self._to_be_loaded = False

    def settle_requests(self, occasion: str = "epoch") -> None:
        """Combine the callback requests of all ranks in `control`; collective."""
        # The occasions are equal on all ranks. Without callbacks that make requests, this costs no message.
        if occasion in self.team.occasions:
            self.team.settle(self.control, self.callbacks, occasion)

    def received_signal(self) -> str | None:
        """Return the name of the stop signal that this process received, or None."""
        return None if self._signals is None else self._signals.received

    # --- properties, and hooks that describe a strategy

    @property
    def device(self) -> torch.device:
        return torch.device(self.args.device or "cpu")

    @device.setter
    def device(self, device: torch.device) -> None:
        self.args.device = str(device)
        self.on_cpu = device.type == "cpu"

    @property
    def window(self) -> Window | None:
        """Micro-batches of the current step; None outside a step."""
        return self.steps.window

    @property
    def gradient_accumulation_step(self) -> int | None:  # type: ignore[override]
        """Index of the current micro-batch within its step, from 1; None outside a step."""
        return None if self.window is None else self.window.number + 1

    @property
    def num_data_parallel_ranks(self) -> int:
        """Number of data-parallel ranks, which train on different batches of a step."""
        return self.layout.part.num_parts

    @property
    def starts_over(self) -> bool:
        """Whether a trainer that has already trained starts a fresh run."""
        return self._has_trained and self.wanted is not None and self.args.resume_from_checkpoint is False

    @property
    def loads_weights(self) -> bool:
        """Whether a checkpoint will overwrite the initial weights."""
        resumes = self.wanted is not None and self.args.resume_from_checkpoint is not False
        return resumes and preparation.loads_component(self.args, "model")

    @property
    def _num_averaged(self) -> int:
        """Number of ranks over which the strategy averages gradients.

        The loss is multiplied by it, because the ranks' contributions to a step's loss must be summed, not averaged.
        """
        return self.team.size

    def _make_amp_context(self) -> AMPContext:
        return AMPContext(self.args.mixed_precision, self.device.type)

    def _device_type(self) -> str:
        """Return the device type that `_init_device` will choose."""
        return device_type(self.args)

    def _common_settings(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks, as text. They decide which collectives run."""
        return phases.settings_of(self)

    def _dispatches(self, for_training: bool) -> bool:
        """Return whether rank 0 reads the batches for all ranks."""
        return False

    def _data_layout(self, for_training: bool) -> DataLayout:
        """Return how the batches of a step are divided between ranks."""
        return DataLayout(Part(self.team.rank, self.team.size))

    def _forward_modules(self) -> nn.Module:
        """Return the module that runs forward passes on this rank."""
        model: nn.Module = self.model
        return model

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of this rank for the optimizer, under their FQNs in the full model."""
        return list(self.unwrapped_model().named_parameters())

    def _names_elsewhere(self) -> list[str]:
        """Return the FQNs of trainable parameters that only other ranks hold."""
        return []

    def _whole_model(self) -> nn.Module:
        """Return the full model. Some of its weights may exist only on other ranks."""
        return self.unwrapped_model()

    def _is_pipeline_parallel(self) -> bool:
        return False

    def _is_model_parallel(self) -> bool:
        return False


def optimizer_hook(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Step a one-parameter optimizer as soon as the gradient is accumulated, then free the gradient."""
    optimizer.step()
    optimizer.zero_grad()
