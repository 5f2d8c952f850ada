"""Combinations of trainer arguments and objects that are rejected at construction.

Each check raises ValueError with the setting to change. They depend on the objects passed to the trainer; checks of the
arguments alone are in `arguments.checks`. `phases.refuse` calls them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forgather.ml.checkpoint.components import require_known_components
from forgather.ml.optim.opt_utils import check_group_map
from forgather.ml.optim.step_in_backward import refuse_several_optimizers
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.loading.builders import kind_of
from forgather.ml.trainer.ranks.replica_check import has_replicas
from forgather.ml.trainer.setup.declared_state import Shared
from forgather.ml.trainer.setup.given_objects import check_optimization
from forgather.ml.trainer.setup.hook_checks import is_overridden
from forgather.ml.trainer.setup.torch_settings import cuda_graphs_problem
from forgather.ml.trainer.trainer_types import LRSchedulerT, OptimizerT

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer


@dataclass(frozen=True)
class Given:
    """Optimizer, schedule and loss as passed by the caller; the trainer's attributes change in preparation."""

    optimizer: OptimizerT | None = None
    lr_scheduler: LRSchedulerT | None = None
    optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None
    loss_fn: object = None


def require_functions(functions: Mapping[str, object], groups: Mapping[str, Any] | None, given: Given) -> None:
    """Raise ValueError for factories that are not callable, and for invalid optimizers or schedules."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ValueError(f"{name}={function!r} cannot be used: it must be a function.")
    if groups is not None:
        check_group_map(groups)
    check_optimization(given.optimizer, given.lr_scheduler, given.optimizer_cls_and_kwargs)


def require_builder(args: TrainingArguments, has_builder: bool) -> None:
    # These settings apply while the trainer builds the model, so they would have no effect on a finished model.
    for name, default in (("default_dtype", None), ("construct_model_on", "default")):
        if not has_builder and getattr(args, name) != default:
            raise ValueError(
                f"{name}={getattr(args, name)!r} has no effect on a finished model: pass model_init, a function that builds "
                "the model, instead of model."
            )


def require_eval_dataset(args: TrainingArguments, has_dataset: bool) -> None:
    asked = {
        "eval_strategy": args.eval_strategy != "no",
        "eval_on_save": args.eval_on_save,
        "eval_on_start": args.eval_on_start,
    }
    for name, needs_dataset in asked.items():
        if needs_dataset and not has_dataset:
            raise ValueError(
                f"{name}={getattr(args, name)!r} needs an eval_dataset. Pass one to the trainer, or disable evaluations."
            )


def require_map_style(dataset: object) -> None:
    """Raise ValueError for training data without lengths by index, which `group_by_length` needs."""
    kind = kind_of(dataset)
    if kind != "map":
        what = "a stream" if kind == "iterable" else "a loader"
        raise ValueError(
            f"train_sampling_strategy='group_by_length' needs a map-style dataset, with __len__ and __getitem__, but the "
            f"training data are {what} ({type(dataset).__name__}), which has its own order. Pass the dataset itself, or group "
            "its samples by length before."
        )


def require_own_loader(trainer: "Trainer[Any]") -> None:
    """Raise ValueError for `skip_samples` with a hook that builds another loader, which would not leave them out."""
    hooks = ("_init_dataloaders", "_get_dataloader")
    overridden = next((name for name in hooks if is_overridden(trainer, name)), None)
    if overridden is not None and trainer.skipped.samples:
        raise ValueError(
            f"skip_samples cannot be combined with {type(trainer).__name__}.{overridden}, which builds its own loader. Leave "
            "the samples out there, or use skip_steps."
        )


def require_smoothing(factor: float, has_loss: bool) -> None:
    """Raise ValueError for label smoothing of a loss function that the user defines."""
    if factor and has_loss:
        raise ValueError(
            f"label_smoothing_factor={factor} cannot be combined with compute_loss_func or fused_loss_factory: both define "
            "the loss. Smooth the labels in your loss function, or remove one of the two."
        )


def require_repeatable(trainer: "Trainer[Any]") -> None:
    """Raise ValueError for trainers that cannot repeat a step that ran out of memory."""
    reason = trainer.unrepeatable
    overridden = [name for name in ("_train_step", "_update_parameters") if is_overridden(trainer, name)]
    if overridden:
        reason = f"{overridden[0]} is overridden, and its work cannot be undone"
    local = getattr(trainer.args, "post_local_sgd", None)
    if local is not None and local.enabled:
        reason = "post_local_sgd hooks into the gradient reduction of DDP, which a repeated step does without"
    if reason:
        raise ValueError(
            f"auto_find_batch_size=True cannot be used with {type(trainer).__name__}: {reason}. Set "
            "auto_find_batch_size=False and a smaller per_device_train_batch_size; global_batch_size keeps the samples of a "
            "step."
        )


def require_replicas(trainer_name: str, table: Mapping[str, Shared]) -> None:
    """Raise ValueError for `replica_check_steps` if no two ranks hold copies of the same parameters."""
    if not has_replicas(table.get("model")):
        raise ValueError(
            f"replica_check_steps has no effect with {trainer_name} and these arguments: it compares copies of the "
            "parameters, and here every parameter exists once. Set it to 0, or use replicas: DDPTrainer, AccelTrainer, "
            "HybridTrainer with dp_strategy='replicate', or FSDP2Trainer with fsdp2.replicate_size of 2 or more."
        )


def require_components(args: TrainingArguments, known: tuple[str, ...] | None) -> None:
    """Raise ValueError for unknown component names; `known` is None if the user declares the components."""
    if "ema" in (args.checkpoint_components or ()) and args.ema_decay is None:
        raise ValueError(
            "checkpoint_components contains 'ema', the averaged weights, but ema_decay=None keeps no average. Set "
            "ema_decay, or remove 'ema'."
        )
    if known is None:
        return
    for setting in ("checkpoint_components", "skip_checkpoint_components"):
        require_known_components(known, getattr(args, setting) or (), setting)


def require_recipes(
    args: TrainingArguments,
    given: Given,
    groups: Mapping[str, Any] | None,
    has_fused_loss: bool,
    device_type: str,
    is_pipeline: bool,
) -> None:
    """Raise ValueError for recipes that cannot work with the objects or the device of the trainer."""
    if has_fused_loss and given.loss_fn is not None:
        raise ValueError(
            "fused_loss_factory cannot be combined with compute_loss_func: both define the loss. Remove one of them."
        )
    if args.fuse_optim_with_backward:
        refuse_several_optimizers(given.optimizer, groups)
    # Imported on demand, since only quantised runs need these modules.
    if args.fp8_recipe is not None:
        from forgather.ml.quantization.float8 import require_fp8

        require_fp8(args.fp8_recipe, device_type)
    if args.qat_recipe is not None:
        from forgather.ml.quantization.qat import require_qat

        require_qat(args.qat_recipe, device_type)
    if args.torch_compile:
        _refuse_cuda_graphs(args, device_type, is_pipeline)


def _refuse_cuda_graphs(args: TrainingArguments, device_type: str, is_pipeline: bool) -> None:
    mode = args.torch_compile_mode
    by_layer = args.torch_compile_scope == "layer"
    problem = cuda_graphs_problem(mode, device_type, args.gradient_accumulation_steps, is_pipeline, by_layer)
    if problem is not None:
        raise ValueError(
            f"torch_compile_mode={mode!r} replays CUDA graphs, which cannot be used here: {problem}. Use "
            "torch_compile_mode='default' or 'max-autotune-no-cudagraphs'."
        )


def require_supplier_of_best(args: TrainingArguments, callbacks: Iterable[object]) -> None:
    chosen = args.checkpoint_components
    # A callback may load weights that the checkpoint does not contain.
    can_supply = any(hasattr(callback, "on_load_model_weights") for callback in callbacks)
    if args.load_best_model_at_end and chosen is not None and "model" not in chosen and not can_supply:
        raise ValueError(
            f"load_best_model_at_end=True needs the weights of the best checkpoint, but checkpoint_components={chosen} "
            "saves no weights, and no callback implements on_load_model_weights. Add 'model' or such a callback, or set "
            "load_best_model_at_end=False."
        )
