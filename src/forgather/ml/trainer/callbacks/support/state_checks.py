"""Validation of callback state from a checkpoint against a schema.

Callbacks call it before they load any value, so that a bad state changes nothing.
"""

from forgather.ml.checkpoint.state.state_schema import Schema


def check_callback_state(callback: object, schema: Schema, state: object) -> None:
    """Raise `CheckpointLoadError`, with callback and key, for a state that violates the schema."""
    name = type(callback).__name__
    schema.check(state, f"callbacks.{name}", f"or train without the callback {name}")
