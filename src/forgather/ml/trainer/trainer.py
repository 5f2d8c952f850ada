"""The loop that all trainers share, on one device.

Read `_prepare` and `_train_loop` first, then `_train_epoch`, `_train_step` and `_after_step`. The hooks that strategies and
users override follow below them. Everything that is not the loop lives in files named after it.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.components import SharingPattern, select_components
from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.checkpoint.manager import CheckpointManager
from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.checkpoint.weights.module_weights import load_checkpoint as load_weights
from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments, TrainingArguments
from forgather.ml.trainer.base_trainer import BaseTrainer, TArgs
from forgather.ml.trainer.loading.builders import adapted_loader, is_resumable
from forgather.ml.trainer.loading.data_order import Part
from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.loop import evaluation_sums as evaluation
from forgather.ml.trainer.loop.cadence import Cadence
from forgather.ml.trainer.loop.evaluation_sums import EvaluationInterrupted, samples_in
from forgather.ml.trainer.loop.evaluator import Evaluator
from forgather.ml.trainer.loop.gradients import clear_gradients
from forgather.ml.trainer.loop.index_errors import explaining_indices, warn_of_large_ids
from forgather.ml.trainer.loop.loop_state import LoopState
from forgather.ml.trainer.loop.metrics import IntervalMetrics, SpeedMeter
from forgather.ml.trainer.loop.nonfinite import GradientFinding, GradientWatch, NonFiniteError, step_if_finite
from forgather.ml.trainer.loop.optimization import Optimization, require_parameters_of
from forgather.ml.trainer.loop.reporter import Reporter
from forgather.ml.trainer.loop.saver import Saver, warn_of_nothing_to_resume
from forgather.ml.trainer.loop.scheduler_state import kept_rates
from forgather.ml.trainer.loop.signals import Preempted, StopSignals
from forgather.ml.trainer.loop.window import StepBatches, Window, checked_result, prepared_once
from forgather.ml.trainer.periodic_function import PeriodicFunction
from forgather.ml.trainer.ranks.parallel_loading import DataLayout, warn_of_equal_batches
from forgather.ml.trainer.ranks.team import SoloTeam, Team, make_team
from forgather.ml.trainer.recipes import Recipes
from forgather.ml.trainer.setup import preparation, requirements
from forgather.ml.trainer.setup.declared_state import BY_LOADING, GLOBAL, PER_RANK, Shared
from forgather.ml.trainer.setup.devices import device_type, maybe_cleanup_memory, moved
from forgather.ml.trainer.setup.given_objects import explains_calls
from forgather.ml.trainer.setup.hook_checks import PIPELINE_HOOKS, is_overridden
from forgather.ml.trainer.setup.model_construction import build_model, compute_missing_buffers, refuse_quantized
from forgather.ml.trainer.setup.model_modes import enable_hf_activation_checkpointing, set_train
from forgather.ml.trainer.setup.optimizer_construction import build_scheduler
from forgather.ml.trainer.setup.rank_settings import common_settings, require_strategy_for_ranks
from forgather.ml.trainer.setup.seeding import choose_seed, seed_everything, seed_of_rank
from forgather.ml.trainer.setup.step_plan import StepPlan, batch_size_of, warn_of_unknown_end
from forgather.ml.trainer.setup.torch_settings import torch_settings
from forgather.ml.trainer.step_loss.fused import HiddenStatesModel, make_fused_loss, output_embeddings_of
from forgather.ml.trainer.step_loss.model_loss import Finding, ModelLoss
from forgather.ml.trainer.step_loss.training_loss import TrainingLoss
from forgather.ml.trainer.trainer_types import (
    BaseDataset,
    EnableCheckpointFnT,
    FusedLossFactoryT,
    LRSchedulerFactoryT,
    OptimizerFactoryT,
    TrainerControl,
    TrainOutput,
)
from forgather.ml.trainer.trainer_types import TrainerState as BaseTrainerState
from forgather.ml.utils import count_parameters, flops_per_token, without_ddp

logger = logging.getLogger(__name__)

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


@dataclass(kw_only=True)
class TrainerState(BaseTrainerState):
    """Adds what the arithmetic of batches needs."""

    num_processes: int = 1
    epoch_train_steps: int = 0
    """Optimizer steps per epoch."""


class Trainer(BaseTrainer[TArgs]):
    """Trains on one device; the base of all strategies.

    Arguments by name, beside those of `BaseTrainer`:

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

    @explains_calls
    def __init__(
        self,
        *,
        args: TArgs | Mapping[str, Any],
        optimizer_factory: OptimizerFactoryT | None = None,
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        lr_scheduler_factory: LRSchedulerFactoryT | None = None,
        enable_activation_checkpoint_fn: EnableCheckpointFnT | None = enable_hf_activation_checkpointing,
        fused_loss_factory: FusedLossFactoryT | None = None,
        optimizer_groups: Mapping[str, Any] | None = None,
        **base_kwargs: Any,
    ) -> None:
        super().__init__(args, **base_kwargs)
        self._given = replace(self._given, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs)
        self.optimizer_factory = optimizer_factory
        self.lr_scheduler_factory = lr_scheduler_factory
        self.enable_activation_checkpoint_fn = enable_activation_checkpoint_fn
        self.fused_loss_factory = fused_loss_factory
        self.use_fused_loss = fused_loss_factory is not None
        self.optimizer_groups = optimizer_groups
        self.max_steps: int | None = None
        self.epoch_train_steps: int | None = None
        self.num_processes: int | None = None
        self.is_local_process_zero: bool | None = None
        self.is_world_process_zero: bool | None = None
        self._flops_per_token: float | None = None
        self.team: Team = SoloTeam()
        self.recipes = Recipes(self.args)
        self.plan = StepPlan(self.args, None)
        self.window: Window | None = None
        self.optimization: Optimization | None = None
        self.weight_decay_groups = "all"
        self._evaluated_dataset: object = None
        self._claim: CheckpointManager | None = None
        self._wanted: bool | str | None = None
        self._to_be_loaded: bool | str = False
        self._has_trained = False
        self._has_warned_of_weights = False
        self._compares_batches = False
        self._loads_for_training = False
        self._falls_back = False
        self._resume_path: str | None = None
        self._signals: StopSignals | None = None
        self._refuse()
        if is_overridden(self, "_prepare_batch"):
            vars(self)["_prepare_batch"] = prepared_once(self._prepare_batch, lambda: self.window)

    def _refuse(self) -> None:
        """Refuse what cannot work, before anything is built."""
        functions = {
            "optimizer_factory": self.optimizer_factory,
            "lr_scheduler_factory": self.lr_scheduler_factory,
            "enable_activation_checkpoint_fn": self.enable_activation_checkpoint_fn,
            "fused_loss_factory": self.fused_loss_factory,
        }
        requirements.require_builder(self.args, self.model_init is not None)
        requirements.require_eval_dataset(self.args, self.eval_dataset is not None)
        requirements.require_functions(functions, self.optimizer_groups, self._given)
        declares = is_overridden(self, "get_state_components")
        requirements.require_components(self.args, None if declares else tuple(self.state_sharing))
        requirements.require_recipes(
            self.args,
            self._given,
            self.optimizer_groups,
            self.use_fused_loss,
            self._device_type(),
            self._is_pipeline_parallel(),
        )

    # --- preparation, in its order

    def _prepare(self, train_dataset: BaseDataset | None, eval_dataset: BaseDataset | None) -> None:
        """Everything up to the first step of training; without training, up to an evaluation."""
        self.recipes.refuse_averages_in_model(
            "Training cannot begin inside averaged_weights(): leave the context first."
        )
        self._prepare_ranks()
        self._prepare_device()
        if self._wanted is not None:
            self._resolve_checkpoint()
        self._prepare_data(train_dataset, eval_dataset)
        self._prepare_model()
        seed_everything(seed_of_rank(self.seed, self.dist.rank))
        self._wrap_loss_fn()
        if self.args.torch_compile:
            self._compile_model()
        if self._wanted is not None:
            self._init_optimizer()
            self._follow_optimizer()
        self._wrap()
        self._prepare_loop()
        if self._wanted is not None:
            require_parameters_of(self._forward_modules(), self.optimizer, type(self).__name__)
            self.checkpoint_manager = self._init_checkpoint_manager()
            self._prepare_saver()

    def _prepare_to_train(self, resume: bool | str) -> None:
        self._wanted = resume
        super()._prepare_to_train(resume)

    def _prepare_to_evaluate(self, eval_dataset: BaseDataset | None) -> None:
        if self._is_prepared and not self.team.is_open:
            # Closed by an error that the caller has survived.
            self._prepare_ranks()
            self._evaluated_dataset = None
        self._wanted = self._wanted if self._is_prepared else None
        super()._prepare_to_evaluate(eval_dataset)

    def _prepare_to_load(self, wanted: bool | str) -> None:
        # The checkpoint that is about to be loaded decides on the groups of the optimizer too.
        self._to_be_loaded = wanted
        try:
            self._prepare_to_train(False)
        finally:
            self._to_be_loaded = False

    def _prepare_ranks(self) -> None:
        require_strategy_for_ranks(type(self), self.distributed_env)
        self.team = make_team(self.dist, self.team, type(self).__name__)
        self.team.require_equal_settings(self._common_settings)
        self.team.open()
        self.num_processes, self.is_local_process_zero, self.is_world_process_zero = 1, True, True
        self._init_distributed()

    def _prepare_device(self) -> None:
        with self.team.agreement("choosing the device"):
            self._init_device()
        preparation.use_device(self.device)
        preparation.use_precision(self.args)
        self.amp_context = self._make_amp_context()
        self.recipes.use_device(self.device)
        self.seed = self.team.broadcast(choose_seed(self.args.seed))
        self.rng = RNGState(self.seed)
        seed_everything(self.seed)

    def _prepare_data(self, train_dataset: BaseDataset | None, eval_dataset: BaseDataset | None) -> None:
        self.layout = self._data_layout(for_training=True)
        self.control = TrainerControl()
        self.watch = GradientWatch(self.args.nonfinite_grad, self.amp_context.has_loss_scale)
        early = not is_overridden(self, "_prepare_batch")
        self.feed = self.team.feed(lambda: self.step_loss, self.watch, self._received_signal, self.layout, early)
        self.train_dataloader = self.eval_dataloader = self._evaluated_dataset = None
        self._init_dataloaders(train_dataset if self._wanted is not None else None, eval_dataset)
        self._adapt_train_loader()
        if self._wanted is not None and self.train_dataloader is None:
            raise ValueError("train() needs a train_dataset; only evaluate() works without one.")
        self._compares_batches = self.team.compares_batches(self.train_dataset, self.layout)
        self._update_training_steps()

    def _prepare_loop(self) -> None:
        args, amp = self.args, self.amp_context
        self.state = self._init_state()
        leaves_out = amp.has_loss_scale or self._skips_updates
        cadence = Cadence(args, self.state, self.control, self.plan, self.eval_dataset is not None)
        interval = IntervalMetrics(leaves_out)
        self.loop = LoopState(
            args.output_dir, self.state, self.control, cadence, amp, self.step_loss, self.watch, interval
        )
        self._flops_per_token = self._compute_flops_per_token()
        speed = SpeedMeter(args.speed_metrics_start_step)
        self.reporter = Reporter(
            self.loop,
            speed,
            self._flops_per_token,
            leaves_out,
            self._distributed_sums,
            self._distributed_norms,
            self._findings_of_step,
        )
        self.evaluator = Evaluator(
            self.team,
            self.step_loss,
            self._predict,
            self._agree_on_loss,
            self._dispatch_event,
            lambda: self.feed.stop_signal,
            self.feed.stop,
        )

    def _prepare_saver(self) -> None:
        self.saver = Saver(self.args, self.loop, self.team, self.checkpoint_manager)
        # Now rather than at the first save: an unknown name must not end a run that has trained for hours.
        components = self.get_state_components()
        select_components(components, self.args.checkpoint_components)
        select_components(components, self._skipped_components(), "skip_checkpoint_components")
        # Callbacks may be on some ranks only.
        with self.team.agreement("looking for who supplies the best weights"):
            requirements.require_supplier_of_best(self.args, self.callbacks)

    def _restore(self, resume: bool | str) -> None:
        if resume is False:
            self.recipes.begin_average()
            self.checkpoint_manager.begin_fresh_run()
        else:
            logger.info("Resumed from %s", self._load_state(None if self._falls_back else str(resume)))
            if self.state.epoch_train_steps != self.plan.steps_per_epoch:
                self._replan()
        # Gradients that a model brings along, or an interrupted step left, must not enter the first step.
        self.optimizer.zero_grad()

    def _load_state(self, path: str | None) -> str | None:
        self.recipes.forget_average()
        loaded = super()._load_state(path)
        if loaded is not None and not self.checkpoint_manager.is_own(loaded):
            self.loop.forget_best()
        self.recipes.begin_average()
        return loaded

    def _replan(self) -> None:
        """Steps have another size than those of the checkpoint: count the rest of training in the new ones."""
        samples = self.args.per_device_train_batch_size * self.layout.part.num_parts
        may_differ = self.plan.replan(self.state, self.train_dataloader.state_dict(), samples)
        self.max_steps = self.plan.num_steps
        if may_differ and self._given.lr_scheduler is None:
            progress = self.lr_scheduler.state_dict()
            # A new schedule sets the groups to its beginning.
            with kept_rates(self.optimizer):
                self._init_scheduler()
            assert self.optimization is not None and self.optimization.scheduler_state is not None
            self.optimization.scheduler_state.load_state_dict(progress)

    # --- the loop

    @contextlib.contextmanager
    def _run_context(self) -> Iterator[None]:
        with preparation.run_settings(self.args) as self._run, StopSignals() as self._signals:
            self._run.push(self._close_after)
            yield

    def _enter_training(self, was_asked_to_resume: bool) -> None:
        if was_asked_to_resume and self.args.resume_from_checkpoint is False and self.dist.rank == 0:
            warn_of_nothing_to_resume(self.args.output_dir)
        self._has_trained = True
        if self.recipes.step_in_backward is not None:
            self._run.enter_context(self.recipes.step_in_backward)
        if self.args.detect_anomaly:
            self._run.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=True))
        self._run.enter_context(set_train(self._forward_modules(), True))

    def _train_loop(self) -> TrainOutput:
        started, first_step = time.time(), self.state.global_step
        self._settle_requests()
        cadence = self.loop.cadence
        cadence.log, cadence.evaluate, cadence.save = self._setup_periodic_functions()
        self._finish_interrupted_step()
        self._finish_interrupted_epoch()
        while cadence.has_more_epochs:
            self._train_epoch()
        return self._finalize_training(started, self.state.global_step - first_step)

    def _train_epoch(self) -> None:
        self.train_dataloader.set_epoch(self.state.raw_epoch)
        self._dispatch_event("on_epoch_begin")
        self._settle_requests()
        steps = StepBatches(
            self._batches(),
            self.args.gradient_accumulation_steps,
            self.args.dataloader_drop_last,
            self._begin_step,
        )
        while not self.loop.cadence.leaves_epoch and self._run_step(steps):
            self._after_step()
        self._end_epoch()

    def _run_step(self, steps: StepBatches) -> bool:
        """One step through the hook `_train_step`; False at the end of the epoch."""
        steps.begin_step()
        try:
            with explaining_indices(self.unwrapped_model(), steps.current):
                result = self._train_step(steps)
        except StopIteration:
            self._drop_unfinished(steps.window)
            return False
        finally:
            self._leave_step()
        self._note_step(steps.window, result)
        return True

    def _train_step(self, data_iterator: Iterator[Mapping[str, Any]]) -> tuple[Tensor, Tensor | None, int | Tensor]:
        """One optimizer update from a window of micro-batches: loss, gradient norm and tokens of this rank."""
        loss: Tensor | None = None
        tokens: int | Tensor = 0
        while loss is None or not self._window_is_done:
            input_dict, labels = self._prepare_batch(next(data_iterator))
            self._dispatch_event("on_forward_backward_begin")
            share = self._forward_backward_step(input_dict, labels)
            self._dispatch_event("on_forward_backward_end")
            tokens = tokens + self._count_batch_tokens(input_dict, labels)
            loss = share if loss is None else loss + share
        return loss, self._update_parameters(), tokens

    def _update_parameters(self) -> Tensor | None:
        """Clip, step and clear the gradients of a whole window; returns their norm."""
        if not self._should_sync_gradients():
            raise RuntimeError(
                f"{type(self).__name__}._should_sync_gradients() is False for the last micro-batch of a step, so that ranks "
                "would update their models by gradients of their own. Return True there, or do not override it."
            )
        self._finish_gradients()
        self.amp_context.unscale_(self.optimizer)
        grad_norm = self._clip_grad_norm(self.args.max_grad_norm)
        self._dispatch_event("on_pre_optimizer_step")
        self.reporter.settle_schedule(self.lr_scheduler)
        self._optimizer_step(grad_norm)
        self._dispatch_event("on_optimizer_step")
        self._advance_schedule()
        clear_gradients(self.optimizer)
        return grad_norm

    def _optimizer_step(self, grad_norm: Tensor | None = None) -> None:
        if self._skips_updates and grad_norm is not None:
            step_if_finite(self.optimizer, grad_norm)
        elif self.recipes.step_in_backward is None:
            self.amp_context.optimizer_step(self.optimizer)
        self.recipes.update_average()

    def _advance_schedule(self) -> None:
        """A step of the schedule, unless GradScaler has left out the optimizer's."""
        self.loop.left_out = self.amp_context.left_out
        if self.loop.left_out is None:
            self.lr_scheduler.step()
        elif self.device.type == "cpu":
            self.reporter.settle_schedule(self.lr_scheduler)

    def _begin_step(self, window: Window) -> None:
        """A window was fetched: count its targets, before the first backward pass needs their number."""
        if self.state.global_step == 0 and self.device.type != "cpu":
            warn_of_large_ids(self.unwrapped_model(), window.batches)
        if is_overridden(self, "_prepare_batch"):
            window.prepared = [self._prepare_batch(batch) for batch in window.batches]
        self.window = window
        self._average_step = self.recipes.num_updates
        self._dispatch_event("on_step_begin")
        if not self.step_loss.can_count:
            self._agree_on_loss(self.step_loss, window.batches[0])
        if self.step_loss.can_count:
            self.feed.count(window)
        if isinstance(self.loss_fn, TrainingLoss):
            self.loss_fn.begin_step(window)

    def _leave_step(self) -> None:
        self.window = None
        if isinstance(self.loss_fn, TrainingLoss):
            self.loss_fn.end_step()

    def _note_step(self, window: Window | None, result: tuple[Tensor, Tensor | None, int | Tensor]) -> None:
        loss, grad_norm, tokens = checked_result(window, result, type(self).__name__)
        assert window is not None
        if window.total is None:
            self.feed.count(window)
        self._warn_of_unweighed(window)
        if self.recipes.num_updates == self._average_step:
            # A _train_step of the user's own steps the optimizer, and knows nothing of the average.
            self.recipes.update_average()
        samples = sum(map(samples_in, window.batches)) if self.layout.speaks else 0
        self.reporter.note_step(window, loss, grad_norm, tokens, samples)
        trace = None if self.optimization is None else self.optimization.trace
        self.watch.note(self.state.global_step, grad_norm, loss, trace)
        self._dispatch_event("on_train_metrics", loss=loss, grad_norm=grad_norm, tokens=tokens)

    def _after_step(self) -> None:
        """Log, evaluate and save where that is due; the cadence depends on the global step alone."""
        if self.feed.gradients_look_bad or self.loop.interval.wants_settling:
            self.reporter.settle(self.lr_scheduler)
        self._dispatch_event("on_step_end")
        self._settle_requests("step")
        cadence = self.loop.cadence
        self._maybe_log_save_evaluate(*self.loop.interval.logs, cadence.log, cadence.evaluate, cadence.save)
        self._heed_stop_request()

    def _end_epoch(self) -> None:
        """What happens once per epoch; a step limit in the middle of one leaves the epoch unfinished."""
        if not self.loop.cadence.is_last_step or self.loop.cadence.epoch_is_complete:
            self._begin_next_epoch()
        self.control.should_epoch_stop = False
        if self.args.logging_strategy == "epoch":
            self._log_interval()
        if self.args.eval_strategy == "epoch" and self.state.global_step >= self.args.eval_delay:
            self._evaluate_while_training()
        if self.args.save_strategy == "epoch":
            self._save_while_training()
        self._dispatch_event("on_epoch_end")
        self._settle_requests()
        self._fulfil_requests()
        self._heed_stop_request()

    def _begin_next_epoch(self) -> None:
        state = self.state
        if state.global_step == state.epoch_start_step and not self.loop.resumed_in_epoch:
            raise RuntimeError(
                f"Epoch {state.raw_epoch} of the training data had no batch at all, so training cannot go on. Check the "
                "dataset, per_device_train_batch_size and dataloader_drop_last, which drops incomplete batches and windows of "
                f"fewer than gradient_accumulation_steps={self.args.gradient_accumulation_steps} batches."
            )
        self.loop.resumed_in_epoch = False
        state.raw_epoch += 1
        state.epoch = float(state.raw_epoch)
        state.epoch_start_step = state.global_step

    def _fulfil_requests(self) -> None:
        """Do what callbacks asked for at the end of an epoch, and not only after the next step."""
        if self.control.should_log:
            self._log_interval()
        if self.control.should_evaluate:
            self._evaluate_while_training()
        if self.control.should_save:
            self._save_while_training()

    def _heed_stop_request(self) -> None:
        """Save and leave when the system asked for it; ranks agree on that in their feed."""
        signal_name = self.feed.stop_signal
        if signal_name is None:
            return
        self.loop.is_leaving = True
        if self.control.should_training_stop:
            # No checkpoint of this step has the callback's request to stop, which the resumed run must follow.
            self.loop.saved_step = -1
        path = self._save_while_training(is_scheduled=False)
        self._dispatch_event("on_train_end")
        preempted = Preempted(signal_name, self.state.global_step, path)
        logger.warning("%s", preempted)
        raise preempted

    def _finish_interrupted_step(self) -> None:
        """Do what was due at the step of the resumed checkpoint, and is not in it: an evaluation, and the save after it."""
        loop = self.loop
        if not loop.evaluation_is_pending:
            self.saver.list_resumed_best()
            return
        was_scheduled = loop.scheduled_step == self.state.global_step
        self._evaluate_while_training()
        if not loop.evaluation_is_pending and (was_scheduled or self.control.should_save or loop.cadence.save_was_due):
            if self.rng.has_loaded:
                # Callbacks may have drawn random numbers since the load.
                self.rng.restore()
            # Replace the resumed checkpoint: it lacks the evaluation, and says that it is pending.
            loop.saved_step = loop.scheduled_step = -1
            self._save_while_training()
        self._heed_stop_request()

    def _finish_interrupted_epoch(self) -> None:
        """A checkpoint of the last step may be older than the evaluation that belongs to the end of its epoch."""
        if self.loop.cadence.is_last_step and self.state.global_step > self.state.epoch_start_step:
            self._end_epoch()

    def _batches(self) -> Iterator[Mapping[str, Any]]:
        """The rest of the epoch."""
        self.feed.begin_pass()
        iterator = iter(self.train_dataloader)
        if self.loop.resumed_in_epoch and self.rng.has_loaded:
            # Last of all: callbacks and iterators may have drawn numbers that the straight run drew long ago.
            self.rng.restore()
        for batch in iterator:
            self.feed.taken(batch)
            if self._compares_batches:
                self._compares_batches = False
                warn_of_equal_batches(batch, self.layout, self.team.gather)
            yield batch

    def _drop_unfinished(self, window: Window | None) -> None:
        """StopIteration left `_train_step` in the middle of a window: its gradients must not enter the next step."""
        if window is not None and window.has_begun:
            clear_gradients(self.optimizer)
            logger.warning(
                "_train_step ended with StopIteration after %d micro-batches of a step of %d, the last of its epoch: their "
                "gradients are dropped. Stop at the micro-batch for which _should_sync_gradients() is True.",
                *(window.number + 1, len(window)),
            )

    @property
    def _window_is_done(self) -> bool:
        return self.window is not None and self.window.is_last

    @property
    def _skips_updates(self) -> bool:
        return self.args.nonfinite_grad == "skip" and not self.amp_context.has_loss_scale

    def _settle_requests(self, occasion: str = "epoch") -> None:
        self.team.settle(self.control, self.callbacks, occasion)

    def _close_after(self, error_type: type[BaseException] | None, *_: object) -> None:
        """End workers and give the output directory back, however training ended."""
        self._signals = None
        if self.train_dataloader is not None:
            in_order = error_type is None or issubclass(error_type, Preempted)
            self.team.close_loader(self.train_dataloader, in_order)
        for manager in (self._claim, self.checkpoint_manager):
            if manager is not None:
                manager.close()

    # --- hooks of preparation

    def _init_distributed(self) -> None:
        """Find this process's place in the job."""
        env = self.dist
        self.num_processes = env.world_size
        self.is_local_process_zero, self.is_world_process_zero = env.local_rank == 0, env.rank == 0

    def _init_device(self) -> None:
        """Choose the device of this process: `args.device`."""
        self.args.device = str(preparation.find_device(self.args, self.dist))

    @property
    def device(self) -> torch.device:
        return torch.device(self.args.device or "cpu")

    @device.setter
    def device(self, device: torch.device) -> None:
        self.args.device = str(device)

    def _make_amp_context(self) -> AMPContext:
        return AMPContext(self.args.mixed_precision, self.device.type)

    def _device_type(self) -> str:
        """The kind of device that `_init_device` will choose."""
        return device_type(self.args)

    def _common_settings(self) -> dict[str, str]:
        """What all ranks must have alike, as text: it decides which collectives they reach."""
        objects = {
            "train_dataset": self.train_dataset,
            "eval_dataset": self.eval_dataset,
            "compute_loss_func": self._given.loss_fn,
            "fused_loss_factory": self.fused_loss_factory,
        }
        stream = None if self._dispatches(for_training=True) else self.train_dataset
        return common_settings(type(self), self.args, self._wanted, self.optimizer_groups, objects, stream)

    def _dispatches(self, for_training: bool) -> bool:
        """Whether rank 0 reads the batches for all."""
        return False

    def _data_layout(self, for_training: bool) -> DataLayout:
        """How the batches of a step are divided between ranks."""
        return DataLayout(Part(self.team.rank, self.team.size))

    def _resolve_checkpoint(self) -> None:
        """Take the output directory, and decide from what to resume: a path or False."""
        wanted = self.args.resume_from_checkpoint
        if self._claim is not None:
            # One that was not ended by a run, such as that of a save before training, would be held for ever.
            self._claim.close()
        self._claim = CheckpointManager(self._checkpoint_config(), self.dist, None, None)
        path = self._claim.resolve_checkpoint_path(wanted)
        self._falls_back = wanted is True
        self.args.resume_from_checkpoint = path or False
        self._resume_path = path or self._claim.resolve_checkpoint_path(self._to_be_loaded)

    def _init_dataloaders(self, train_dataset: BaseDataset | None, eval_dataset: BaseDataset | None) -> None:
        """Set `train_dataloader` and `eval_dataloader`; any iterable of dicts is accepted."""
        if train_dataset is not None:
            self._loads_for_training = True
            self.train_dataloader = self._get_dataloader(train_dataset, self.args.per_device_train_batch_size)
        self._loads_for_training = False
        if eval_dataset is not None:
            self.eval_dataloader = self._get_dataloader(eval_dataset, self.args.per_device_eval_batch_size)
            self._evaluated_dataset = eval_dataset

    def _get_dataloader(self, dataset: BaseDataset, batch_size: int) -> Any:
        """A loader of the batches of this rank."""
        seed = self.seed if self._loads_for_training else None
        build = preparation.loader_builder(self.args, dataset, batch_size, self.data_collator, self.device, seed)
        if not self._loads_for_training:
            return self.team.eval_loader(build, dataset, self._data_layout(for_training=False))
        return self.team.train_loader(build, dataset, self.layout, self.args.dataloader_drop_last, self.feed)

    def _adapt_train_loader(self) -> None:
        """Give a loader that a user's hook made the position, length and agreement of our own."""
        if not (is_overridden(self, "_init_dataloaders") or is_overridden(self, "_get_dataloader")):
            return
        loader = self.train_dataloader
        if loader is not None and not is_resumable(loader):
            drop_last, adapted = self.args.dataloader_drop_last, adapted_loader(loader, self.args.set_dataset_epoch)
            self.train_dataloader = self.team.train_loader(lambda _: adapted, None, self.layout, drop_last, self.feed)

    def _update_training_steps(self) -> None:
        """Set `max_steps` and `epoch_train_steps` (batches per epoch) from the arguments and the length of the data."""
        self.plan = StepPlan(self.args, self.train_dataloader)
        self.max_steps, self.epoch_train_steps = self.plan.num_steps, self.plan.num_batches
        if self.train_dataloader is not None and self.dist.rank == 0:
            by_name = self._given.lr_scheduler is None and self.lr_scheduler_factory is None
            warn_of_unknown_end(self.args, self.train_dataloader, by_name)

    def _prepare_model(self) -> None:
        """Build the model unless it was given, and put it on the device; a fresh start begins with a fresh one."""
        with self.team.agreement("building the model"):
            if self.model is None or self._starts_over:
                assert self.model_init is not None
                self.model = build_model(
                    self.model_init,
                    self.device,
                    self.args.construct_model_on,
                    self.args.default_dtype,
                    self._loads_weights,
                    self._initialize_non_persistent_buffers,
                )
            else:
                self.model = self.unwrapped_model().to(self.device)
            self.recipes.apply_layers(self.model)
            if self.args.gradient_checkpointing and self.enable_activation_checkpoint_fn is not None:
                self.enable_activation_checkpoint_fn(self.dist.rank, self.model)

    @property
    def _starts_over(self) -> bool:
        resumes = self._wanted is None or self.args.resume_from_checkpoint is not False
        return self._has_trained and not resumes and self.model_init is not None

    @property
    def _loads_weights(self) -> bool:
        """Whether a checkpoint will fill the model."""
        resumes = self._wanted is not None and self.args.resume_from_checkpoint is not False
        return resumes and preparation.loads_component(self.args, "model")

    def _initialize_non_persistent_buffers(self, model: nn.Module) -> None:
        """Compute buffers that no checkpoint holds, of a model that was built on the meta device."""
        assert self.model_init is not None
        compute_missing_buffers(model, self.model_init)

    def _wrap_loss_fn(self) -> None:
        """Make `loss_fn` the loss that weighs micro-batches by their targets."""
        with self.team.agreement("making the loss"):
            model, given = self.unwrapped_model(), self._given.loss_fn
            self._head: nn.Module | None = None
            loss_fn = self._maybe_get_fused_loss_fn(model, given)
            if self.use_fused_loss:
                self._head = self._head or output_embeddings_of(model)
                self.model = HiddenStatesModel(model)
            self.step_loss = ModelLoss(loss_fn, self.args.token_weighted_loss, head=self._head)
            self.loss_fn = TrainingLoss(self.step_loss, lambda window: self.feed.count(window), self._num_averaged)

    def _maybe_get_fused_loss_fn(self, module: nn.Module, default_loss_fn: Any) -> Any:
        """The loss that is fused with the head of `module`, if `fused_loss_factory` makes one; else the default."""
        if self.fused_loss_factory is None:
            return default_loss_fn
        with self.amp_context.autocast():
            # As it will run: some attention works in few bits only.
            self._head = output_embeddings_of(module)
        return make_fused_loss(self.fused_loss_factory, self._head)

    @property
    def _num_averaged(self) -> int:
        """The number of ranks that gradients are averaged over: shares of a step's loss are to be added."""
        return self.team.size

    def _compile_model(self) -> None:
        """Compile the model for the forward pass; what is checkpointed stays the model itself."""
        self.model = torch.compile(self.model, **preparation.compile_options(self.args))

    def _init_optimizer(self) -> None:
        """Make `optimizer` and `lr_scheduler`, and note the options as the user set them."""
        with self.team.agreement("making the optimizer"):
            refuse_quantized(self.unwrapped_model())
            named, elsewhere = self._named_parameters(), self._names_elsewhere()
            self.optimizer = preparation.make_optimizer(
                self.args, self._given, self.optimizer_factory, self.optimizer_groups, named, elsewhere
            )
            self.weight_decay_groups = "all"
            if self._given.optimizer is None and self.optimizer_groups is None:
                self.weight_decay_groups = preparation.decay_groups(
                    self.args,
                    self.optimizer,
                    self._whole_model(),
                    named,
                    elsewhere,
                    lambda: preparation.stored_decay_groups(self.args, self._claim, self._resume_path),
                )
            self.optimization = Optimization(self.optimizer, named, knows_configuration=True)
            self.lr_scheduler = self._given.lr_scheduler
            if self.lr_scheduler is None:
                self._init_scheduler()

    def _init_scheduler(self) -> None:
        self.lr_scheduler = build_scheduler(
            self.args, self.optimizer, self.lr_scheduler_factory, self.plan.schedule_steps
        )
        assert self.optimization is not None
        self.optimization.follow(self.lr_scheduler, self.optimizer)

    def _follow_optimizer(self) -> None:
        """Derive what belongs to the optimizer and schedule that the hook has set."""
        named = self._named_parameters()
        if self.optimization is None or self.optimization.made_for is not self.optimizer:
            self.optimization = Optimization(self.optimizer, named, knows_configuration=False)
        if self.optimization.scheduler_state is None and self.lr_scheduler is not None:
            self.optimization.follow(self.lr_scheduler, self.optimizer)
        self.optimization.norm = self.recipes.attach(self.optimizer, named) or self.optimization.norm

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer is given: the parameters of this rank, under the names of the whole model."""
        return list(self.unwrapped_model().named_parameters())

    def _names_elsewhere(self) -> list[str]:
        """The trainable parameters of the model that only other ranks have."""
        return []

    def _whole_model(self) -> nn.Module:
        """The model with all its modules; other ranks may have the values of some."""
        return self.unwrapped_model()

    def _wrap(self) -> None:
        """Wrap `model` for a strategy; what it leaves in `self.model` runs forward. One device needs nothing."""

    def _init_state(self) -> TrainerState:
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
        return self._make_manager(
            skip_checkpoint_components=self._skipped_components(), on_save_error=self.args.on_save_error
        )

    def _skipped_components(self) -> list[str]:
        """Without an average there is none to skip, and a setting that says so may stay."""
        has_average = self.recipes.average is not None
        return [key for key in self.args.skip_checkpoint_components if key != "ema" or has_average]

    def _setup_periodic_functions(self) -> tuple[PeriodicFunction, PeriodicFunction, PeriodicFunction]:
        """When to log, to evaluate and to save."""
        cadence = self.loop.cadence
        return cadence.log, cadence.evaluate, cadence.save

    # --- hooks of the step

    def _prepare_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The inputs of the model and the labels, on the device."""
        inputs = dict(moved(batch, self.device))
        return inputs, inputs.pop("labels", None)

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        """Forward and backward of one micro-batch; returns its share of the step's loss, detached."""
        loss = self._forward_step(input_dict, labels)
        self._backward(loss)
        return loss.detach()

    def _forward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        """The weighed loss; the logits are let go before the backward pass, which needs the memory."""
        is_stand_in = self.window is not None and self.window.is_stand_in
        with self.amp_context.autocast():
            with self.recipes.activations(self.unwrapped_model()):
                forward = self.step_loss.forward(self.model, input_dict, labels, is_stand_in)
            if isinstance(self.loss_fn, TrainingLoss):
                return self.loss_fn.of(forward, labels)
            loss: Tensor = self.loss_fn(forward.logits, labels)
            return loss

    def _backward(self, loss: Tensor) -> None:
        self.amp_context.scale_loss(loss).backward()

    def _should_sync_gradients(self) -> bool:
        """Whether gradients of the present micro-batch are to be reduced: True for the last one of a window."""
        return self.window is None or self.window.is_last

    @property
    def gradient_accumulation_step(self) -> int | None:
        """The number of the present micro-batch within its step, from 1; None outside a step."""
        return None if self.window is None else self.window.number + 1

    def _finish_gradients(self) -> None:
        """All gradients of a window are computed; pipelines add up those of tied weights here."""

    def _clip_grad_norm(self, max_grad_norm: float | None, norm_type: float = 2.0) -> Tensor | None:
        """The norm of all gradients, which are scaled down to `max_grad_norm` if it is given and exceeded."""
        assert self.optimization is not None
        norm = self.optimization.norm(norm_type)
        self.optimization.clip(max_grad_norm, norm)
        return norm

    def _count_batch_tokens(self, input_dict: dict[str, Any], labels: Any) -> int | Tensor:
        """The number of tokens the model processes for a batch; padding counts, since it costs the same."""
        if self.window is not None and self.window.is_stand_in:
            return 0
        ids = input_dict.get("input_ids")
        for value in (ids, labels):
            if isinstance(value, Tensor):
                return int(value.numel())
        return samples_in(input_dict)

    def _agree_on_loss(self, loss: ModelLoss, batch: Mapping[str, Any] | None) -> None:
        """Let all ranks choose the same loss, by the first batches of those that have any."""
        if not self.team.settles_loss_first and not self._computes_own_loss:
            return
        findings = [one for one in self.team.gather(self._look_at_loss(loss, batch)) if one is not None]
        if findings:
            # The lowest rank of those that have a batch; a loss that is the model's own shows in one batch.
            loss.adopt(min(findings, key=lambda one: (one.is_stand_in, one.uses_own is not True)))

    @property
    def _computes_own_loss(self) -> bool:
        """Whether a user's hook calls the loss function itself."""
        return is_overridden(self, "_forward_backward_step") or is_overridden(self, "_prediction_step")

    def _look_at_loss(self, loss: ModelLoss, batch: Mapping[str, Any] | None) -> Finding | None:
        """What this rank learns of the loss from its first batch."""
        if batch is None:
            return None
        try:
            inputs, labels = self._prepare_batch(batch)
            with self.amp_context.autocast():
                return loss.look(without_ddp(self.model), inputs, labels, isinstance(batch, EmptyBatch))
        except Exception as error:  # noqa: BLE001 - the pass that follows fails in the same way, where all ranks learn of it
            logger.debug("The loss could not be looked at: %s", error)
            return None

    def _warn_of_unweighed(self, window: Window) -> None:
        is_weighed = not isinstance(self.loss_fn, TrainingLoss) or self.loss_fn.was_used
        if is_weighed or self._has_warned_of_weights or max(len(window), window.num_shares) < 2:
            return
        self._has_warned_of_weights = True
        logger.warning(
            "%s computes the loss of a micro-batch without self.loss_fn, so that micro-batches and ranks are not weighed by "
            "their targets, and the loss of a step is a sum and no mean. Use self.loss_fn(logits, labels), or "
            "self.loss_fn.rescale(mean, labels) for a loss that was computed otherwise.",
            type(self).__name__,
        )

    # --- logs

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
            self._evaluate_while_training()
        if self.control.should_save or cadence.is_due(periodic_save):
            self._save_while_training()

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
        self._settle_requests("log")

    def _log_step(self, loss_log: list[Tensor], total_norm_log: list[Tensor], tokens_log: list[int | Tensor]) -> None:
        """Log the steps since the last log; the lists have this rank's values since ranks last settled them."""
        logs = self.reporter.interval_record(self.lr_scheduler)
        if self.device.type != "cpu" or is_overridden(self, "_distributed_peak_mem"):
            is_cpu = self.device.type == "cpu"
            own_peak = 0 if is_cpu else torch.accelerator.max_memory_allocated(self.device)
            logs["peak_mem_allocated"] = self._distributed_peak_mem(own_peak)
        self._dispatch_event("on_log_step", logs=logs)
        self.log(logs)

    def _finalize_training(self, start_time: float, speed_metrics_steps: int) -> TrainOutput:
        """Log and save the last steps, load the best model, and log the record of the whole run."""
        if self.args.logging_strategy != "no":
            self._log_interval()
        if self.args.save_strategy != "no":
            self._save_while_training()
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

    @property
    def num_data_parallel_ranks(self) -> int:
        """How many ranks share the batches of a step."""
        return self.layout.part.num_parts

    def _compute_flops_per_token(self) -> float:
        return flops_per_token(count_parameters(self._whole_model()))

    def _distributed_sums(self, sums: Tensor) -> Tensor:
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

    def _findings_of_step(self, step: int) -> list[GradientFinding]:
        """What all ranks know of a step without finite gradients; each of them raises the same error."""
        assert self.optimization is not None
        return self.team.gather(self.watch.finding(step, self.optimization.names, self._own_finding()))

    def _findings_of_weights(self, found: list[Tensor]) -> list[GradientFinding]:
        assert self.optimization is not None
        names = self.optimization.names
        own = replace(self._own_finding(), parameters=[names[one] for one in found if one in names])
        return self.team.gather(own)

    def _own_finding(self) -> GradientFinding:
        checkpoint = None
        if self.checkpoint_manager is not None:
            # Other ranks wait for this one, and the error that is being raised matters more.
            with contextlib.suppress(OSError, CheckpointError):
                checkpoint = self.checkpoint_manager.newest_sound_checkpoint()
        return GradientFinding(self.dist.rank, checkpoint=checkpoint)

    # --- evaluation

    def evaluate(self, eval_dataset: BaseDataset | None = None, *, use_ema: bool = False) -> dict[str, Any]:
        """The token-weighted loss over the evaluation set, and how long it took.

        `use_ema` evaluates the averaged weights (`ema_decay`) in place of the present ones.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise _no_dataset_error()
        with torch_settings(self.args):
            self._prepare_to_evaluate(dataset)
            count = self._callback_handler.count("on_evaluate")
            with self.averaged_weights() if use_ema else contextlib.nullcontext():
                metrics = self._evaluate_on(dataset) if use_ema else self._metrics_on(dataset)
        return self._announce_evaluation(metrics, count)

    def _metrics_on(self, dataset: BaseDataset | None) -> dict[str, Any]:
        """Metrics of the present weights, with the loss of the averaged ones if that is asked for."""
        with self._common_weights():
            metrics = self._evaluate_on(dataset)
        if self.args.eval_ema and self.recipes.average is not None:
            self.evaluator.is_second_look = True
            try:
                with self.averaged_weights():
                    metrics["eval_ema_loss"] = self._evaluate_on(dataset)["eval_loss"]
            finally:
                self.evaluator.is_second_look = False
        return metrics

    def _evaluate_on(self, dataset: BaseDataset | None) -> dict[str, Any]:
        if dataset is None:
            raise _no_dataset_error()
        if dataset is not self._evaluated_dataset or self.eval_dataloader is None:
            self._loads_for_training = False
            self.eval_dataloader = self._get_dataloader(dataset, self.args.per_device_eval_batch_size)
            self._evaluated_dataset = dataset
        self._before_evaluation()
        with self.evaluator.running(self._forward_modules(), self.loss_fn, self._given.loss_fn):
            return self._eval_loop()

    def _eval_loop(self) -> dict[str, Any]:
        """Add up the losses of the evaluation batches, `max_eval_steps` of them at most."""
        sums = self.evaluator.run(self.eval_dataloader, self.args.max_eval_steps, self.unwrapped_model())
        if sums.num_batches == 0:
            raise RuntimeError(self._zero_eval_batches_message())
        return self.evaluator.metrics(sums)

    def _predict(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        input_dict, labels = self._prepare_batch(batch)
        return self._prediction_step(input_dict, labels)

    def _prediction_step(self, input_dict: dict[str, Any], labels: Any) -> dict[str, Any]:
        """The mean loss of a batch on this rank, with logits and labels for callbacks."""
        with self.amp_context.autocast():
            # Without DDP, which exchanges buffers at each forward pass: ranks may have different numbers of batches.
            return self.evaluator.predict_with(without_ddp(self.model), input_dict, labels, self._shows_predictions)

    @property
    def _shows_predictions(self) -> bool:
        """Whether a callback, or a user's hook, wants to see logits."""
        listens = self._callback_handler.listens("on_prediction_step") and not self.evaluator.is_second_look
        return listens or is_overridden(self, "_prediction_step")

    def _announce_evaluation(self, metrics: dict[str, Any], count: int) -> dict[str, Any]:
        """Tell callbacks, and return the metrics with those that they added; their readers are told these, on all ranks."""
        if self._callback_handler.count("on_evaluate") != count:
            return metrics
        self._dispatch_event("on_evaluate", readers=False, metrics=metrics)
        metrics = self._shared_metrics(metrics)
        # A copy: what a reader on one rank adds must not choose another best model there.
        self._dispatch_event("on_evaluate", readers=True, metrics=dict(metrics))
        return metrics

    def _shared_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The same on every rank, also those that callbacks have added, since the best model is chosen by them."""
        return self.team.broadcast(metrics)

    def _before_evaluation(self) -> None:
        """Synchronise state that an evaluation reads."""

    def _common_weights(self) -> contextlib.AbstractContextManager[None]:
        """In this context replicas have the same weights, also where a strategy lets them differ between steps."""
        return contextlib.nullcontext()

    def _zero_eval_batches_message(self) -> str:
        header = f"The evaluation had no batch at all{self.team.where}"
        if self.evaluator.is_second_look:
            header += " when it was read again for eval_ema=True, which takes a dataset that can be read twice"
        dataset = self._evaluated_dataset
        size = str(len(dataset)) if hasattr(dataset, "__len__") else "unknown"
        settings = {evaluation.SAMPLES_IN_DATASET: size, **self._evaluation_settings()}
        explanation = evaluation.no_batches_explanation()
        return self._format_zero_eval_batches_diagnostic(
            f"{header}: there is nothing to compute a loss from.", settings, explanation
        )

    def _format_zero_eval_batches_diagnostic(self, header: str, settings: Mapping[str, Any], explanation: str) -> str:
        return evaluation.no_batches_diagnostic(header, settings, explanation)

    def _evaluation_settings(self) -> dict[str, Any]:
        names = ("per_device_eval_batch_size", "dataloader_drop_last", "max_eval_steps")
        return {**{name: getattr(self.args, name) for name in names}, **self.team.settings}

    def _dispatch_eval_batches(self) -> bool:
        """Whether rank 0 reads the evaluation batches for all."""
        return self._dispatches(for_training=False)

    def _evaluate_while_training(self) -> None:
        loop = self.loop
        self.control.should_evaluate = False
        if loop.evaluated_step == self.state.global_step:
            return
        # Waits for the device as the evaluation does, and spares one of weights that are no numbers.
        self.reporter.settle(self.lr_scheduler)
        started = time.perf_counter()
        # A run that is resumed from a checkpoint made before the end begins with this evaluation.
        loop.evaluation_is_pending = True
        count = self._callback_handler.count("on_evaluate")
        try:
            metrics = self._metrics_on(self.eval_dataset)
        except EvaluationInterrupted:
            return
        metrics = self._announce_evaluation(metrics, count)
        loop.evaluation_is_pending = False
        loop.evaluated_step, loop.eval_metrics = self.state.global_step, metrics
        # Only now: callbacks may have added metrics of their own.
        self.state.log_history.append({**metrics, "epoch": self.state.epoch, "step": self.state.global_step})
        self.saver.note_best(metrics)
        self.reporter.speed.pause(time.perf_counter() - started)
        maybe_cleanup_memory(self.args.gc_threshold)
        self._settle_requests("log")

    # --- checkpoints

    def _save_while_training(self, is_scheduled: bool = True) -> str:
        """Save the present step once, with the evaluation that belongs to it; returns the path, "" without a save."""
        self.control.should_save = False
        if self.control.should_abort_without_save:
            return ""
        if self.saver.is_saved(is_scheduled):
            return self.loop.saved_path
        if is_scheduled and self.args.eval_on_save and self.eval_dataset is not None:
            self._evaluate_while_training()
            # This save is what a callback may have asked for on that occasion.
            self.control.should_save = False
        started = time.perf_counter()
        path = self.saver.save(is_scheduled, self._before_save)
        if path:
            self._dispatch_event("on_save", checkpoint_path=path)
            self._settle_requests("log")
        self.reporter.speed.pause(time.perf_counter() - started)
        return path

    def _save_now(self, checkpoint_path: str | None) -> str:
        self._before_save()
        return self.saver.save_by_hand(checkpoint_path)

    def _before_save(self) -> None:
        """Synchronise state that must be identical on all ranks."""
        self.recipes.refuse_averages_in_model(
            "A checkpoint cannot be saved inside averaged_weights(): it would have the average in place of the weights. "
            "Leave the context first; save_model() exports the average."
        )
        self._require_whole_state()
        self.reporter.settle(self.lr_scheduler)
        assert self.optimization is not None
        self.saver.look_at_weights(self.optimization.parameters, self._findings_of_weights)

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
        best = self.state.best_model_checkpoint
        if best is None:
            return
        if not self.checkpoint_manager.load_external_weights(best):
            with self.team.agreement("loading the best model"):
                self._load_weights_of(best)
        self.recipes.forget_average()
        if self.recipes.average is not None:
            self.checkpoint_manager.load_component(best, "ema")
        self.recipes.begin_average()
        logger.info("Loaded the best weights, of %s", best)

    def _load_weights_of(self, checkpoint_path: str) -> None:
        load_weights(checkpoint_path, self.unwrapped_model())

    # --- declared state

    def _built_statefuls(self) -> dict[str, object]:
        own = self.optimization
        keeps_average = self.args.ema_decay is not None
        statefuls = {
            **super()._built_statefuls(),
            "optimizer": None if own is None else own.state,
            "scheduler": None if own is None else own.scheduler_state,
        }
        return {**statefuls, "ema": self.recipes.average} if keeps_average else statefuls

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

    # --- what strategies say of themselves

    def _forward_modules(self) -> nn.Module:
        """The module that runs forward passes on this rank."""
        model: nn.Module = self.model
        return model

    def _received_signal(self) -> str | None:
        """The stop signal that this process has received."""
        return None if self._signals is None else self._signals.received

    def _is_pipeline_parallel(self) -> bool:
        return False

    def _is_model_parallel(self) -> bool:
        return False


def optimizer_hook(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Step an optimizer of one parameter as soon as its gradient is accumulated, and let go of the gradient."""
    optimizer.step()
    optimizer.zero_grad()


def _no_dataset_error() -> ValueError:
    return ValueError("An evaluation needs an eval_dataset: give one to evaluate(), or to the trainer when it is made.")
