"""Skipping of weight initialisation, for models that are loaded from a checkpoint anyway.

Used where trainers and `finalize` build a model before they load its weights. The patches of `torch.nn.init` act in the
current thread only. Buffers and the tying of weights are not affected.
"""

import functools
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

_NAMES = (
    *(
        "uniform_",
        "normal_",
        "trunc_normal_",
        "constant_",
        "ones_",
        "zeros_",
        "eye_",
        "dirac_",
        "sparse_",
        "orthogonal_",
    ),
    *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
)

# A context variable is per thread: a model that another thread builds meanwhile is initialised normally.
_skipping: ContextVar[bool] = ContextVar("skipping", default=False)


@contextmanager
def no_init_weights() -> Iterator[None]:
    """Skip the initialisation of parameters in this thread, for torch modules and `transformers` models.

    Only functions of `torch.nn.init` are skipped, and only for parameters. Checkpoints do not have to hold buffers, so
    buffers get their values. Models tie their weights as usual (the context manager of `transformers` skips that).
    """
    token = _skipping.set(True)
    patched: list[tuple[MutableMapping[str, Any], str]] = []
    try:
        for namespace in _namespaces():
            for name, original in _ORIGINALS.items():
                # A module may use the same name for another function.
                if namespace.get(name) is original:
                    namespace[name] = _SKIPPABLE[name]
                    patched.append((namespace, name))
        yield
    finally:
        _skipping.reset(token)
        for namespace, name in patched:
            namespace[name] = _ORIGINALS[name]


def _namespaces() -> Iterator[MutableMapping[str, Any]]:
    """Yield every namespace that may hold the functions: modules, torch's attention included, import them by name."""
    # A copy, because imports in other threads may add modules meanwhile.
    for module in list(sys.modules.values()):
        if isinstance(getattr(module, "__dict__", None), dict):
            yield vars(module)
    # Transformers models call the functions that transformers saved in this dict when it was imported.
    if hugging_face := sys.modules.get("transformers.initialization"):
        yield hugging_face.TORCH_INIT_FUNCTIONS


def _skippable(initialise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap an initialisation function so that it returns parameters unchanged while initialisation is skipped.

    A module that is imported inside the context keeps the wrapper for good, so the wrapper must also work outside.
    """

    @functools.wraps(initialise)
    def wrapper(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _skipping.get() and isinstance(tensor, nn.Parameter):
            return tensor
        return initialise(tensor, *args, **kwargs)

    return wrapper


# Taken at import time, when nothing is patched yet.
_ORIGINALS: dict[str, Callable[..., Tensor]] = {name: getattr(torch.nn.init, name) for name in _NAMES}
_SKIPPABLE = {name: _skippable(original) for name, original in _ORIGINALS.items()}
