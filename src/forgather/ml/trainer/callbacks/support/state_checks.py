"""Callback states, checked before a callback takes any of it from a checkpoint."""

from forgather.ml.checkpoint.state.state_schema import Schema


def check_callback_state(callback: object, schema: Schema, state: object) -> None:
    """Raise a `CheckpointLoadError` that names callback and key for a state that is not as the schema says."""
    name = type(callback).__name__
    schema.check(state, f"callbacks.{name}", f"or train without the callback {name}")
