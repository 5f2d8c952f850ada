"""Building a model without initialising weights that will be loaded anyway."""

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

# Each thread has a value of its own: a model built in another thread meanwhile is initialised.
_skipping: ContextVar[bool] = ContextVar("skipping", default=False)


@contextmanager
def no_init_weights() -> Iterator[None]:
    """Skip the initialisation of parameters in this thread: of torch modules, and of `transformers` models.

    Only what goes through `torch.nn.init` is skipped, and only for parameters: a checkpoint need not hold buffers, so
    they get their values. Models tie their weights as ever (the context manager of `transformers` would leave that out).
    """
    token = _skipping.set(True)
    patched: list[tuple[MutableMapping[str, Any], str]] = []
    try:
        for namespace in _namespaces():
            for name, original in _ORIGINALS.items():
                if namespace.get(name) is original:
                    namespace[name] = _SKIPPABLE[name]
                    patched.append((namespace, name))
        yield
    finally:
        _skipping.reset(token)
        for namespace, name in patched:
            namespace[name] = _ORIGINALS[name]


def _namespaces() -> Iterator[MutableMapping[str, Any]]:
    """Wherever the functions may be: modules import them by name, torch's own attention among them."""
    for module in list(sys.modules.values()):
        if isinstance(getattr(module, "__dict__", None), dict):
            yield vars(module)
    # Models of transformers call the functions that it kept here when it was imported.
    if hugging_face := sys.modules.get("transformers.initialization"):
        yield hugging_face.TORCH_INIT_FUNCTIONS


def _skippable(initialise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function, unless weights are not to be initialised now.

    A module that is imported in the context keeps this one for good, so it has to work outside as well.
    """

    @functools.wraps(initialise)
    def wrapper(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _skipping.get() and isinstance(tensor, nn.Parameter):
            return tensor
        return initialise(tensor, *args, **kwargs)

    return wrapper


_ORIGINALS: dict[str, Callable[..., Tensor]] = {name: getattr(torch.nn.init, name) for name in _NAMES}
_SKIPPABLE = {name: _skippable(original) for name, original in _ORIGINALS.items()}
