"""Validation of trainer constructor arguments: keywords, model, model_init, collator, loss and optimizer.

Wrong calls fail at construction, before anything is built, with a message that shows the correct call. The constructors
of trainers call these checks.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeGuard, TypeVar

from torch import nn

from forgather.ml.trainer.arguments.field_values import hint_for
from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments
from forgather.ml.trainer.trainer_types import LRSchedulerT, OptimizerT

L = TypeVar("L")
P = ParamSpec("P")

_OTHER_NAMES = {
    "tokenizer": "it is called processing_class",
    "optimizers": "pass them separately, as optimizer and lr_scheduler",
    "compute_loss": "it is called compute_loss_func",
    "dataset": "it is called train_dataset",
    "collate_fn": "it is called data_collator",
    "config": "it is called args",
    "peft_config": "build the adapters first: model=get_peft_model(model, peft_config)",
}
"""Trainer keywords of `transformers` and `trl` with another name or place in Forgather."""


def explains_calls(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate a trainer's constructor so that wrong calls raise a TypeError with the correct call."""

    @functools.wraps(init)
    def checked(*given: P.args, **named: P.kwargs) -> None:
        trainer, *by_position = given
        owner = type(trainer)
        if by_position:
            raise TypeError(_by_position_message(owner.__name__, by_position))
        # A subclass may consume keywords before it calls this constructor, so only names from here on count.
        accepted = _accepted_names(owner, checked)
        unknown = next((name for name in named if accepted and name not in accepted), None)
        if unknown is not None:
            known = [*dict.fromkeys([*_accepted_names(owner), *accepted])]
            hint = f": {_OTHER_NAMES[unknown]}." if unknown in _OTHER_NAMES else hint_for(unknown, known)
            raise TypeError(f"{owner.__name__} has no argument {unknown!r}{hint}{_for_arguments(owner, unknown)}")
        if "args" not in named:
            raise TypeError(
                f"{owner.__name__} needs args: an arguments object such as TrainingArguments(output_dir=...), or a dict of "
                "its fields, such as args={'output_dir': ...}."
            )
        init(*given, **named)

    return checked


def _accepted_names(cls: type, first: object = None) -> list[str]:
    """Return the keywords of all constructors in the MRO, starting at `first`; empty if the chain accepts any keyword."""
    names: list[str] = []
    is_reached, takes_any = first is None, False
    for base in cls.__mro__:
        init = vars(base).get("__init__")
        is_reached = is_reached or init is first
        if init is None or not is_reached or base is object:
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        names += [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        if not takes_any:
            # Without **kwargs a constructor passes no unknown keywords on to its bases.
            break
    return [] if takes_any else names


def merged_signature(cls: type) -> inspect.Signature:
    """Return the signature of a class, including parameters that pass through **kwargs to its bases."""
    merged: dict[str, inspect.Parameter] = {}
    constructors = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base) and base is not object]
    for number, init in enumerate(constructors):
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for one in parameters:
            # Parameters of base classes arrive through **kwargs, so they can only be passed by keyword.
            if one.kind is not one.VAR_KEYWORD and one.name not in merged:
                merged[one.name] = one if number == 0 else one.replace(kind=one.KEYWORD_ONLY)
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return inspect.Signature(sorted(merged.values(), key=lambda one: one.kind))


def merged_documentation(cls: type) -> str:
    """Return the docstring of a trainer class, including the parameters documented by its bases."""
    own = cls.__doc__ or ""
    documented = next((base.__doc__ for base in cls.__mro__[1:] if "Args:\n" in (base.__doc__ or "")), None)
    if documented is None:
        return own
    inherited = documented.split("Args:\n", 1)[1].rstrip()
    head = own.rstrip() if "Args:\n" in own else f"{own.rstrip()}\n\n    Args:"
    return f"{head}\n{inherited}\n    "


def _for_arguments(owner: Any, name: str) -> str:
    fields = getattr(owner.arguments_class, "__dataclass_fields__", {})
    return f" It is a field of the arguments: args={{{name!r}: ...}}." if name in fields else ""


def _by_position_message(owner: str, values: list[Any]) -> str:
    names = []
    for value in values:
        is_arguments = isinstance(value, (MinimalTrainingArguments, Mapping)) or "Arguments" in type(value).__name__
        names.append("args" if is_arguments else "model" if isinstance(value, nn.Module) else "...")
    example = ", ".join(dict.fromkeys(f"{name}=..." if name != "..." else name for name in names))
    return (
        f"{owner} takes its arguments by name, but was given {len(values)} by position (the Trainer of transformers takes "
        f"model, args in this order, and BaseTrainer args, model). Write {owner}({example})."
    )


def one_loss_function(compute_loss_func: L | None, loss_fn: L | None) -> L | None:
    """Return the loss function that was given by one of its two names."""
    if loss_fn is not None and compute_loss_func is not None:
        raise ValueError("loss_fn is an alias of compute_loss_func: pass only one of them.")
    return compute_loss_func if loss_fn is None else loss_fn


def check_given(
    owner: str,
    args: object,
    model: object,
    model_init: object,
    data_collator: object,
    compute_loss_func: object,
    callbacks: object,
) -> None:
    """Raise ValueError for an object of the wrong kind."""
    if isinstance(args, nn.Module):
        was_swapped = isinstance(model, (MinimalTrainingArguments, Mapping))
        problem = "args and model are swapped" if was_swapped else f"args={type(args).__name__}(...) is a model"
        raise ValueError(
            f"{problem}: write {owner}(args=..., model=...). By position BaseTrainer takes args first; the Trainer of "
            "transformers takes model first."
        )
    if model is None and model_init is None:
        raise ValueError(f"{owner} needs a model, or model_init: a function without arguments that builds it.")
    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(_no_model_message(model))
    if model_init is not None:
        _check_model_init(model_init)
    for name, function in (("data_collator", data_collator), ("compute_loss_func", compute_loss_func)):
        if function is not None:
            _check_function(name, function)
    if callbacks is not None and (isinstance(callbacks, str) or not isinstance(callbacks, Iterable)):
        raise ValueError(
            f"callbacks={_shown(callbacks)} cannot be used: pass a list of callbacks, such as callbacks=[{_shown(callbacks)}]."
        )


def checked_model(model: object, builder: object) -> nn.Module:
    """Return the result of `model_init`; raise ValueError unless it is an nn.Module."""
    if isinstance(model, nn.Module):
        return model
    name = getattr(builder, "__qualname__", type(builder).__qualname__)
    reason = "a function without return gives None" if model is None else "only an nn.Module can be trained"
    raise ValueError(
        f"model_init ({name}) returned {_shown(model)} instead of a model: {reason}. Return the model that it builds."
    )


def _is_optimizer(value: object) -> TypeGuard[OptimizerT]:
    # By attribute, not by class: wrappers and composite optimizers may not derive from torch's class.
    return hasattr(value, "param_groups")


def _is_scheduler(value: object) -> TypeGuard[LRSchedulerT]:
    return not isinstance(value, type) and hasattr(value, "step")


def check_optimizer(name: str, optimizer: object) -> OptimizerT:
    """Return the optimizer; raise ValueError if the value of argument `name` is not an optimizer."""
    if isinstance(optimizer, type):
        raise ValueError(
            f"{name}={optimizer.__qualname__} is a class, not an optimizer: pass optimizer_cls_and_kwargs="
            f"({optimizer.__qualname__}, {{'lr': ...}}), or an optimizer over the model's parameters."
        )
    if not _is_optimizer(optimizer):
        raise ValueError(
            f"{_source(name, optimizer)} is not an optimizer: it needs param_groups and step(), as in torch.optim. Pass an "
            "optimizer, optimizer_cls_and_kwargs=(torch.optim.SGD, {'lr': ...}), or optimizer_factory, a function of the "
            "named parameters that returns an optimizer."
        )
    return optimizer


def check_scheduler(name: str, scheduler: object) -> LRSchedulerT:
    """Return the schedule; raise ValueError if the value of argument `name` is not a schedule."""
    if not _is_scheduler(scheduler):
        raise ValueError(
            f"{_source(name, scheduler)} is not a learning-rate schedule: it needs step(), as in torch.optim.lr_scheduler. "
            "Pass lr_scheduler_factory, a function of the optimizer that returns a schedule, or omit it and set "
            "lr_scheduler_type."
        )
    return scheduler


def check_optimization(optimizer: object, scheduler: object, class_and_options: object) -> None:
    """Raise ValueError for an invalid optimizer, schedule, or optimizer_cls_and_kwargs."""
    if optimizer is not None:
        check_optimizer("optimizer", optimizer)
    if scheduler is not None:
        check_scheduler("lr_scheduler", scheduler)
    if class_and_options is None:
        return
    if not _is_class_with_options(class_and_options):
        raise ValueError(
            f"optimizer_cls_and_kwargs={_shown(class_and_options)} cannot be used: pass a class and a dict of its options, "
            "such as (torch.optim.SGD, {'lr': 0.1})."
        )


def _is_class_with_options(given: object) -> bool:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        return False
    return callable(given[0]) and isinstance(given[1], Mapping)


def _no_model_message(model: object) -> str:
    if isinstance(model, type):
        name = model.__qualname__
        return (
            f"model={name} is a class, not a model. Pass an instance, model={name}(...), or let the trainer build it, "
            f"model_init={name}."
        )
    if isinstance(model, str):
        return (
            f"model={model!r} is a string, not a model. Load the model, such as with "
            f"AutoModelForCausalLM.from_pretrained({model!r}), and pass the result."
        )
    if isinstance(model, MinimalTrainingArguments):
        return f"model={type(model).__name__}(...) is an arguments object, not a model: pass it as args."
    if isinstance(model, Mapping):
        return (
            f"model is a mapping with the keys {list(model)[:3]}, such as a state_dict, and not a model. Build the model, call "
            "model.load_state_dict(...), and pass the model."
        )
    if callable(model):
        return f"model={_shown(model)} is a function, not a model: pass it as model_init, and the trainer will call it."
    return (
        f"model={_shown(model)} cannot be trained: its type is {type(model).__name__}. Pass an nn.Module, or model_init, a "
        "function without arguments that builds the model."
    )


def _check_model_init(model_init: object) -> None:
    if isinstance(model_init, nn.Module):
        raise ValueError(
            f"model_init={type(model_init).__qualname__}(...) is a model: pass it as model. model_init is a function "
            "without arguments that builds the model."
        )
    if not callable(model_init):
        raise ValueError(
            f"model_init={_shown(model_init)} cannot be used: it must be a function without arguments that builds the model."
        )
    try:
        inspect.signature(model_init).bind()
    except TypeError as error:
        raise ValueError(
            f"model_init={_shown(model_init)} must accept a call without arguments: {error}. Bind the arguments, such as with "
            "model_init=lambda: build(config) or functools.partial."
        ) from None
    except ValueError:
        # Some callables written in C have no signature.
        return


def _check_function(name: str, function: object) -> None:
    # A class is callable too: passing nn.CrossEntropyLoss without parentheses would fail only at the first step.
    if isinstance(function, type) and any("__call__" in vars(base) for base in function.__mro__):
        raise ValueError(
            f"{name}={function.__qualname__} is a class, but only its instances can be called: pass an instance, "
            f"{name}={function.__qualname__}(...)."
        )
    if not callable(function):
        expected = "(list of samples) -> batch" if name == "data_collator" else "(logits, labels) -> loss"
        raise ValueError(f"{name}={_shown(function)} cannot be used: it must be a function, {expected}.")


def _source(name: str, value: object) -> str:
    return f"The result of {name}, {_shown(value)}," if name.endswith("factory") else f"{name}={_shown(value)}"


def _shown(value: object) -> str:
    """Return the text of a value for messages: the repr of simple values, the name of functions and objects."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return repr(value)
    name = getattr(value, "__qualname__", None)
    return str(name) if name is not None else f"{type(value).__qualname__}(...)"
