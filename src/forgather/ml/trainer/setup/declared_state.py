"""Declared state: builds the StateComponents of a trainer from the table that its strategy states."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from forgather.ml.checkpoint.components import SharingPattern, StateComponent

_SETTINGS = {
    "optimizer": "save_optimizer_state",
    "scheduler": "save_scheduler_state",
    "dataset": "save_dataset_state",
    "rng": "save_rng_state",
}
"""Arguments that leave a component out when they are False."""


class Shared(NamedTuple):
    """How ranks share one component; a row of a strategy's table."""

    pattern: SharingPattern | None = None
    """None: decided at run time, by `_get_dataset_sharing_pattern`."""
    group: str | None = None
    compared: bool = False
    """Copies are compared at every save."""


GLOBAL = Shared(SharingPattern.GLOBAL)
PER_RANK = Shared(SharingPattern.PER_RANK)
REPLICATED = Shared(SharingPattern.REPLICATED)
COMPARED = Shared(SharingPattern.REPLICATED, compared=True)
BY_LOADING = Shared()
"""As the batches are loaded; for the component "dataset"."""


class Unbuilt:
    """Placeholder for a stateful that preparation has yet to build; raises on use."""

    def __init__(self, key: str) -> None:
        self._key = key

    def state_dict(self) -> dict[str, Any]:
        raise self._error()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raise self._error()

    def _error(self) -> RuntimeError:
        return RuntimeError(
            f"The component {self._key!r} is not built yet: it is built when training begins, or by load_checkpoint() and "
            "save_checkpoint()."
        )


def declare(
    table: Mapping[str, Shared],
    statefuls: Mapping[str, Any],
    dataset_pattern: SharingPattern,
    dataset_group: str | None = None,
) -> list[StateComponent]:
    """The components of a table, in its order; a stateful of None is left out."""
    components = []
    for key, shared in table.items():
        stateful = statefuls.get(key)
        if stateful is None:
            continue
        pattern, group = (dataset_pattern, dataset_group) if shared.pattern is None else (shared.pattern, shared.group)
        components.append(
            StateComponent(
                key,
                stateful,
                pattern,
                process_group_name=group if pattern is SharingPattern.PER_GROUP else None,
                required=key == "model",
                validate_replication=shared.compared,
            )
        )
    return components


def is_left_out(key: str, args: object) -> bool:
    """Whether an argument such as save_optimizer_state=False leaves a component out."""
    return key in _SETTINGS and not getattr(args, _SETTINGS[key], True)
