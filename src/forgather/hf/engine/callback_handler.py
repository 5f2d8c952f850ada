"""Callback handler of the facade: callbacks of transformers get the arguments object of transformers.

`FacadeCallbacks` extends the handler of the engine. `EventCalls` is `trainer.callback_handler`, with a method for each
event, as overrides of `evaluate` call them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from forgather.ml.trainer.callbacks.handler import CallbackHandler
from forgather.ml.trainer.callbacks.support.handler_signatures import HandlerT, adapted

if TYPE_CHECKING:
    from forgather.hf.trainer import Trainer


class FacadeCallbacks(CallbackHandler):
    """Callbacks of an engine; all except Forgather's own get the arguments and the trainer of the facade."""

    def __init__(self, present: CallbackHandler, facade: "Trainer") -> None:
        """Take over the callbacks of the engine's handler."""
        super().__init__(())
        # Not `add`: the callbacks have been checked, and their warnings have been logged.
        self.callbacks, self._defaults = present.callbacks, present._defaults
        self._facade = facade
        self.skips_own = False
        """Whether on_log skips Forgather's callbacks: they read evaluations from on_evaluate."""

    def _handler(self, callback: object, event: str) -> HandlerT:
        handler, facade = adapted(getattr(callback, event)), self._facade
        if type(callback).__module__.startswith("forgather."):
            return self._unless_skipped(handler) if event == "on_log" else handler

        def with_facade(args: object, state: object, control: object, **rest: Any) -> object:
            return handler(facade.args, state, control, **{**rest, "trainer": facade})

        return with_facade

    def _unless_skipped(self, handler: HandlerT) -> HandlerT:
        def call(*positional: object, **rest: object) -> object:
            return None if self.skips_own else handler(*positional, **rest)

        return call


class EventCalls:
    """`trainer.callback_handler` of transformers: `on_log(args, state, control, logs)` and so on dispatch an event."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer

    @property
    def callbacks(self) -> list[Any]:
        return self._trainer.engine.callbacks

    @property
    def callback_list(self) -> str:
        return "\n".join(type(one).__name__ for one in self.callbacks)

    def add_callback(self, callback: Any) -> None:
        self._trainer.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        return self._trainer.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        self._trainer.remove_callback(callback)

    @property
    def train_dataloader(self) -> Any:
        return self._trainer.engine.train_dataloader

    @property
    def eval_dataloader(self) -> Any:
        return self._trainer.engine.eval_dataloader

    @eval_dataloader.setter
    def eval_dataloader(self, loader: Any) -> None:
        """Accept the loader of an own evaluation loop; events show the loader of the engine."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the function that dispatches an event; its last positional argument is logs or metrics."""
        if not name.startswith("on_"):
            raise AttributeError(f"callback_handler has no attribute {name!r}.")

        def dispatch(args: object, state: object, control: object, *values: Any, **details: Any) -> object:
            named = {"on_log": "logs", "on_evaluate": "metrics", "on_predict": "metrics"}
            if values and name in named:
                details[named[name]] = values[0]
            self._trainer.engine._dispatch_event(name, **details)
            return self._trainer.control

        return dispatch
