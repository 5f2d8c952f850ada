"""Optional packages: the extra of `pip install 'forgather[EXTRA]'` for each, and messages that name it.

`pyproject.toml` has the same extras with their versions. Imports no third-party package.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType


@dataclass(frozen=True)
class Extra:
    """Optional package, and the feature that needs it."""

    package: str
    feature: str


EXTRAS: Mapping[str, Extra] = MappingProxyType(
    {
        "plot": Extra("matplotlib", "the loss curve of PlotCallback"),
        "accelerate": Extra("accelerate", "AccelTrainer and the drop-in Trainer of forgather.hf"),
        "peft": Extra("peft", "training of LoRA and other adapters"),
        "torchao": Extra("torchao", "FP8, QAT, quantised export, and optimizers with 8 and 4 bits"),
        "tensorboard": Extra("tensorboard", "TBLogger and report_to='tensorboard'"),
        "wandb": Extra("wandb", "report_to='wandb'"),
        "mlflow": Extra("mlflow", "report_to='mlflow'"),
        "ray": Extra("ray", "RayReportCallback, for trainers inside Ray Train"),
        "torchdata": Extra("torchdata", "loaders of torchdata that you pass yourself"),
        "datasets": Extra("datasets", "parquet files and Hugging Face datasets on disk"),
    }
)

# Packages that come with the package of an extra.
_INCLUDED = {"pyarrow": "datasets"}


class MissingPackageError(ModuleNotFoundError):
    """Error for a missing optional package; the message names the command that installs it."""


def is_installed(package: str) -> bool:
    """Return whether a top-level package can be imported; does not import it."""
    return find_spec(package) is not None


def install_command(package: str) -> str:
    """Return the command that installs a package, through its extra if it has one."""
    wanted = _INCLUDED.get(package, package)
    for name, extra in EXTRAS.items():
        if extra.package == wanted:
            return f"pip install 'forgather[{name}]'"
    return f"pip install {package}"


def missing_message(subject: str, package: str, command: str | None = None) -> str:
    """Return a sentence without full stop: the subject needs the package, and `command` installs it."""
    return f"{subject} needs the package {package}, which is not installed: {command or install_command(package)}"
