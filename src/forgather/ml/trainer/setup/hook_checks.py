"""Hook validation: overrides that a trainer never calls, or cannot call, raise a TypeError at construction.

`HOOKS` is the list of public hooks with their call arguments. `BaseTrainer` checks each class, and the trainers ask
`is_overridden` where an override changes how they work.
"""

import difflib
import inspect
import logging
from abc import ABC
from collections.abc import Callable, Iterator
from typing import Generic

logger = logging.getLogger(__name__)

HOOKS: dict[str, tuple[str, ...]] = {
    "_prepare": ("train_dataset", "eval_dataset"),
    "_train_loop": (),
    "_eval_loop": (),
    "_init_distributed": (),
    "_init_device": (),
    "_resolve_checkpoint": (),
    "_init_dataloaders": ("train_dataset", "eval_dataset"),
    "_get_dataloader": ("dataset", "batch_size"),
    "_prepare_model": (),
    "_compile_model": (),
    "_wrap_loss_fn": (),
    "_maybe_get_fused_loss_fn": ("module", "default_loss_fn"),
    "_init_optimizer": (),
    "_wrap": (),
    "_init_state": (),
    "_init_checkpoint_manager": (),
    "_setup_periodic_functions": (),
    "_train_step": ("data_iterator",),
    "_prepare_batch": ("batch",),
    "_forward_backward_step": ("input_dict", "labels"),
    "_backward": ("loss",),
    "_clip_grad_norm": ("max_grad_norm",),
    "_should_sync_gradients": (),
    "_count_batch_tokens": ("input_dict", "labels"),
    "_log_step": ("loss_log", "total_norm_log", "tokens_log"),
    "_maybe_log_save_evaluate": (
        "loss_log",
        "total_norm_log",
        "tokens_log",
        "periodic_log",
        "periodic_eval",
        "periodic_save",
    ),
    "_update_training_steps": (),
    "_end_train_loop": ("start_time", "train_steps"),
    "_finalize_training": ("start_time", "speed_metrics_steps"),
    "_prediction_step": ("input_dict", "labels"),
    "_zero_eval_batches_message": (),
    "_format_zero_eval_batches_diagnostic": ("header", "settings", "explanation"),
    "_dispatch_eval_batches": (),
    "_distributed_loss": ("loss",),
    "_distributed_tokens": ("tokens",),
    "_distributed_peak_mem": ("local_peak",),
    "load_best_model": (),
    "_calculate_effective_batch_size": (),
    "_compute_flops_per_token": (),
    "_is_pipeline_parallel": (),
    "_is_model_parallel": (),
    "_initialize_non_persistent_buffers": ("model",),
    "get_state_components": (),
    "get_process_groups": (),
    "_get_dataset_sharing_pattern": (),
    "unwrapped_model": (),
    "state_dict": (),
    "load_state_dict": ("state_dict",),
    "_construct_model": ("device",),
    "_get_example": ("dataloader",),
    "_split_model": ("model", "example", "stage_indices"),
    "_all_reduce_norm": ("total_norm", "norm_type"),
}
"""Hooks with their positional arguments."""

PIPELINE_HOOKS = ("_construct_model", "_get_example", "_split_model", "_all_reduce_norm")

RETIRED = {
    "_eval_loop_all_shards": "override _eval_loop",
    "_check_eval_shards_nonempty": "override _zero_eval_batches_message to change the error for an empty evaluation",
    "_initialize_params": "build and initialise the model in model_init, or override _prepare_model",
    "_eval_schedule_context": "override _prediction_step",
    "_apply_fp8_training": "set fp8_recipe in the arguments, or change the model in _prepare_model",
    "_apply_qat_training": "set qat_recipe in the arguments, or change the model in _prepare_model",
    "_print_modules": "set debug_split_model or debug_model_params in the arguments",
    "_speed_metrics": "override _end_train_loop",
    "_log_stop_condition": "read the attribute _stop_requested_by",
    "_run_final_checkpoint_if_needed": "override _finalize_training",
    "_pipeline_step_for_generation": "call pipeline_generate",
}

FOREIGN = {
    "compute_loss": "_forward_backward_step",
    "training_step": "_forward_backward_step",
    "prediction_step": "_prediction_step",
    "evaluation_loop": "_eval_loop",
    "create_optimizer": "_init_optimizer",
    "create_scheduler": "_init_optimizer",
    "create_optimizer_and_scheduler": "_init_optimizer",
    "configure_optimizers": "_init_optimizer",
    "get_train_dataloader": "_init_dataloaders",
    "get_eval_dataloader": "_init_dataloaders",
}
"""Hooks of other trainers, with Forgather's equivalent."""

_OF_BASE = ("_prepare", "_train_loop", "_eval_loop", "state_dict", "load_state_dict", "get_state_components")
_SIMILAR = 0.85


def check_hooks(trainer_class: type) -> None:
    """Raise TypeError for an override without effect, or with a signature that does not accept the call."""
    # BaseTrainer calls few hooks. A subclass that writes its own loop is free to use the names of the others.
    has_loop = hasattr(trainer_class, "_train_step") and _is_ours(_base_of(trainer_class))
    known = HOOKS if has_loop else {name: HOOKS[name] for name in _OF_BASE}
    for owner, name, function in _own_functions(trainer_class):
        if name in known:
            _refuse_uncalled(trainer_class, owner, name)
            _check_signature(owner, name, function, known[name])
        elif has_loop or name in RETIRED:
            _check_unknown(trainer_class, owner, name)


def is_overridden(trainer: object, name: str) -> bool:
    """Return whether a user's class defines the hook, rather than a Forgather class."""
    return not getattr(type(trainer), name).__module__.startswith("forgather.")


def _base_of(trainer_class: type) -> type:
    return next(base for base in trainer_class.__mro__ if _is_ours(base))


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("forgather.")


def _own_functions(trainer_class: type) -> Iterator[tuple[type, str, Callable[..., object]]]:
    """Yield the callables defined by user classes, most derived first; each name once."""
    seen: set[str] = set()
    for owner in trainer_class.__mro__:
        # Compare classes, not module names: a class that `type()` derives from a Forgather class has the module "abc".
        if _is_ours(owner) or owner in (object, ABC, Generic):
            continue
        for name, value in vars(owner).items():
            if callable(value) and name not in seen:
                seen.add(name)
                yield owner, name, value


def _refuse_uncalled(trainer_class: type, owner: type, name: str) -> None:
    reason = getattr(trainer_class, "uncalled_hooks", {}).get(name)
    if reason is not None:
        raise TypeError(f"{owner.__qualname__}.{name} would never be called: {reason}")


def _check_signature(owner: type, name: str, function: Callable[..., object], arguments: tuple[str, ...]) -> None:
    if isinstance(function, staticmethod | classmethod):
        # The signature check below assumes `self` as the first parameter.
        return
    try:
        inspect.signature(function).bind(None, *arguments)
    except TypeError as error:
        call = ", ".join(("self", *arguments))
        raise TypeError(
            f"{owner.__qualname__}.{name} does not accept the trainer's call {name}({', '.join(arguments)}): {error}. Write "
            f"def {name}({call})."
        ) from None
    except ValueError:
        # Some callables written in C have no signature.
        return


def _check_unknown(trainer_class: type, owner: type, name: str) -> None:
    if name in RETIRED:
        raise TypeError(
            f"{owner.__qualname__}.{name} would never be called: the hook is retired. Instead, {RETIRED[name]}."
        )
    ours = _base_of(trainer_class)
    if name in FOREIGN and not hasattr(ours, name):
        # A class that overrides Forgather's hook as well may call its own method from there.
        if FOREIGN[name] not in _names_defined(trainer_class):
            raise TypeError(
                f"{owner.__qualname__}.{name} would never be called: {ours.__name__} has no such hook. Override "
                f"{FOREIGN[name]}({', '.join(HOOKS[FOREIGN[name]])}) instead; your method {name} may stay if that override "
                "calls it."
            )
    elif name.startswith("_") and not name.startswith("__") and not hasattr(ours, name):
        nearest = difflib.get_close_matches(name, [*HOOKS, *RETIRED], n=1, cutoff=_SIMILAR)
        if nearest:
            logger.warning(
                "%s.%s is not a hook, and the trainer does not call it. Did you mean %s?",
                *(owner.__qualname__, name, nearest[0]),
            )


def _names_defined(trainer_class: type) -> set[str]:
    return {name for _, name, _ in _own_functions(trainer_class)}
