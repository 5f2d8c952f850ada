"""Phases of trainer preparation: each calls its hooks and builds the objects that depend on their results.

`Trainer._prepare` calls the phases in order, on every rank. After a hook that users may override, a phase adapts to the
objects that the override has set.
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forgather.ml.checkpoint.components import select_components
from forgather.ml.checkpoint.files.layout import checkpoints_root
from forgather.ml.checkpoint.manager import CheckpointManager
from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.distributed import flight_recorder
from forgather.ml.loss.rescale_loss import RescaleLoss
from forgather.ml.optim.named_optimizers import require_optimizer
from forgather.ml.trainer.batch_size.finder import BatchFinder
from forgather.ml.trainer.diagnostics.allocator import use_expandable_segments
from forgather.ml.trainer.diagnostics.health import check_health
from forgather.ml.trainer.diagnostics.malloc_settings import tune_malloc
from forgather.ml.trainer.loading.builders import adapted_loader, is_resumable
from forgather.ml.trainer.loading.copy_streams import can_pin
from forgather.ml.trainer.loop.cadence import Cadence
from forgather.ml.trainer.loop.evaluator import Evaluator
from forgather.ml.trainer.loop.loop_state import LoopState
from forgather.ml.trainer.loop.metrics import IntervalMetrics, SpeedMeter
from forgather.ml.trainer.loop.nonfinite import GradientFinding, GradientWatch
from forgather.ml.trainer.loop.optimization import Optimization, require_parameters_of
from forgather.ml.trainer.loop.reporter import Reporter
from forgather.ml.trainer.loop.saver import Saver
from forgather.ml.trainer.loop.scheduler_state import kept_rates
from forgather.ml.trainer.loop.step_runner import StepRunner
from forgather.ml.trainer.ranks.parallel_loading import DataLayout
from forgather.ml.trainer.ranks.replica_check import make_replica_check
from forgather.ml.trainer.ranks.team import make_team
from forgather.ml.trainer.recipes.activation_checkpointing import checkpointing_function, require_one_function
from forgather.ml.trainer.samples.length_groups import SampleLengths
from forgather.ml.trainer.samples.skipped import SkippedData
from forgather.ml.trainer.setup import preparation, requirements
from forgather.ml.trainer.setup.hook_checks import is_overridden
from forgather.ml.trainer.setup.model_construction import build_model, refuse_quantized
from forgather.ml.trainer.setup.rank_settings import common_settings, handles_ranks, require_strategy_for_ranks
from forgather.ml.trainer.setup.schedules import make_schedule
from forgather.ml.trainer.setup.seeding import choose_seed, seed_everything
from forgather.ml.trainer.setup.step_plan import StepPlan, warn_of_unknown_end
from forgather.ml.trainer.step_loss.fused import HiddenStatesModel, make_fused_loss, output_embeddings_of
from forgather.ml.trainer.step_loss.model_loss import ModelLoss
from forgather.ml.trainer.step_loss.training_loss import TrainingLoss
from forgather.ml.trainer.trainer_types import BaseDataset, TrainerControl

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer as AnyTrainer

    Trainer = AnyTrainer[Any]

logger = logging.getLogger(__name__)


def refuse(trainer: "Trainer") -> None:
    """Raise for combinations that cannot work, before anything is built."""
    args = trainer.args
    functions = {
        "optimizer_factory": trainer.optimizer_factory,
        "lr_scheduler_factory": trainer.lr_scheduler_factory,
        "enable_activation_checkpoint_fn": trainer.enable_activation_checkpoint_fn,
        "fused_loss_factory": trainer.fused_loss_factory,
        "compute_metrics": trainer.compute_metrics,
        "preprocess_logits_for_metrics": trainer.preprocess_logits_for_metrics,
    }
    require_samples(trainer)
    if args.replica_check_steps:
        requirements.require_replicas(type(trainer).__name__, trainer._sharing_table())
    requirements.require_builder(args, trainer.model_init is not None)
    requirements.require_eval_dataset(args, trainer.eval_dataset is not None)
    requirements.require_functions(functions, trainer.optimizer_groups, trainer.given)
    require_one_function(args, trainer.enable_activation_checkpoint_fn)
    declares = is_overridden(trainer, "get_state_components")
    requirements.require_components(args, None if declares else tuple(trainer.state_sharing))
    requirements.require_recipes(
        args,
        trainer.given,
        trainer.optimizer_groups,
        trainer.use_fused_loss,
        trainer._device_type(),
        trainer._is_pipeline_parallel(),
    )


def require_samples(trainer: "Trainer") -> None:
    """Raise for data, a loss or an optimizer that do not fit the arguments about samples, smoothing and `optim`."""
    args, given = trainer.args, trainer.given
    if args.train_sampling_strategy == "group_by_length" and trainer.train_dataset is not None:
        requirements.require_map_style(trainer.train_dataset)
    has_own = bool(given.optimizer or given.optimizer_cls_and_kwargs or trainer.optimizer_factory)
    require_optimizer(args, has_own)
    requirements.require_smoothing(args.label_smoothing_factor, given.loss_fn is not None or trainer.use_fused_loss)
    if args.auto_find_batch_size:
        requirements.require_repeatable(trainer)


def sample_lengths(trainer: "Trainer", dataset: BaseDataset) -> SampleLengths | None:
    """Return the lengths for `group_by_length`; None for another sampling strategy."""
    args = trainer.args
    if args.train_sampling_strategy != "group_by_length":
        return None
    with trainer.team.agreement("reading the length of a sample"):
        requirements.require_map_style(dataset)
        samples: Any = dataset
        may_change = args.set_dataset_epoch and hasattr(dataset, "set_epoch")
        return SampleLengths(samples, args.length_column_name, may_change)


def prepare_ranks(trainer: "Trainer") -> None:
    if trainer.wanted is not None:
        require_strategy_for_ranks(type(trainer), trainer.distributed_env)
    if handles_ranks(type(trainer)):
        # A trainer for one device evaluates on each rank independently.
        trainer.team = make_team(trainer.dist, trainer.team, type(trainer).__name__)
    # First of all: ranks with different settings would reach different collectives and deadlock.
    trainer.team.require_equal_settings(trainer._common_settings)
    trainer.team.open()
    trainer._callback_handler.rank = trainer.team.rank if trainer.team.size > 1 else None
    trainer.num_processes, trainer.is_local_process_zero, trainer.is_world_process_zero = 1, True, True
    trainer._init_distributed()
    trainer._follow_ranks()
    if trainer.wanted is not None:
        flight_recorder.direct_traces(trainer.args.output_dir)


def settings_of(trainer: "Trainer") -> dict[str, str]:
    """Return the settings that must be equal on all ranks, as text: they decide which collectives are reached."""
    objects = {
        "train_dataset": trainer.train_dataset,
        "eval_dataset": trainer.eval_dataset,
        "compute_loss_func": trainer.given.loss_fn,
        "fused_loss_factory": trainer.fused_loss_factory,
        "compute_metrics": trainer.compute_metrics,
    }
    stream = None if trainer._dispatches(for_training=True) else trainer.train_dataset
    settings = common_settings(type(trainer), trainer.args, trainer.wanted, trainer.optimizer_groups, objects, stream)
    # Some collectives run on accelerators only, such as the health check.
    return {**settings, "type of device": trainer._device_type()}


def prepare_device(trainer: "Trainer") -> None:
    """Set up device, precision and seeds; collective."""
    with trainer.team.agreement("choosing the device"):
        trainer._init_device()
    trainer.on_cpu = trainer.device.type == "cpu"
    preparation.use_device(trainer.device)
    trainer.team.pins_memory = trainer.args.dataloader_pin_memory and can_pin(trainer.device)
    use_expandable_segments(trainer.device)
    preparation.use_precision(trainer.args)
    if trainer.wanted is not None:
        check_health(trainer)
    trainer.amp_context = trainer._make_amp_context()
    # GradScaler already skips steps with non-finite gradients.
    trainer.skips_updates = trainer.args.nonfinite_grad == "skip" and not trainer.amp_context.has_loss_scale
    trainer.recipes.use_device(trainer.device)
    # With seed=-1 every rank draws a different seed. Broadcast one, so that all ranks build the same initial weights.
    trainer.seed = trainer.team.broadcast(choose_seed(trainer.args.seed))
    trainer.rng = RNGState(trainer.seed)
    seed_everything(trainer.seed)


def prepare_data(trainer: "Trainer", train_dataset: BaseDataset | None, eval_dataset: BaseDataset | None) -> None:
    """Make the loaders of this rank, and plan the steps from their length; collective."""
    trains = trainer.wanted is not None
    trainer.layout = data_layout(trainer, for_training=True)
    trainer.control = TrainerControl()
    trainer.watch = GradientWatch(trainer.args.nonfinite_grad, trainer.amp_context.has_loss_scale)
    # An override of `_prepare_batch` may change labels, so targets cannot be counted when a batch is read ahead.
    early = not is_overridden(trainer, "_prepare_batch")
    trainer.feed = trainer.team.feed(trainer.watch, trainer.received_signal, trainer.layout, early)
    if trainer.desk is not None:
        trainer.feed.asked = trainer.desk.count
    trainer.train_dataloader = trainer.eval_dataloader = trainer.evaluated_dataset = None
    # Before the loaders, which share it: a loaded checkpoint may change it.
    trainer.skipped = SkippedData(trainer.args.skip_samples, trainer.args.skip_steps)
    trainer._init_dataloaders(train_dataset if trains else None, eval_dataset)
    requirements.require_own_loader(trainer)
    if trains and trainer.train_dataloader is None:
        raise ValueError("train() needs a train_dataset; only evaluate() works without it.")
    _adapt_train_loader(trainer)
    _count_steps(trainer)


def data_layout(trainer: "Trainer", for_training: bool) -> DataLayout:
    """Return the layout of the strategy, with the arguments about the dataset of each rank."""
    args, layout = trainer.args, trainer._data_layout(for_training)
    return replace(layout, is_sharded=args.data_is_sharded, num_workers=args.dataloader_num_workers)


def _count_steps(trainer: "Trainer") -> None:
    """Call `_update_training_steps`; the counts set by an override decide when epochs and training end."""
    trainer.plan = StepPlan(trainer.args, trainer.train_dataloader)
    trainer._update_training_steps()
    if is_overridden(trainer, "_update_training_steps"):
        trainer.plan.follow(trainer.max_steps, trainer.epoch_train_steps)


def _adapt_train_loader(trainer: "Trainer") -> None:
    """Wrap a loader made by a user's hook, so that it has a position, a length and rank synchronisation."""
    loader = trainer.train_dataloader
    # Forgather's own loaders have all of this, so only the results of overrides are wrapped.
    own = any(is_overridden(trainer, name) for name in ("_init_dataloaders", "_get_dataloader", "_wrap"))
    if own and loader is not None and not is_resumable(loader):
        adapted = adapted_loader(loader, trainer.args.set_dataset_epoch)
        drop_last = trainer.args.dataloader_drop_last
        trainer.train_dataloader = trainer.team.train_loader(
            lambda _: adapted, None, trainer.layout, drop_last, trainer.feed
        )


def plan_steps(trainer: "Trainer") -> StepPlan:
    plan = StepPlan(trainer.args, trainer.train_dataloader)
    # One warning per job.
    if trainer.train_dataloader is not None and trainer.team.rank == 0:
        by_name = trainer.given.lr_scheduler is None and trainer.lr_scheduler_factory is None
        warn_of_unknown_end(trainer.args, trainer.train_dataloader, by_name)
    return plan


def builds_on_host(trainer: "Trainer") -> bool:
    """Return whether the model is built in host memory and then moved, so that the ranks of a node must take turns."""
    return trainer.device.type != "cpu" and trainer.args.construct_model_on == "default"


def make_model(trainer: "Trainer", builds: bool) -> None:
    """Set the model on its device, with the layers of recipes and activation checkpointing."""
    # At a second `train`, the model is still wrapped from the first.
    trainer.model = build(trainer, trainer.loads_weights) if builds else trainer.unwrapped_model().to(trainer.device)
    trainer.recipes.apply_layers(trainer.model)
    enable = checkpointing_function(trainer.args, trainer.enable_activation_checkpoint_fn)
    if enable is not None:
        enable(trainer.team.rank, trainer.model)


def build(trainer: "Trainer", loads_weights: bool) -> nn.Module:
    assert trainer.model_init is not None
    return build_model(
        trainer.model_init,
        trainer.device,
        trainer.args.construct_model_on,
        trainer.args.default_dtype,
        loads_weights,
        trainer._initialize_non_persistent_buffers,
    )


def wrap_loss(trainer: "Trainer") -> None:
    """Make `step_loss` and `loss_fn`; a fused loss also wraps the model to return hidden states."""
    model = trainer.unwrapped_model()
    if not isinstance(trainer.loss_fn, TrainingLoss):
        # A subclass may have set `loss_fn` in its constructor or in an earlier hook.
        trainer.given = replace(trainer.given, loss_fn=trainer.loss_fn)
    loss_fn = trainer._maybe_get_fused_loss_fn(model, trainer.given.loss_fn)
    head = None
    if trainer.use_fused_loss:
        head = output_embeddings_of(model) if trainer.fused_loss_factory is None else trainer.fused_head
        trainer.model = HiddenStatesModel(model)
    smoothing = trainer.args.label_smoothing_factor
    requirements.require_smoothing(smoothing, loss_fn is not None)
    trainer.step_loss = ModelLoss(loss_fn, trainer.args.token_weighted_loss, head=head, smoothing=smoothing)
    count = trainer.feed.count
    trainer.loss_fn = TrainingLoss(trainer.step_loss, count, trainer._num_averaged)


def follow_loss(trainer: "Trainer") -> None:
    """Make `step_loss` for a loss that an override of `_wrap_loss_fn` has set."""
    loss_fn = trainer.loss_fn
    if isinstance(loss_fn, TrainingLoss):
        return
    trainer.step_loss = ModelLoss(loss_fn, trainer.args.token_weighted_loss)
    # A RescaleLoss weights micro-batches itself.
    if not isinstance(loss_fn, RescaleLoss):
        trainer.loss_fn = TrainingLoss(trainer.step_loss, trainer.feed.count, trainer._num_averaged)


def fused_loss(trainer: "Trainer", module: nn.Module, default_loss_fn: Any) -> Any:
    if trainer.fused_loss_factory is None:
        return default_loss_fn
    with trainer.amp_context.autocast():
        # Under autocast, as in training: the check runs the model, and some attention kernels need 16-bit inputs.
        trainer.fused_head = output_embeddings_of(module)
    return make_fused_loss(trainer.fused_loss_factory, trainer.fused_head)


def init_optimizer(trainer: "Trainer") -> None:
    """Make the optimizer, its parameter groups and its schedule, and record the configured options."""
    refuse_quantized(trainer.unwrapped_model())
    if trainer.optimization is None:
        # A subclass may have set both in its constructor.
        trainer.given = replace(trainer.given, optimizer=trainer.optimizer, lr_scheduler=trainer.lr_scheduler)
    args, given = trainer.args, trainer.given
    named, elsewhere = trainer._named_parameters(), trainer._names_elsewhere()
    groups = trainer.optimizer_groups
    trainer.optimizer = preparation.make_optimizer(args, given, trainer.optimizer_factory, groups, named, elsewhere)
    trainer.weight_decay_groups = "all"
    # A given optimizer and the user's groups define their own weight decay.
    if given.optimizer is None and groups is None:
        trainer.weight_decay_groups = preparation.decay_groups(
            args,
            trainer.optimizer,
            trainer._whole_model(),
            named,
            elsewhere,
            lambda: preparation.stored_decay_groups(args, trainer.claim, trainer.resume_path),
        )
    trainer.optimizer = trainer._adapt_optimizer(trainer.optimizer, named)
    # Before the schedule, which changes the learning rates of the groups: the configured values must be recorded.
    trainer.optimization = Optimization(trainer.optimizer, named, knows_configuration=True)
    trainer.lr_scheduler = given.lr_scheduler
    if trainer.lr_scheduler is None:
        trainer._init_scheduler()


def follow_optimizer(trainer: "Trainer") -> None:
    """Rebuild `Optimization` for the optimizer and schedule of the hook; without a schedule, rates are constant."""
    named, own = trainer._named_parameters(), trainer.optimization
    # An override of `_init_optimizer` may have set an optimizer without the updates of `param_precision`.
    trainer.optimizer = trainer._adapt_optimizer(trainer.optimizer, named)
    if own is None or own.made_for is not trainer.optimizer:
        own = trainer.optimization = Optimization(trainer.optimizer, named, knows_configuration=False)
    if trainer.lr_scheduler is None:
        trainer.lr_scheduler = make_schedule("constant", trainer.optimizer, 0, 0, None)
    if own.scheduler_state is None:
        own.follow(trainer.lr_scheduler, trainer.optimizer)
    own.norm = trainer.recipes.attach(trainer.optimizer, named) or own.norm


def wrap(trainer: "Trainer") -> None:
    """Call `_wrap`, and adapt to an optimizer, schedule or loader that an override has replaced."""
    optimizer, schedule, loader = trainer.optimizer, trainer.lr_scheduler, trainer.train_dataloader
    trainer._wrap()
    if not is_overridden(trainer, "_wrap"):
        return
    if trainer.train_dataloader is not loader:
        # The new loader may have another length.
        _adapt_train_loader(trainer)
        _count_steps(trainer)
    if trainer.wanted is None or optimizer is None:
        return
    # A wrapper shares the groups and the state of its inner optimizer, so `Optimization` stays valid.
    if trainer.optimizer.param_groups is not optimizer.param_groups:
        trainer.lr_scheduler = None if trainer.lr_scheduler is schedule else trainer.lr_scheduler
        trainer._follow_optimizer()
    elif trainer.lr_scheduler is not schedule and trainer.optimization is not None:
        trainer.optimization.follow(trainer.lr_scheduler, trainer.optimizer)


def tune_memory(trainer: "Trainer") -> None:
    """Let malloc keep freed memory for the next step."""
    # Not before the first step: the full tensors of the set-up are needed once, and would stay in the process.
    if trainer.args.tune_malloc:
        tune_malloc(trainer.device)


def prepare_loop(trainer: "Trainer") -> None:
    """Make the state and the collaborators of the training loop."""
    args, amp = trainer.args, trainer.amp_context
    # The feed was created with the loaders, before the loss existed.
    trainer.feed.loss = trainer.step_loss
    trainer.step_loss.is_on_accelerator = not trainer.on_cpu
    trainer.state = trainer._init_state()
    for name, value in (("epoch_train_steps", trainer.plan.steps_per_epoch), ("num_processes", trainer.num_processes)):
        if not hasattr(trainer.state, name):
            # An override of `_init_state` may return the state of the base class, which lacks these fields.
            setattr(trainer.state, name, value)
    leaves_out = amp.has_loss_scale or trainer.skips_updates
    cadence = Cadence(args, trainer.state, trainer.control, trainer.plan, trainer.eval_dataset is not None)
    trainer.loop = LoopState(
        checkpoints_root(args.output_dir, args.checkpoint_layout),
        trainer.state,
        trainer.control,
        cadence,
        amp,
        trainer.step_loss,
        trainer.watch,
        IntervalMetrics(leaves_out),
        skipped=trainer.skipped,
    )
    trainer._flops_per_token = trainer._compute_flops_per_token()
    trainer.reporter = Reporter(
        trainer.loop,
        SpeedMeter(args.speed_metrics_start_step),
        trainer._flops_per_token,
        leaves_out,
        trainer.reduced_sums,
        trainer._distributed_norms,
        lambda step: findings_of_step(trainer, step),
    )
    trainer.evaluator = Evaluator(trainer)
    if trainer.eval_dataloader is not None:
        # A loader made by a user's hook belongs to `eval_dataset`.
        is_ours = trainer.evaluated_dataset is not None
        trainer.evaluator.dataset = trainer.evaluated_dataset if is_ours else trainer.eval_dataset
    trainer.batch_finder = BatchFinder(trainer) if args.auto_find_batch_size else None
    trainer.steps = StepRunner(trainer)
    trainer.steps.compares_batches = trainer.team.compares_batches(trainer.train_dataset, trainer.layout)


def findings_of_step(trainer: "Trainer", step: int) -> list[GradientFinding]:
    """Gather the findings of all ranks about a step with non-finite gradients; collective."""
    assert trainer.optimization is not None
    return trainer.team.gather(trainer.watch.finding(step, trainer.optimization.names, trainer.saver.finding()))


def prepare_checkpoints(trainer: "Trainer") -> None:
    require_parameters_of(trainer._forward_modules(), trainer.optimizer, type(trainer).__name__)
    trainer.checkpoint_manager = trainer._init_checkpoint_manager()
    trainer.saver = Saver(trainer)
    trainer.replica_check = make_replica_check(trainer)
    # Check names now: at the first save, an unknown name would end a run that has trained for hours.
    components = trainer.get_state_components()
    select_components(components, trainer.args.checkpoint_components)
    select_components(components, skipped_components(trainer), "skip_checkpoint_components")
    # Callbacks may differ between ranks, so an error of one rank must become an error of all.
    with trainer.team.agreement("looking for a callback that supplies the best weights"):
        requirements.require_supplier_of_best(trainer.args, trainer.callbacks)


def skipped_components(trainer: "Trainer") -> list[str]:
    """Return `skip_checkpoint_components`, without "ema" if no average is kept."""
    # Skipping the EMA is harmless without one, so the setting may stay when ema_decay is removed.
    has_average = trainer.recipes.average is not None
    return [key for key in trainer.args.skip_checkpoint_components if key != "ema" or has_average]


def claim_output_dir(trainer: "Trainer") -> CheckpointManager:
    """Lock the output directory before anything is built, and release the lock of an earlier preparation."""
    if trainer.claim is not None:
        trainer.claim.close()
    return CheckpointManager(trainer.checkpoint_config(), trainer.dist, None, None)


def replan(trainer: "Trainer") -> None:
    """Recount the remaining steps of a resumed run with another number of samples per step."""
    samples = trainer.args.per_device_train_batch_size * trainer.layout.part.num_parts
    may_differ = trainer.plan.replan(trainer.state, trainer.train_dataloader.state_dict(), samples)
    trainer.max_steps = trainer.plan.num_steps
    # Only a schedule built here can be built again for the new number of steps.
    is_ours = trainer.given.lr_scheduler is None and not is_overridden(trainer, "_init_optimizer")
    if may_differ and is_ours and not is_overridden(trainer, "_wrap"):
        progress = trainer.lr_scheduler.state_dict()
        # The constructor of a schedule resets the groups to its first learning rate.
        with kept_rates(trainer.optimizer):
            trainer._init_scheduler()
        assert trainer.optimization is not None and trainer.optimization.scheduler_state is not None
        trainer.optimization.scheduler_state.load_state_dict(progress)


def own_peak_memory(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)
