"""Methods of `transformers.Trainer`: the overrides that have an effect, and the overrides that are refused.

A test compares the lists with transformers. `Trainer` of this package checks its class at construction, so an override
without an effect is a TypeError there.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

CALLED = frozenset(
    {
        "_get_train_sampler",
        "_prepare_input",
        "_prepare_inputs",
        "_save",
        "autocast_smart_context_manager",
        "call_model_init",
        "compute_loss",
        "compute_loss_context_manager",
        "create_model_card",
        "create_optimizer",
        "create_optimizer_and_scheduler",
        "create_scheduler",
        "evaluate",
        "evaluation_loop",
        "get_decay_parameter_names",
        "get_eval_dataloader",
        "get_optimizer_cls_and_kwargs",
        "get_test_dataloader",
        "get_train_dataloader",
        "init_hf_repo",
        "log",
        "predict",
        "prediction_step",
        "push_to_hub",
        "save_model",
        "training_step",
    }
)
"""Methods that the trainer calls during a run."""

FORWARDED = frozenset(
    {
        "_get_learning_rate",
        "add_callback",
        "end",
        "floating_point_ops",
        "get_learning_rates",
        "get_num_trainable_parameters",
        "get_optimizer_group",
        "get_total_train_batch_size",
        "is_local_process_zero",
        "is_world_process_zero",
        "log_metrics",
        "loss_is_scaled_for_ga",
        "metrics_format",
        "num_examples",
        "pop_callback",
        "remove_callback",
        "save_metrics",
        "save_state",
        "train",
    }
)
"""Methods and attributes that scripts use. The training loop does not call them."""

_LOOP = "the training loop is Forgather's. Use a callback, or override training_step or compute_loss."
_STATE = "checkpoints contain the complete state and load it. Use a callback with on_save or on_train_begin."
_TARGETS = "targets are counted over all micro-batches and ranks. Override compute_loss to change the loss."
_LOADER = "the trainer builds its loaders itself. Override get_train_dataloader or get_eval_dataloader."
_COLUMNS = "columns are removed by the signature of the model. Set remove_unused_columns=False and use a data_collator."
_WRAPS = "the strategy wraps the model. Change the model before it is passed to the trainer."
_NORM = (
    "the engine computes and clips the gradient norm. Set max_grad_norm, or change gradients in on_pre_optimizer_step."
)
_SEARCH = "hyperparameter search is not available. Start one run for each setting."
_HUB = "uploads run after a save. Override push_to_hub."
_ARGUMENTS = "arguments are checked by the field map. Check yours before the trainer is constructed."
_RANKS = "accelerate does not divide the work here. Set fg_strategy."

REFUSED: Mapping[str, str] = {
    "_build_accelerator_args": _RANKS,
    "_clip_grad_norm": _NORM,
    "_determine_best_metric": "the best checkpoint follows metric_for_best_model. Set greater_is_better, or add a metric.",
    "_evaluate": "evaluations during training call evaluate. Override evaluate.",
    "_finalize_training": _LOOP,
    "_finish_current_push": _HUB,
    "_get_collator_with_removed_columns": _COLUMNS,
    "_get_dataloader": _LOADER,
    "_get_eval_sampler": "evaluations read in the order of the dataset. Override get_eval_dataloader.",
    "_get_grad_norm": _NORM,
    "_get_num_items_in_batch": _TARGETS,
    "_get_output_dir": "checkpoints are in args.output_dir. Set output_dir.",
    "_has_mixed_mesh_grads": _NORM,
    "_hp_search_setup": _SEARCH,
    "_init_training_state": _LOOP,
    "_inner_training_loop": _LOOP,
    "_issue_warnings_after_load": _STATE,
    "_load_best_model": _STATE,
    "_load_callback_state": _STATE,
    "_load_from_checkpoint": _STATE,
    "_load_optimizer_and_scheduler": _STATE,
    "_load_rng_state": _STATE,
    "_load_scaler": _STATE,
    "_maybe_log_save_evaluate": _LOOP,
    "_mixed_mesh_grad_norm": _NORM,
    "_move_model_to_device": "the engine places the model. Set use_cpu, or move the model in model_init.",
    "_prepare_context_parallel_inputs": _RANKS,
    "_prepare_for_training": _LOOP,
    "_push_from_checkpoint": _HUB,
    "_remove_unused_columns": _COLUMNS,
    "_report_to_hp_search": _SEARCH,
    "_run_epoch": _LOOP,
    "_save_checkpoint": _STATE,
    "_save_optimizer_and_scheduler": _STATE,
    "_save_rng_state": _STATE,
    "_save_scaler": _STATE,
    "_set_signature_columns_if_needed": _COLUMNS,
    "_sync_replicated_trainable_parameters": _WRAPS,
    "_track_num_input_tokens": "tokens are always counted. Read state.num_input_tokens_seen.",
    "_tune_save_checkpoint": _SEARCH,
    "_update_auto_batch_size": "auto_find_batch_size halves the batch and keeps the global batch size.",
    "_validate_args": _ARGUMENTS,
    "_wrap_model": _WRAPS,
    "create_accelerator_and_postprocess": _RANKS,
    "get_batch_samples": _TARGETS,
    "get_cp_size": _RANKS,
    "get_sp_size": _RANKS,
    "get_tp_size": _RANKS,
    "hyperparameter_search": _SEARCH,
    "set_initial_training_values": "the number of steps follows from the arguments. Set max_steps or num_train_epochs.",
    "store_flos": "operations are counted from the tokens. Read state.total_flos.",
}
"""Methods that the trainer does not have, with the reason and the alternative."""

_PIPELINE = (
    "a pipeline computes the loss from the logits of its last stage. Pass compute_loss_func, or use fg_strategy='ddp' or "
    "'fsdp2'."
)
_PARTS = "each rank of a pipeline has only its stages. Override save_model, which all ranks call."
_REFUSED_BY_PIPELINES = {
    **dict.fromkeys(
        ("compute_loss", "training_step", "prediction_step", "_prepare_inputs", "_prepare_input"), _PIPELINE
    ),
    **dict.fromkeys(("compute_loss_context_manager", "autocast_smart_context_manager"), _PIPELINE),
    "_save": _PARTS,
}


def check_methods(cls: type, strategy: str) -> None:
    """Raise TypeError for an override without an effect."""
    refused = {**REFUSED, **(_REFUSED_BY_PIPELINES if strategy in ("pipeline", "hybrid") else {})}
    for name, reason in refused.items():
        owner = owner_of(cls, name)
        if owner is not None:
            raise TypeError(f"{owner.__qualname__}.{name} would never be called: {reason}")


def owner_of(cls: type, name: str) -> type | None:
    """Return the user's class that defines a method, or None if this package or no class defines it."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return None if owner is None or owner is object or owner.__module__.startswith("forgather.") else owner


def call(method: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call a method with the keywords that its signature accepts: older overrides do not have all of them."""
    names = _known_names(getattr(method, "__func__", method))
    return method(*args, **(keywords if names is None else {key: keywords[key] for key in keywords if key in names}))


# Weak, because a wrapper of compute_loss exists for each micro-batch and holds its tensors.
_names: "WeakKeyDictionary[Callable[..., Any], frozenset[str] | None]" = WeakKeyDictionary()


def _known_names(function: Callable[..., Any]) -> frozenset[str] | None:
    try:
        if function not in _names:
            _names[function] = _accepted(function)
        return _names[function]
    except TypeError:
        # Some callables have no hash or no weak references.
        return _accepted(function)


def _accepted(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of the parameters of a function; None if it accepts any keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Functions written in C may have no signature.
        return None
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(one.name for one in parameters)
