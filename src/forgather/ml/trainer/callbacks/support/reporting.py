"""Callbacks of `report_to` and `disable_tqdm`: services by the names of transformers, and progress without bars.

"tensorboard" is Forgather's `TBLogger`; the other names are callbacks of transformers. A missing package is an error at
construction. `BaseTrainer` adds these callbacks to its defaults.
"""

from collections.abc import Iterable
from typing import Any

from forgather._extras import is_installed, missing_message

_TENSORBOARD = "tensorboard"
_PACKAGES = {
    **{name: name for name in ("tensorboard", "wandb", "mlflow", "comet_ml", "neptune", "trackio", "codecarbon")},
    **{name: name for name in ("clearml", "dagshub", "dvclive", "swanlab")},
    "flyte": "flytekit",
}
"""Packages of services by name; the callbacks of the other services look for theirs."""


def reporting_callbacks(args: object, given: Iterable[object]) -> list[Any]:
    """Return new callbacks for the services in `report_to`, except for classes that the user has passed already."""
    names = getattr(args, "report_to", None) or []
    if names == ["all"]:
        names = _available()
    present = {one if isinstance(one, type) else type(one) for one in given}
    classes = [_class_of(name) for name in dict.fromkeys(names)]
    return [_built(name, cls) for name, cls in zip(dict.fromkeys(names), classes, strict=True) if cls not in present]


def without_bars(args: object, defaults: Iterable[Any]) -> list[Any]:
    """Return the default callbacks; with `disable_tqdm=True`, progress is shown as lines only."""
    defaults = list(defaults)
    if getattr(args, "disable_tqdm", None):
        from forgather.ml.trainer.callbacks.progress import ProgressCallback

        for callback in defaults:
            if isinstance(callback, ProgressCallback):
                callback.draws = False
    return defaults


def _available() -> list[str]:
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    return list(get_available_reporting_integrations())


def _class_of(name: str) -> Any:
    package = _PACKAGES.get(name)
    if package is not None and not is_installed(package):
        raise ValueError(f"{missing_message(f'report_to={name!r}', package)}.")
    if name == _TENSORBOARD:
        from forgather.ml.trainer.callbacks.tensorboard import TBLogger

        return TBLogger
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    if name not in INTEGRATION_TO_CALLBACK:
        raise ValueError(
            f"report_to={name!r} cannot be used: choose from {', '.join(sorted(INTEGRATION_TO_CALLBACK))}, 'all' for the "
            "installed ones, or 'none'. Pass other loggers as callbacks."
        )
    return INTEGRATION_TO_CALLBACK[name]


def _built(name: str, cls: Any) -> Any:
    try:
        return cls()
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"report_to={name!r} cannot be used: {error} Install the package, or remove the name."
        ) from error
