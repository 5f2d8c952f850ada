"""What is given for an argument, made into the type of its field; and hints for names that do not exist."""

import dataclasses
import difflib
import numbers
import types
import typing
from collections.abc import Mapping
from typing import Any

_OTHER_NAMES = {
    "bf16": "set mixed_precision='bf16' instead",
    "fp16": "set mixed_precision='fp16' instead",
    "evaluation_strategy": "it is called eval_strategy",
    "no_cuda": "it is called use_cpu",
    "tf32": "set float32_matmul_precision='high' instead",
    "data_seed": "seed is that of the data order too",
    "warmup_ratio": "give the number of steps as warmup_steps",
    "save_only_model": "name what not to save in skip_checkpoint_components",
    "optim": "give the trainer an optimizer_factory, or optimizer_cls_and_kwargs",
    "optim_args": "give the trainer an optimizer_factory, or optimizer_cls_and_kwargs",
    "report_to": "give the trainer callbacks",
    "disable_tqdm": "give the trainer callbacks",
    "gradient_checkpointing_kwargs": "give the trainer an enable_activation_checkpoint_fn",
}
"""Arguments of `transformers` that are found elsewhere here."""


def fields_with_types(cls: type) -> dict[str, Any]:
    """Field names and their types, in the order of the fields."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def converted(name: str, value: Any, hint: Any) -> Any:
    """Turn text and numbers into the type of the field, and dicts into nested dataclasses."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if any(_is_a(value, option) for option in options):
        return value
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(option, type) and isinstance(value, Mapping):
            return _group_from(name, value, option)
        if option in (int, float) and isinstance(value, (numbers.Real, str)) and not isinstance(value, bool):
            try:
                number = option(value)
            except (ValueError, OverflowError):
                continue
            if float(number) == float(value):
                return number
        if option is bool and str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
    names = ("None" if option is type(None) else getattr(option, "__name__", str(option)) for option in options)
    expected = " or ".join(names)
    raise ValueError(f"{name}={value!r} has type {type(value).__name__}, expected {expected}.")


def _group_from(name: str, values: Mapping[str, Any], cls: type) -> Any:
    known_names = list(fields_with_types(cls))
    for key in values:
        if key not in known_names:
            raise ValueError(f"{name} has no argument {key!r}{hint_for(str(key), known_names)}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _is_a(value: Any, option: Any) -> bool:
    origin = typing.get_origin(option) or option
    if origin is Any:
        return True
    # A bool is an int and a text a sequence to Python, but nobody means that here.
    for special in (bool, str):
        if isinstance(value, special):
            return bool(origin is special)
    return isinstance(origin, type) and isinstance(value, origin)


def hint_for(name: str, known_names: list[str]) -> str:
    """The end of a sentence about a name that is not among those known."""
    if name in _OTHER_NAMES:
        return f": {_OTHER_NAMES[name]}."
    nearest = difflib.get_close_matches(name, known_names, n=1)
    return f". Did you mean {nearest[0]!r}?" if nearest else "."
