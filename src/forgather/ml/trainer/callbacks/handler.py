"""CallbackHandler: dispatches trainer events to callbacks, in a fixed order, and records stop requests.

Invariant: callbacks with `reads_final_metrics` get metrics only after the other callbacks have added theirs. An event
without handlers costs one look-up. `BaseTrainer` owns the handler.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from forgather._suggestions import nearest_name
from forgather.ml.distributed.failure_reports import described
from forgather.ml.trainer.callbacks.support.handler_signatures import (
    EVENTS,
    POSITIONAL,
    HandlerT,
    adapted,
    check_handler,
)
from forgather.ml.trainer.loop.evaluation_sums import EvaluationInterrupted
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)

_STOP_FLAGS = ("should_training_stop", "should_epoch_stop", "should_abort_without_save")
_stop_flags = attrgetter(*_STOP_FLAGS)

# BaseTrainer compares these counts to see whether a custom loop has dispatched the event itself.
_COUNTED_EVENTS = ("on_evaluate", "on_save")
_METRIC_EVENTS = ("on_log", "on_evaluate")
"""Events with metrics that callbacks may extend. Callbacks with `reads_final_metrics` are called last."""
# Their handlers change no weights.
_LIBRARIES = ("forgather", "transformers")
# Events of transformers. Only the drop-in (forgather.hf) dispatches on_substep_end. They must not look like typos.
_EVENTS_OF_TRANSFORMERS = ("on_substep_end", "on_push_begin")


class CallbackHandler:
    """Callbacks of a trainer, in the order of their calls.

    `defaults` come first, then `callbacks`, then callbacks passed to `add`. So the user's callbacks see the entries that
    default callbacks add to a log record. A callback that is an instance of a default callback's class replaces that
    default, and keeps its own position in the order.
    """

    def __init__(self, callbacks: Iterable[Any], defaults: Iterable[Any] = ()) -> None:
        self.callbacks: list[Any] = [_checked(default) for default in defaults]
        self.context = {}
        self.stop_requested_by: tuple[str, str, str] | None = None
        """Last stop request: name of the callback, event, and flag."""
        self._defaults = list(self.callbacks)
        self._handlers: dict[str | tuple[str, bool], list[tuple[str, HandlerT]]] = {}
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._wait: Callable[[], None] | None = None
        self.rank: int | None = None
        """Rank of this process in a job of several ranks; errors of handlers then name it. Set by the trainer."""
        self.silent: set[str] = set()
        """Events without handlers, which the trainer can skip. Events that are counted are never in this set."""
        for callback in callbacks:
            self.add(callback)

    @property
    def context(self) -> Mapping[str, Any]:
        """Arguments of every handler: args, state and the keywords. Read-only; assign a new mapping to change it."""
        return MappingProxyType(self._context)

    @context.setter
    def context(self, context: Mapping[str, Any]) -> None:
        self._context = dict(context)
        self._args, self._state = context.get("args"), context.get("state")
        # Split here, once, because `dispatch` runs several times per step.
        self._keywords = {name: value for name, value in context.items() if name not in POSITIONAL}

    def add(self, callback: object) -> None:
        """Append a callback, and remove the default callback that it replaces. A class is instantiated."""
        callback = _checked(callback)
        # Both caches depend on the list of callbacks.
        self._handlers.clear()
        self.silent.clear()
        replaced = next((one for one in self._defaults if isinstance(callback, type(one))), None)
        if replaced is not None:
            self.pop(replaced)
        self.callbacks.append(callback)

    def pop(self, callback: object) -> Any | None:
        """Remove and return a callback, by instance or class; None if it is not registered."""
        for position, present in enumerate(self.callbacks):
            if present is callback or (isinstance(callback, type) and isinstance(present, callback)):
                self._handlers.clear()
                self.silent.clear()
                self._defaults = [default for default in self._defaults if default is not present]
                return self.callbacks.pop(position)
        return None

    def guard(self, wait: Callable[[], None]) -> None:
        """Call `wait` before each handler of the user: it may change weights that a background save still reads."""
        self._wait = wait
        self._handlers.clear()

    def listens(self, event: str) -> bool:
        """Return whether any callback handles the event."""
        return bool(self._of(event))

    def count(self, event: str) -> int:
        """Return how often the event was dispatched, with or without handlers. A dispatch in two parts counts once."""
        return self._counts.get(event, 0)

    def dispatch(
        self,
        event: str,
        control: TrainerControl,
        readers: bool | None = None,
        state: TrainerState | None = None,
        **details: object,
    ) -> None:
        """Call every handler of the event, and merge returned controls into `control`.

        `readers` limits the call to callbacks with `reads_final_metrics` (True), or to the others (False, called first).
        `state` replaces the state of the context, for an event about an earlier step.
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
        args, state = self._args, self._state if state is None else state
        keywords = {**self._keywords, **details} if details else self._keywords
        for name, handler in handlers:
            # Compared around each handler, so that `stop_requested_by` names the callback that set the flag.
            before = _stop_flags(control)
            try:
                returned = handler(args, state, control, **keywords)
            except EvaluationInterrupted:
                raise
            except BaseException as error:
                raised = described(error, _calling(event, name), self.rank)
                if raised is error:
                    raise
                raise raised from error
            if returned is not None and returned is not control:
                _adopt(control, returned)
            after = _stop_flags(control)
            if after != before:
                self._note_stop(name, event, before, after)

    def tell_loggers(self, event: str, control: TrainerControl, **details: object) -> None:
        """Call the handlers of callbacks that only record metrics: they read final metrics and make no requests."""
        for callback in self.callbacks:
            only_records = _reads_final_metrics(callback) and not getattr(callback, "changes_control", True)
            if only_records and hasattr(callback, event):
                try:
                    self._guarded(callback, event)(self._args, self._state, control, **{**self._keywords, **details})
                except BaseException as error:
                    # Not as the error of a rank, from which the other ranks might continue.
                    described(error, _calling(event, _name_of(callback)), None)
                    raise

    def _note_stop(self, name: str, event: str, before: tuple[bool, ...], after: tuple[bool, ...]) -> None:
        flags = [flag for flag, old, new in zip(_STOP_FLAGS, before, after, strict=True) if new and not old]
        for flag in flags:
            logger.info("%s requested %s in %s", name, flag, event)
        if flags:
            self.stop_requested_by = name, event, flags[0]

    def _of(self, event: str, readers: bool | None = None) -> list[tuple[str, HandlerT]]:
        key = event if readers is None else (event, readers)
        if key not in self._handlers:
            listening = [callback for callback in self.callbacks if hasattr(callback, event)]
            if event in _METRIC_EVENTS:
                # The sort is stable, so callbacks of each kind keep their order.
                listening.sort(key=_reads_final_metrics)
            self._handlers[key] = [
                (_name_of(callback), self._guarded(callback, event))
                for callback in listening
                if readers is None or _reads_final_metrics(callback) == readers
            ]
        return self._handlers[key]

    def _guarded(self, callback: object, event: str) -> HandlerT:
        handler, wait = self._handler(callback, event), self._wait
        # The class that defines the handler: a callback inherits empty handlers from its library.
        origin = str(getattr(getattr(callback, event), "__module__", None) or "")
        if wait is None or origin.split(".")[0] in _LIBRARIES:
            return handler

        def wait_and_handle(*positional: object, **keywords: object) -> object:
            wait()
            return handler(*positional, **keywords)

        return wait_and_handle

    def _handler(self, callback: object, event: str) -> HandlerT:
        return _handler(callback, event)


def _name_of(callback: object) -> str:
    return str(getattr(callback, "name", type(callback).__name__))


def _calling(event: str, name: str) -> str:
    return f"calling {event} of the callback {name}"


def _checked(callback: object) -> object:
    callback = _instance(callback) if isinstance(callback, type) else callback
    _require_handlers(callback)
    return callback


def _instance(kind: type) -> object:
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ValueError(
            f"The callback class {kind.__qualname__} cannot be instantiated without arguments: {error}. Pass an instance, "
            f"{kind.__qualname__}(...)."
        ) from None
    except ValueError:
        # Some classes written in C have no signature to inspect.
        pass
    return kind()


def _require_handlers(callback: object) -> None:
    """Raise ValueError for an object without handlers, and warn about handler names that resemble an event."""
    names = [name for name in dir(callback) if name.startswith("on_")]
    # A class may create its handlers in `__getattr__`, where `dir` does not list them.
    is_heard = names or isinstance(callback, TrainerCallback) or hasattr(callback, "on_step_end")
    if not is_heard and type(callback).__module__ == "builtins":
        name = getattr(callback, "__qualname__", None) or repr(callback)
        raise ValueError(
            f"{name} cannot be used as a callback: its type, {type(callback).__name__}, has no event handlers. Pass an "
            "object with methods named after events, such as on_step_end, on_log or on_evaluate: a "
            "TrainerCallback of forgather or transformers, or any other class."
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
        # The Trainer of transformers also logs evaluations. Loggers written for it handle only on_log.
        log(args, state, control, logs={**metrics, "epoch": state.epoch}, **rest)
        return handler(args, state, control, metrics=metrics, **rest)

    return log_and_evaluate


def _reads_final_metrics(callback: object) -> bool:
    """Return whether a callback reads final metrics."""
    # Callbacks of transformers lack the attribute. They are mostly loggers and early stopping, which read metrics.
    own_word: bool | None = getattr(callback, "reads_final_metrics", None)
    return type(callback).__module__.startswith("transformers.") if own_word is None else bool(own_word)


def _is_from_transformers(callback: object) -> bool:
    """Return whether a callback is a subclass of the TrainerCallback of transformers."""
    # Compared by name, because importing transformers for isinstance takes seconds.
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
    """Return whether a callback may ever request a stop, save and so on. `changes_control = False` rules that out."""
    return bool(getattr(callback, "changes_control", True))


def asks_in_steps(callback: object) -> bool:
    """Return whether a callback may make requests at any step, not only at a log, an evaluation or a save."""
    handlers = (getattr(type(callback), event, None) or getattr(callback, event, None) for event in _STEP_EVENTS)
    # The base class in transformers has empty handlers for all events, which do not count.
    has_own = any(
        one is not None and getattr(one, "__qualname__", "").split(".")[0] != "TrainerCallback" for one in handlers
    )
    return has_own and asks_for_something(callback)


def _adopt(control: TrainerControl, wishes: object) -> None:
    # Requests only add up: a handler that returns a fresh control must not cancel a request of another callback.
    for flag in TrainerControl.__dataclass_fields__:
        if getattr(wishes, flag, False):
            setattr(control, flag, True)
