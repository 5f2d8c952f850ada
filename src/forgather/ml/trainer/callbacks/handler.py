"""Dispatch of events to callbacks: order, handler calls, stop requests.

An event without listeners costs one look-up.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from forgather._suggestions import nearest_name
from forgather.ml.trainer.callbacks.support.handler_signatures import (
    EVENTS,
    POSITIONAL,
    HandlerT,
    adapted,
    check_handler,
)
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)

_STOP_FLAGS = ("should_training_stop", "should_epoch_stop", "should_abort_without_save")
_stop_flags = attrgetter(*_STOP_FLAGS)

_COUNTED_EVENTS = ("on_evaluate", "on_save")
_METRIC_EVENTS = ("on_log", "on_evaluate")
"""Events with metrics, to which callbacks may add: callbacks that set `reads_final_metrics` are told last."""
_EVENTS_OF_TRANSFORMERS = ("on_substep_end", "on_predict", "on_push_begin")


class CallbackHandler:
    """The callbacks of a trainer, in the order in which they are told of an event.

    `defaults` come first, then `callbacks` in their order, then what `add` adds: what a default callback puts into a log
    record is there when the user's own callbacks see it. A callback of the class of a default one, or of a subclass,
    replaces it and keeps its own place in the order.
    """

    def __init__(self, callbacks: Iterable[Any], defaults: Iterable[Any] = ()) -> None:
        self.callbacks: list[Any] = [_checked(default) for default in defaults]
        self.context = {}
        self.stop_requested_by: tuple[str, str, str] | None = None
        """The latest stop request: the callback's name, the event, and the flag that it set."""
        self._defaults = list(self.callbacks)
        self._handlers: dict[str | tuple[str, bool], list[tuple[str, HandlerT]]] = {}
        self._counts: defaultdict[str, int] = defaultdict(int)
        self.silent: set[str] = set()
        """Events that were found to have no listener, and that nobody counts."""
        for callback in callbacks:
            self.add(callback)

    @property
    def context(self) -> Mapping[str, Any]:
        """What every handler gets: args, state, and the keywords. It is assigned as a whole."""
        return MappingProxyType(self._context)

    @context.setter
    def context(self, context: Mapping[str, Any]) -> None:
        self._context = dict(context)
        self._args, self._state = context.get("args"), context.get("state")
        # Split once, and not at every event.
        self._keywords = {name: value for name, value in context.items() if name not in POSITIONAL}

    def add(self, callback: object) -> None:
        """Append a callback, and drop the default one that it replaces; a class is instantiated."""
        callback = _checked(callback)
        self._handlers.clear()
        self.silent.clear()
        replaced = next((one for one in self._defaults if isinstance(callback, type(one))), None)
        if replaced is not None:
            self.pop(replaced)
        self.callbacks.append(callback)

    def pop(self, callback: object) -> Any | None:
        """Remove and return a callback, given itself or its class; None when there is none."""
        for position, present in enumerate(self.callbacks):
            if present is callback or (isinstance(callback, type) and isinstance(present, callback)):
                self._handlers.clear()
                self.silent.clear()
                self._defaults = [default for default in self._defaults if default is not present]
                return self.callbacks.pop(position)
        return None

    def listens(self, event: str) -> bool:
        """Whether any callback has a handler for the event."""
        return bool(self._of(event))

    def count(self, event: str) -> int:
        """How often the event was dispatched, with or without listeners; a dispatch in two parts counts once."""
        return self._counts.get(event, 0)

    def dispatch(self, event: str, control: TrainerControl, readers: bool | None = None, **details: object) -> None:
        """Call every handler of the event; what one returns counts as its wishes.

        `readers` limits this to callbacks that read final metrics (True), or to the others (False, which comes first).
        """
        if readers is not True:
            self._counts[event] += 1
        handlers = self._handlers.get(event if readers is None else (event, readers))
        if handlers is None:
            handlers = self._of(event, readers)
        if not handlers:
            if event not in _COUNTED_EVENTS:
                self.silent.add(event)
            return
        args, state = self._args, self._state
        keywords = {**self._keywords, **details} if details else self._keywords
        for name, handler in handlers:
            before = _stop_flags(control)
            returned = handler(args, state, control, **keywords)
            if returned is not None and returned is not control:
                _adopt(control, returned)
            after = _stop_flags(control)
            if after != before:
                self._note_stop(name, event, before, after)

    def _note_stop(self, name: str, event: str, before: tuple[bool, ...], after: tuple[bool, ...]) -> None:
        flags = [flag for flag, old, new in zip(_STOP_FLAGS, before, after, strict=True) if new and not old]
        for flag in flags:
            logger.info("%s asked for %s in %s", name, flag, event)
        if flags:
            self.stop_requested_by = name, event, flags[0]

    def _of(self, event: str, readers: bool | None = None) -> list[tuple[str, HandlerT]]:
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


def _checked(callback: object) -> object:
    callback = _instance(callback) if isinstance(callback, type) else callback
    _require_handlers(callback)
    return callback


def _instance(kind: type) -> object:
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


def _require_handlers(callback: object) -> None:
    """Refuse a callback that cannot be called; warn of a handler with a name that is almost an event's."""
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
    for event in EVENTS:
        if hasattr(callback, event):
            check_handler(callback, event)
    for name in names:
        if name in EVENTS or name in _EVENTS_OF_TRANSFORMERS:
            continue
        if nearest := nearest_name(name, EVENTS, cutoff=0.85):
            logger.warning(
                "%s.%s is not called by the trainer: no event has this name. Did you mean %s?",
                type(callback).__qualname__,
                name,
                nearest,
            )


def _handler(callback: object, event: str) -> HandlerT:
    handler = adapted(getattr(callback, event))
    if event != "on_evaluate" or not _is_from_transformers(callback):
        return handler
    log = adapted(getattr(callback, "on_log"))  # noqa: B009

    def log_and_evaluate(
        args: object, state: TrainerState, control: TrainerControl, metrics: dict[str, Any], **rest: object
    ) -> object:
        # The trainer of transformers logs evaluations as well: loggers written for it look nowhere else.
        log(args, state, control, logs={**metrics, "epoch": state.epoch}, **rest)
        return handler(args, state, control, metrics=metrics, **rest)

    return log_and_evaluate


def _reads_final_metrics(callback: object) -> bool:
    """Whether a callback shows, stores or judges metrics; the classes of transformers (loggers, early stopping) do."""
    own_word: bool | None = getattr(callback, "reads_final_metrics", None)
    return type(callback).__module__.startswith("transformers.") if own_word is None else bool(own_word)


def _is_from_transformers(callback: object) -> bool:
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


def asks_for_something(callback: object) -> bool:
    """Whether a callback may ever ask for a stop, a save and so on. Those that do not say `changes_control = False`."""
    return bool(getattr(callback, "changes_control", True))


def asks_in_steps(callback: object) -> bool:
    """Whether it may ask at any step, and not only when it is told of a log, an evaluation or a save."""
    handlers = (getattr(type(callback), event, None) or getattr(callback, event, None) for event in _STEP_EVENTS)
    # The base class of transformers has empty handlers for all events.
    has_own = any(
        one is not None and getattr(one, "__qualname__", "").split(".")[0] != "TrainerCallback" for one in handlers
    )
    return has_own and asks_for_something(callback)


def _adopt(control: TrainerControl, wishes: object) -> None:
    for flag in TrainerControl.__dataclass_fields__:
        if getattr(wishes, flag, False):
            setattr(control, flag, True)
