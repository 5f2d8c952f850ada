"""Conversion of argument values to the types of dataclass fields, and hints for unknown argument names.

Text from command lines and YAML becomes numbers, booleans and nested dataclasses. A value that does not fit raises
ValueError with the expected type. The argument classes and the trainer constructors call it.
"""

import dataclasses
import enum
import inspect
import json
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from forgather._suggestions import did_you_mean

if typing.TYPE_CHECKING:
    from torch import nn

    Names = Sequence[str]
    Numbers = Sequence[int]
    Options = dict[str, Any]
    Checkpointing = bool | typing.Literal["full", "selective"] | Callable[[int, nn.Module], None]
else:
    # The types that HfArgumentParser can read from a command line: a list of words, and JSON text.
    Names = list[str]
    Numbers = list[int]
    Options = dict[str, Any] | str
    # HfArgumentParser takes the words from the first type, if the second is str.
    Checkpointing = typing.Literal[False, True, "false", "true", "full", "selective"] | str | bool | Callable

NamedT = TypeVar("NamedT", bound="NamedArguments")

MOST = 2**63 - 1
"""Largest number of an argument: ranks exchange integers of 64 bits."""

_OTHER_NAMES = {
    "bf16": "set mixed_precision='bf16' instead",
    "fp16": "set mixed_precision='fp16' instead",
    "evaluation_strategy": "it is called eval_strategy",
    "no_cuda": "it is called use_cpu",
    "tf32": "set float32_matmul_precision='high' instead",
    "data_seed": "seed also sets the data order",
    "full_determinism": "set seed, and call torch.use_deterministic_algorithms(True) in your script",
    "warmup_ratio": "set warmup_steps to the number of steps",
    "save_only_model": "set checkpoint_components=['model'] instead, which saves and loads only the weights",
    "ignore_data_skip": "set skip_checkpoint_components=['dataset'] instead",
    "gradient_checkpointing_kwargs": "pass enable_activation_checkpoint_fn to the trainer",
    "label_names": "labels are read from the column 'labels', 'label' or 'label_ids'; rename others in a data_collator",
    "group_by_length": "set train_sampling_strategy='group_by_length' instead",
    "eval_on_start": "call trainer.evaluate() before trainer.train()",
    "do_train": "call trainer.train()",
    "do_eval": "set eval_strategy, or call trainer.evaluate()",
    "do_predict": "call trainer.evaluate(dataset)",
    "include_num_input_tokens_seen": "tokens are always counted, as total_tokens",
    "push_to_hub": "call trainer.save_model(...) and upload that directory",
    "local_rank": "ranks come from torchrun or forgather train --nproc",
    "ddp_find_unused_parameters": "set ddp={'find_unused_parameters': ...} of DDPTrainingArguments instead",
    "ddp_bucket_cap_mb": "set ddp={'bucket_cap_mb': ...} of DDPTrainingArguments instead",
    "ddp_broadcast_buffers": "set ddp={'broadcast_buffers': ...} of DDPTrainingArguments instead",
    "ddp_static_graph": "set ddp={'static_graph': ...} of DDPTrainingArguments instead",
    "deepspeed": "use FSDP2Trainer, or DDPTrainer with ddp.shard_optimizer=True",
    "fsdp": "use FSDP2Trainer",
}
"""Arguments of `transformers` with another name or place in Forgather."""


class NamedArguments:
    """Base of argument classes. A wrong call raises TypeError with the right name, or the most similar one."""

    def __new__(cls: type[NamedT], *values: object, **named: object) -> NamedT:
        # In __new__, because a dataclass generates its own __init__, which would raise a plain TypeError.
        if values or not named.keys() <= cls.__dict__.get("__dataclass_fields__", {}).keys():
            _check_call(cls, values, named)
        return super().__new__(cls)


def _check_call(cls: type, values: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    # A subclass may define its own constructor with further parameters.
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    try:
        signature.bind(None, *values, **named)
    except TypeError:
        known_names = list(signature.parameters)[1:]
        refuse_unknown(cls.__name__, named.keys() - known_names, known_names, TypeError)
        if values and known_names:
            raise TypeError(
                f"{cls.__name__} takes its arguments by name, but was given {values[0]!r} by position. Write "
                f"{cls.__name__}({known_names[0]}={values[0]!r}), or the argument that you mean."
            ) from None


def refuse_unknown(
    owner: str, unknown: Iterable[str], known_names: list[str], error_type: type[Exception] = ValueError
) -> None:
    """Raise for the first unknown name, with the right name or the most similar one."""
    # Sorted, because the names may come from a set, and all ranks should raise the same error.
    for name in sorted(map(str, unknown)):
        raise error_type(f"{owner} has no argument {name!r}{hint_for(name, known_names)}")


def fields_with_types(cls: type) -> dict[str, Any]:
    """Return field names and their types, in field order."""
    hints = _type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _type_hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError:
        # A hint names a type that only type checkers import, or that a function defines. Do not check such fields.
        return {field.name: Any if isinstance(field.type, str) else field.type for field in dataclasses.fields(cls)}


def converted(name: str, value: object, hint: object) -> Any:
    """Convert text and numbers to the type of the field, and dicts to nested dataclasses."""
    options = _options(hint)
    # An exact match wins over a conversion: for `bool | str` a path stays text.
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
            # Reject a lossy conversion, such as 1.5 for an int field.
            if float(number) == float(value):
                return number
        if option is bool and str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        if isinstance(option, type) and issubclass(option, enum.Enum) and value in [one.value for one in option]:
            return option(value)
    expected = " or ".join(map(_in_words, options))
    raise ValueError(f"{name}={value!r} has type {type(value).__name__}, expected {expected}.")


def check_size(name: str, value: object) -> None:
    """Raise ValueError for a number that is NaN, or an integer beyond 64 bits."""
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{name}=nan cannot be used: set a number.")
    if isinstance(value, int) and abs(value) > MOST:
        raise ValueError(f"{name}={_shortened(value)} cannot be used: it must be at most 2**63 - 1 ({MOST}).")


def _shortened(value: int) -> str:
    # Python refuses to print integers of more than 4300 digits.
    return str(value) if abs(value) < 10**40 else f"an integer of {value.bit_length()} bits"


def _options(hint: object) -> tuple[Any, ...]:
    """Return the alternatives of a type hint, such as (str, NoneType) for `str | None` and `Optional[str]`."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _options(typing.get_args(hint)[0])
    if origin is typing.Union or isinstance(hint, types.UnionType):
        return tuple(option for part in typing.get_args(hint) for option in _options(part))
    return (hint,)


def _in_words(option: object) -> str:
    if option is type(None):
        return "None"
    if typing.get_origin(option) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(option)))
    if isinstance(option, type) and issubclass(option, enum.Enum):
        return " or ".join(repr(one.value) for one in option)
    return str(option) if typing.get_args(option) else getattr(option, "__name__", str(option))


def _group_from(name: str, values: Mapping[str, Any], cls: type) -> Any:
    known_names = list(fields_with_types(cls))
    # Prefix messages with the name of the group: fields of different groups may have equal names.
    refuse_unknown(name, [key for key in values if key not in known_names], known_names)
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _is_a(value: object, option: object) -> bool:
    if typing.get_origin(option) is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(option))
    origin = typing.get_origin(option) or option
    if not isinstance(origin, type):
        # Any, type variables and similar hints cannot be checked.
        return True
    # In Python a bool is an int and a str is a sequence. Neither is meant here.
    for special in (bool, str):
        if isinstance(value, special):
            return bool(origin is special)
    try:
        # Accept a tuple for a list.
        return isinstance(value, (list, tuple) if origin is list else origin)
    except TypeError:
        # A protocol without runtime_checkable does not support isinstance.
        return True


def mapping_in(name: str, text: str) -> dict[str, Any]:
    """Return the mapping in a JSON text, as passed on a command line."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{name}={text!r} cannot be used: pass a mapping, or JSON such as '{{\"power\": 2.0}}'.")
    return value


def hint_for(name: str, known_names: list[str]) -> str:
    """Return the end of an error message about an unknown name."""
    if name in _OTHER_NAMES:
        return f": {_OTHER_NAMES[name]}."
    return f".{did_you_mean(name, known_names)}"
