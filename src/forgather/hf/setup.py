"""Construction of a facade: arguments, seed, log levels, model, collator and engine.

Each function does one part of `transformers.Trainer.__init__`. `Trainer` of this package calls them in order.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import transformers
from torch import nn

from forgather.hf.arguments import TrainingArguments
from forgather.hf.engine.hooks import FacadeHooks
from forgather.hf.engine.strategies import PIPELINES, engine_class
from forgather.hf.fields.engine_arguments import to_engine_arguments
from forgather.hf.methods import call
from forgather.hf.optimizers import check_sources, with_decay

if TYPE_CHECKING:
    from forgather.hf.trainer import Trainer


def checked_arguments(args: Any) -> Any:
    """Return the arguments, or default ones; raise TypeError for an object of another class."""
    if args is None:
        return TrainingArguments(output_dir="tmp_trainer")
    if not isinstance(args, transformers.TrainingArguments):
        raise TypeError(
            f"args must be forgather.hf.TrainingArguments, not {type(args).__module__}.{type(args).__qualname__}. The "
            "trainers of forgather.ml.trainer take Forgather's own arguments."
        )
    return args


def use_seed(args: Any) -> None:
    """Seed all random generators before a model is built."""
    if args.full_determinism:
        transformers.enable_full_determinism(args.seed)
    else:
        transformers.set_seed(args.seed)


def use_log_levels(args: Any) -> None:
    level = args.get_process_log_level()
    transformers.utils.logging.set_verbosity(level)
    if args.log_level != "passive" or not args.should_log:
        own = logging.getLogger("forgather")
        own.setLevel(level)
        if not (own.handlers or logging.getLogger().handlers):
            # A script without a logging set-up would not see the level that it asked for.
            own.addHandler(logging.StreamHandler())


def default_collator(processing_class: Any) -> Callable[..., Any]:
    """Return the collator that transformers uses by default: padding for a tokenizer, else stacking."""
    pads = (transformers.PreTrainedTokenizerBase, transformers.SequenceFeatureExtractor)
    if isinstance(processing_class, pads):
        tokenizer: Any = processing_class
        collator: Callable[..., Any] = transformers.DataCollatorWithPadding(tokenizer)
        return collator
    stacking: Callable[..., Any] = transformers.default_data_collator
    return stacking


def resolved_model(
    trainer: "Trainer", model: nn.Module | None, model_init: Callable[..., nn.Module] | None, strategy: str
) -> nn.Module | None:
    """Return the model of the trainer; None for a pipeline, which builds its stages from model_init."""
    if (model is None) == (model_init is None):
        raise ValueError("Trainer needs either model or model_init, and not both.")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, not {model!r} ({type(model).__name__}). To load a model by name, use "
            "AutoModel.from_pretrained or the class for its task."
        )
    if strategy in PIPELINES:
        return model
    if model is None:
        model = trainer.call_model_init()
    config = getattr(model, "config", None)
    if config is not None:
        config.use_cache = trainer.args.use_cache
    return model


def rebuild_model(trainer: "Trainer") -> None:
    """Build the model again for each training, with the same seed, as transformers does with model_init."""
    use_seed(trainer.args)
    model = resolved_model(trainer, None, trainer.model_init, trainer._strategy)
    assert model is not None, "only pipelines build the model later"
    trainer.model = model


def aligned_model(trainer: "Trainer") -> None:
    """Copy the special tokens of the processor to the configuration of the model."""
    kinds = (transformers.PreTrainedTokenizerBase, transformers.ProcessorMixin)
    if isinstance(trainer.processing_class, kinds) and hasattr(trainer.model, "config"):
        from transformers.trainer_utils import align_special_tokens

        align_special_tokens(trainer.model, trainer.processing_class)


def build_engine(
    trainer: "Trainer",
    strategy: str,
    model: nn.Module | None,
    callbacks: Sequence[Any] | None,
    optimizers: tuple[Any, Any],
    compute_metrics: Callable[..., Any] | None,
    preprocess_logits: Callable[..., Any] | None,
) -> FacadeHooks:
    """Return the engine of the strategy, connected with the facade."""
    check_sources(trainer, optimizers)
    args, cls = trainer.args, engine_class(strategy)
    trainer._engine_arguments = to_engine_arguments(args, cls.arguments_class)
    keywords: dict[str, Any] = {
        "args": trainer._engine_arguments,
        "data_collator": trainer.data_collator,
        "train_dataset": trainer.train_dataset,
        "eval_dataset": trainer.eval_dataset,
        "processing_class": trainer.processing_class,
        "callbacks": callbacks,
        "optimizer": optimizers[0],
        "lr_scheduler": optimizers[1],
        "optimizer_cls_and_kwargs": with_decay(trainer.optimizer_cls_and_kwargs, args),
        "compute_metrics": compute_metrics,
        "preprocess_logits_for_metrics": preprocess_logits,
        **_model_keywords(trainer, strategy, model),
    }
    if args.gradient_checkpointing and args.gradient_checkpointing_kwargs:
        options = dict(args.gradient_checkpointing_kwargs)
        keywords["enable_activation_checkpoint_fn"] = lambda _, module: _checkpoint(module, options)
    engine: FacadeHooks = cls(**keywords)
    engine.follow(trainer)
    return engine


def _model_keywords(trainer: "Trainer", strategy: str, model: nn.Module | None) -> dict[str, Any]:
    """Return the model, or the function that builds it, and other objects that a strategy needs."""
    if strategy in PIPELINES:
        keywords: dict[str, Any] = {"model": model, "model_init": trainer.model_init}
        schedule = getattr(trainer.args, "fg_pipe_schedule", None)
        keywords |= {} if schedule is None else {"pipe_schedule_factory": schedule}
        function = trainer.compute_loss_func
        return {**keywords, "loss_fn": None if function is None else _loss_of_logits(function)}
    if strategy == "accelerate":
        from accelerate import Accelerator  # type: ignore[import-untyped]

        precision = getattr(trainer.args, "mixed_precision", "no")
        return {"model": model, "accelerator": Accelerator(cpu=trainer.args.use_cpu, mixed_precision=precision)}
    return {"model": model}


def _loss_of_logits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss of (logits, labels) that calls a compute_loss_func of transformers with model outputs."""
    from transformers.modeling_outputs import CausalLMOutput

    def loss(logits: Any, labels: Any) -> Any:
        return call(function, CausalLMOutput(logits=logits), labels, num_items_in_batch=None)

    return loss


def _checkpoint(module: Any, options: dict[str, Any]) -> None:
    own = {name: options[name] for name in ("every_n_layers", "offload") if name in options}
    rest = {name: value for name, value in options.items() if name not in own}
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=rest or None, **own)
