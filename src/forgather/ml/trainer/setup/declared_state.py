"""Checkpoint components of a trainer, built from the table `state_sharing` of its strategy.

The table declares how ranks share each component (SharingPattern). Checkpoints contain exactly the declared components.
`BaseTrainer.get_state_components` calls it.
"""

import logging
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from forgather.ml.checkpoint.components import SharingPattern, StateComponent

logger = logging.getLogger(__name__)

_LOST = {
    "trainer": "step, epoch, log history and GradScaler are not restored: a resumed run counts from global_step 0",
    "ema": "the averaged weights (ema_decay) are not restored: a resumed run restarts its average at the loaded weights",
    "post_local_sgd": "the schedule of post-local SGD is not restored: a resumed run begins with its warm-up",
}
"""Consequences of a missing component for a resumed run."""
_SETTINGS = {
    "optimizer": "save_optimizer_state",
    "scheduler": "save_scheduler_state",
    "dataset": "save_dataset_state",
    "rng": "save_rng_state",
}
"""Arguments that omit a component when they are False."""


class Shared(NamedTuple):
    """Sharing of one component between ranks: a row of a strategy's table."""

    pattern: SharingPattern | None = None
    """None: chosen at run time by `_get_dataset_sharing_pattern`."""
    group: str | None = None
    compared: bool = False
    """Whether every save compares the replicas."""


GLOBAL = Shared(SharingPattern.GLOBAL)
PER_RANK = Shared(SharingPattern.PER_RANK)
REPLICATED = Shared(SharingPattern.REPLICATED)
COMPARED = Shared(SharingPattern.REPLICATED, compared=True)
BY_LOADING = Shared()
"""Pattern that depends on how batches are loaded; for the component "dataset"."""


class Unbuilt:
    """Placeholder for a stateful that preparation has not built yet; raises RuntimeError on use."""

    def __init__(self, key: str) -> None:
        self._key = key

    def state_dict(self) -> dict[str, Any]:
        raise self._error()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raise self._error()

    def _error(self) -> RuntimeError:
        return RuntimeError(
            f"The component {self._key!r} is not built yet: train(), load_checkpoint() and save_checkpoint() build it."
        )


def declare(
    table: Mapping[str, Shared],
    statefuls: Mapping[str, Any],
    dataset_pattern: SharingPattern,
    dataset_group: str | None = None,
) -> list[StateComponent]:
    """Return the components of a table in its order; components without a stateful are skipped."""
    components = []
    for key, shared in table.items():
        stateful = statefuls.get(key)
        if stateful is None:
            continue
        # The sharing of "dataset" is known only at run time: one rank may read for all, or each rank for itself.
        pattern, group = (dataset_pattern, dataset_group) if shared.pattern is None else (shared.pattern, shared.group)
        components.append(
            StateComponent(
                key,
                stateful,
                pattern,
                process_group_name=group if pattern is SharingPattern.PER_GROUP else None,
                # Other components start fresh if a checkpoint lacks them.
                required=key == "model",
                validate_replication=shared.compared,
            )
        )
    return components


def is_left_out(key: str, args: object) -> bool:
    """Return whether an argument such as save_optimizer_state=False omits a component."""
    return key in _SETTINGS and not getattr(args, _SETTINGS[key], True)


def warn_of_left_out(owner: str, usual: Collection[str], declared: Collection[str]) -> None:
    """Warn about components that an override of `get_state_components` lacks."""
    for key in usual:
        if key in _LOST and key not in declared:
            logger.warning(
                "%s.get_state_components() omits the component %r: %s. Add it to the list, or extend the result of "
                "super().get_state_components().",
                *(owner, key, _LOST[key]),
            )


class _Dictionaries:
    """Stateful that saves one object and loads into another, for `get_statefuls_for_save` and `get_statefuls_for_load`."""

    def __init__(self, saved: Any, loaded: Any) -> None:
        self._saved, self._loaded = saved, loaded

    def state_dict(self) -> Any:
        return self._saved.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._loaded.load_state_dict(state_dict)


def with_dictionaries(trainer: object, components: list[StateComponent], is_built: bool) -> list[StateComponent]:
    """Return the components, extended by the deprecated `get_statefuls_for_save` and `get_statefuls_for_load`."""
    methods = [getattr(trainer, f"get_statefuls_for_{purpose}", None) for purpose in ("save", "load")]
    found = [method for method in methods if method is not None]
    if not found:
        return components
    warnings.warn(
        f"{type(trainer).__name__} declares state with {found[0].__name__}(), which is treated as GLOBAL. Override "
        "get_state_components() instead, and give each component its SharingPattern.",
        DeprecationWarning,
        stacklevel=3,
    )
    # With only one of the two methods, it serves both directions.
    saved, loaded = found[0](), found[-1]()
    by_key = {component.key: component for component in components}
    for key in {**saved, **loaded}:
        one, other = saved.get(key, loaded.get(key)), loaded.get(key, saved.get(key))
        stateful = one if one is other else _Dictionaries(one, other)
        if stateful is None and not is_built:
            # The list of components is also read before preparation, when objects such as the optimizer do not exist.
            stateful = Unbuilt(key)
        declared = by_key.get(key) or StateComponent(key, stateful, SharingPattern.GLOBAL)
        by_key[key] = replace(declared, stateful=stateful)
    return list(by_key.values())
