"""Calls the handlers of callbacks, and costs next to nothing for events that nobody listens to."""

import inspect
import logging
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from forgather._suggestions import nearest_name
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl

logger = logging.getLogger(__name__)

_STOP_FLAGS = ("should_training_stop", "should_epoch_stop", "should_abort_without_save")
_stop_flags = attrgetter(*_STOP_FLAGS)


_METRIC_EVENTS = ("on_log", "on_evaluate")
"""Events with metrics, to which callbacks may add: those that set `reads_final_metrics` are told last."""
EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_step_end",
    "on_forward_backward_begin",
    "on_forward_backward_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_train_metrics",
    "on_log_step",
    "on_log",
    "on_prediction_step",
    "on_evaluate",
    "on_save",
    "on_load_model_weights",
)
_EVENTS_OF_TRANSFORMERS = ("on_substep_end", "on_predict", "on_push_begin")


class CallbackHandler:
    """The callbacks of a trainer, `defaults` first; `context` holds the keywords that every handler gets.

    A callback of the class of a default one, or of a subclass, takes its place.
    """

    def __init__(self, callbacks: Iterable[Any], defaults: Iterable[Any] = ()) -> None:
        self.callbacks: list[Any] = list(defaults)
        self.context: dict[str, Any] = {}
        self._defaults = list(self.callbacks)
        self._handlers: dict[Any, list[tuple[str, Callable[..., Any]]]] = {}
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        """Add a callback, or let it replace the default one of its class; a class is instantiated."""
        callback = _instance(callback) if isinstance(callback, type) else callback
        _require_handlers(callback)
        self._handlers.clear()
        for position, present in enumerate(self.callbacks):
            if isinstance(callback, type(present)) and any(present is default for default in self._defaults):
                self.callbacks[position] = callback
                return
        self.callbacks.append(callback)

    def pop(self, callback: Any) -> Any | None:
        """Remove and return a callback, given itself or its class; None when there is no such one."""
        for position, present in enumerate(self.callbacks):
            if present is callback or (isinstance(callback, type) and isinstance(present, callback)):
                self._handlers.clear()
                return self.callbacks.pop(position)
        return None

    def listens(self, event: str) -> bool:
        """Whether any callback has a handler for the event."""
        return bool(self._of(event))

    def dispatch(self, event: str, control: TrainerControl, readers: bool | None = None, **details: Any) -> None:
        """Call every handler of the event; what one returns counts as its wishes.

        `readers` limits this to callbacks that read final metrics (True), or to the others (False).
        """
        handlers = self._handlers.get(event if readers is None else (event, readers))
        if handlers is None:
            handlers = self._of(event, readers)
        for name, handler in handlers:
            before = _stop_flags(control)
            returned = handler(**self.context, **details)
            if returned is not None and returned is not control:
                _adopt(control, returned)
            after = _stop_flags(control)
            if after != before:
                for flag, is_set, was_set in zip(_STOP_FLAGS, after, before, strict=True):
                    if is_set and not was_set:
                        logger.info("%s asked for %s in %s", name, flag, event)

    def _of(self, event: str, readers: bool | None = None) -> list[tuple[str, Callable[..., Any]]]:
        key = event if readers is None else (event, readers)
        if key not in self._handlers:
            listening = [callback for callback in self.callbacks if hasattr(callback, event)]
            if event in _METRIC_EVENTS:
                # A stable sort: within each kind, the order of the list.
                listening.sort(key=_reads_final_metrics)
            self._handlers[key] = [
                (str(getattr(callback, "name", type(callback).__name__)), _handler(callback, event))
                for callback in listening
                if readers is None or _reads_final_metrics(callback) == readers
            ]
        return self._handlers[key]


def _instance(kind: type) -> Any:
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ValueError(
            f"The callback {kind.__qualname__} was given as a class, and cannot be made without arguments: {error}. Give an "
            f"object of it, {kind.__qualname__}(...)."
        ) from None
    except ValueError:
        # Some classes written in C do not tell what they take.
        pass
    return kind()


def _require_handlers(callback: Any) -> None:
    """Refuse what can never be called; warn of a handler with a name that is almost an event's."""
    names = [name for name in dir(callback) if name.startswith("on_")]
    # A class may make its handlers when they are asked for.
    is_heard = names or isinstance(callback, TrainerCallback) or hasattr(callback, "on_step_end")
    if not is_heard and type(callback).__module__ == "builtins":
        name = getattr(callback, "__qualname__", None) or repr(callback)
        raise ValueError(
            f"{name} cannot be used as a callback: its type is {type(callback).__name__}, which has no handler to call. "
            "Give an object with methods named after events, such as on_step_end, on_log or on_evaluate (a "
            "TrainerCallback of forgather or transformers, or any other class)."
        )
    for name in names:
        nearest = nearest_name(name, EVENTS, cutoff=0.85)
        if nearest and name not in EVENTS and name not in _EVENTS_OF_TRANSFORMERS:
            logger.warning(
                "%s.%s is not called by the trainer: no event has this name. Did you mean %s?",
                type(callback).__qualname__,
                name,
                nearest,
            )


def _handler(callback: Any, event: str) -> Callable[..., Any]:
    handler: Callable[..., Any] = getattr(callback, event)
    if event != "on_evaluate" or not _is_from_transformers(callback):
        return handler

    def log_and_evaluate(metrics: dict[str, Any], **context: Any) -> Any:
        # The trainer of transformers logs evaluations as well: loggers written for it look nowhere else.
        callback.on_log(logs={**metrics, "epoch": context["state"].epoch}, **context)
        return handler(metrics=metrics, **context)

    return log_and_evaluate


def _reads_final_metrics(callback: Any) -> bool:
    """Whether a callback shows, stores or judges metrics; the classes of transformers (loggers, early stopping) do."""
    own_word: bool | None = getattr(callback, "reads_final_metrics", None)
    return type(callback).__module__.startswith("transformers.") if own_word is None else bool(own_word)


def _is_from_transformers(callback: Any) -> bool:
    """Told by the names of its base classes, since importing transformers to ask takes seconds."""
    names = {(base.__module__, base.__name__) for base in type(callback).__mro__}
    return ("transformers.trainer_callback", "TrainerCallback") in names


_STEP_EVENTS = (
    "on_step_begin",
    "on_forward_backward_begin",
    "on_forward_backward_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_train_metrics",
    "on_step_end",
)


def asks_for_something(callback: Any) -> bool:
    """Whether a callback may ever ask for a stop, a save and so on. Those that do not say `changes_control = False`."""
    return bool(getattr(callback, "changes_control", True))


def asks_in_steps(callback: Any) -> bool:
    """Whether it may ask at any step, and not only when it is told of a log, an evaluation or a save."""
    handlers = (getattr(type(callback), event, None) or getattr(callback, event, None) for event in _STEP_EVENTS)
    # The base class of transformers has empty handlers for all events.
    has_own = any(
        one is not None and getattr(one, "__qualname__", "").split(".")[0] != "TrainerCallback" for one in handlers
    )
    return has_own and asks_for_something(callback)


def _adopt(control: TrainerControl, wishes: Any) -> None:
    for flag in TrainerControl.__dataclass_fields__:
        if getattr(wishes, flag, False):
            setattr(control, flag, True)
