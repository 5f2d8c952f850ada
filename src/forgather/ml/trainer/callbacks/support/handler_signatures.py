"""Handler signatures of callbacks: the arguments of each event, and checks that a handler accepts them.

The trainer calls `handler(args, state, control, **rest)`. The first three are positional, so their names are free. A
handler without `**kwargs` gets only the keywords that it declares. `CallbackHandler` checks and adapts handlers here.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any

logger = logging.getLogger(__name__)

HandlerT = Callable[..., Any]

POSITIONAL = ("args", "state", "control")
KEYWORDS = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader", "trainer")
"""Keyword arguments of every event."""
WEIGHTS_EVENT = "on_load_model_weights"
"""Event of the checkpoint manager, which may have no trainer. All its arguments are keywords."""
EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_init_end": (),
    "on_train_begin": (),
    "on_train_end": (),
    "on_epoch_begin": (),
    "on_epoch_end": (),
    "on_step_begin": (),
    "on_step_end": (),
    "on_forward_backward_begin": (),
    "on_forward_backward_end": (),
    "on_pre_optimizer_step": (),
    "on_optimizer_step": (),
    "on_train_metrics": ("loss", "grad_norm", "tokens"),
    "on_log_step": ("logs",),
    "on_log": ("logs",),
    "on_prediction_step": ("loss", "tokens", "batch", "logits", "labels"),
    "on_evaluate": ("metrics",),
    "on_predict": ("metrics",),
    "on_save": ("checkpoint_path",),
    WEIGHTS_EVENT: ("model", "model_parts", "checkpoint_path"),
}
"""Events, with the keywords that each adds to `KEYWORDS`."""
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def check_handler(callback: object, event: str) -> None:
    """Raise `TypeError` if a handler does not accept the arguments of its event."""
    handler = getattr(callback, event)
    where = f"{type(callback).__qualname__}.{event}"
    if not callable(handler):
        raise TypeError(f"{where} is {handler!r}, which is not callable. {_remedy(event)}")
    signature = _signature_of(handler)
    if signature is None:
        return
    problem = _weights_problem(signature) if event == WEIGHTS_EVENT else _problem(signature, event)
    if problem is not None:
        raise TypeError(f"{where}{signature} cannot be called by the trainer: {problem}. {_remedy(event)}")
    if event != WEIGHTS_EVENT:
        _warn_of_swapped_names(where, signature)


def adapted(handler: HandlerT) -> HandlerT:
    """Return a function that accepts every keyword of the event and passes on only the handler's own keywords."""
    signature = _signature_of(handler)
    if signature is None or _has(signature, Parameter.VAR_KEYWORD):
        return handler
    others = _after_the_positional(signature)
    names = [parameter.name for parameter in others if parameter.kind in _BY_KEYWORD]

    # A handler may name only the keywords that it needs, without **kwargs.
    def call(args: object, state: object, control: object, **rest: object) -> object:
        return handler(args, state, control, **{name: rest[name] for name in names if name in rest})

    return call


def _signature_of(handler: HandlerT) -> Signature | None:
    try:
        return inspect.signature(handler)
    except (TypeError, ValueError):
        # Functions written in C may have no signature to inspect.
        return None


def _problem(signature: Signature, event: str) -> str | None:
    """Return why the signature rejects `handler(args, state, control, **rest)`; None if it accepts the call."""
    given = (*KEYWORDS, *EVENTS[event])
    positional = _positional(signature)
    if len(positional) < len(POSITIONAL) and not _has(signature, Parameter.VAR_POSITIONAL):
        return (
            f"it takes {len(positional)} positional argument(s), but gets {len(POSITIONAL)} ({', '.join(POSITIONAL)})"
        )
    for parameter, passed in zip(positional, POSITIONAL, strict=False):
        # Python would raise only at the first call: "got multiple values for argument".
        if parameter.name in given:
            return f"{passed} is passed as {parameter.name!r}, a keyword argument of the event"
    missing = [one.name for one in _after_the_positional(signature) if _is_missing(one, given)]
    return f"{event} does not pass {', '.join(missing)} (its keywords are {', '.join(given)})" if missing else None


def _weights_problem(signature: Signature) -> str | None:
    try:
        signature.bind(**dict.fromkeys(EVENTS[WEIGHTS_EVENT]))
    except TypeError as error:
        return f"all its arguments are keyword arguments ({', '.join(EVENTS[WEIGHTS_EVENT])}): {error}"
    return None


def _is_missing(parameter: Parameter, given: tuple[str, ...]) -> bool:
    """Return whether a required parameter gets no value, or is positional-only and comes as a keyword."""
    if parameter.kind not in (*_BY_POSITION, Parameter.KEYWORD_ONLY) or parameter.default is not Parameter.empty:
        return False
    return parameter.kind is Parameter.POSITIONAL_ONLY or parameter.name not in given


def _warn_of_swapped_names(where: str, signature: Signature) -> None:
    for parameter, passed in zip(_positional(signature), POSITIONAL, strict=False):
        if parameter.name in POSITIONAL and parameter.name != passed:
            logger.warning(
                "%s%s gets %s as its parameter %r. Handlers get args, state and control by position, in this order.",
                *(where, signature, passed, parameter.name),
            )


def _positional(signature: Signature) -> list[Parameter]:
    return [parameter for parameter in signature.parameters.values() if parameter.kind in _BY_POSITION]


def _after_the_positional(signature: Signature) -> list[Parameter]:
    """Return the parameters that args, state and control do not fill."""
    filled = _positional(signature)[: len(POSITIONAL)]
    return [parameter for parameter in signature.parameters.values() if parameter not in filled]


def _has(signature: Signature, kind: object) -> bool:
    return any(parameter.kind is kind for parameter in signature.parameters.values())


def _remedy(event: str) -> str:
    if event == WEIGHTS_EVENT:
        return f"Write it as def {event}(self, model, checkpoint_path, **kwargs)."
    own = "".join(f"{name}, " for name in EVENTS[event])
    return f"Write it as def {event}(self, args, state, control, {own}**kwargs)."
