"""Fused losses: the model returns hidden states, and the loss applies the output head without materialising logits.

A model is accepted only if its head is the sole step between hidden states and logits, and its own loss is the causal
loss. `setup.phases` and the pipeline trainer call this module when `fused_loss_factory` is set.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.trainer.setup.model_modes import set_train
from forgather.ml.trainer.setup.seeding import undisturbed_random_numbers
from forgather.ml.trainer.step_loss.model_outputs import logits_of
from forgather.ml.trainer.step_loss.own_loss import compared, reason_for_own_loss
from forgather.ml.trainer.step_loss.token_weighting import parameters_of
from forgather.ml.trainer.trainer_types import FusedLossFactoryT, LossFunctionT
from forgather.ml.utils import ModelWrapper

logger = logging.getLogger(__name__)


BASE_MODEL_METHOD = "forward_base_model"
"""Method of a sharded model that runs its base model with gathered parameters (`fsdp2.sharded_model`)."""


class HiddenStatesModel(ModelWrapper):
    """Model wrapper that returns hidden states instead of logits if called with `return_hidden_states=True`.

    A model with the attribute `can_return_hidden_states` gets that keyword itself. For a Hugging Face causal model the
    wrapper runs `base_model`. Without the keyword the wrapped model runs unchanged, unless `always` is set.
    """

    def __init__(self, model: nn.Module, always: bool = False) -> None:
        super().__init__()
        self.wrapped = model
        self._always = always
        self._asks = bool(getattr(model, "can_return_hidden_states", False))
        self._avoids_cache = not self._asks and "use_cache" in parameters_of(model.forward)

    def forward(self, *args: Any, return_hidden_states: bool = False, **inputs: Any) -> Any:
        if not (return_hidden_states or self._always):
            return self.wrapped(*args, **inputs)
        if self._asks:
            return _hidden_states_of(self.wrapped(*args, **inputs, return_hidden_states=True))
        if self._avoids_cache:
            # Training never reads the key-value cache, and the base model would build it by default.
            inputs.setdefault("use_cache", False)
        run: Any = getattr(self.wrapped, BASE_MODEL_METHOD, None) or self.wrapped.base_model
        return run(*args, **inputs)[0]


def output_embeddings_of(model: nn.Module) -> nn.Module:
    """Return the head that maps hidden states to logits; raise ValueError if a fused loss would be wrong for the model."""
    name = type(model).__name__
    ask = getattr(model, "get_output_embeddings", None)
    head = None if ask is None else ask()
    if not isinstance(head, nn.Module):
        raise _refusal(name, "returns no head from get_output_embeddings()")
    if not getattr(model, "can_return_hidden_states", False):
        if getattr(model, "base_model", model) is model:
            raise _refusal(name, "has no base_model that returns hidden states")
        reason = reason_for_own_loss(model)
        if reason is not None:
            raise _refusal(name, f"needs its own loss: {reason}")
        head_is_all = _head_is_all(model, head)
    else:
        # A model that returns its own hidden states states this itself, so no trial run is needed.
        head_is_all = getattr(model, "head_is_all", True)
    if not head_is_all:
        raise _refusal(name, "applies more than its head between hidden states and logits, such as scaling or capping")
    _refuse_other_loss(model, head)
    return head


def _refuse_other_loss(model: nn.Module, head: nn.Module) -> None:
    """Run the model on a few tokens with labels; raise ValueError if its own loss is not the causal loss.

    A hook replaces the logits by random values, because the weights may not have been loaded yet.
    """
    device = getattr(head.weight, "device", None)
    if not isinstance(device, torch.device) or device.type == "meta":
        # A model on the meta device cannot compute a loss.
        return
    tokens = torch.zeros((2, 4), dtype=torch.int64, device=device)
    labels = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 1]], device=device)
    inputs = {getattr(model, "main_input_name", "input_ids"): tokens}
    with undisturbed_random_numbers(), _hooked([head], lambda _, __, output: _random_like(output)):
        comparison = compared(model, inputs, labels)
    if comparison.differs and comparison.causal is not None:
        raise ValueError(
            f"fused_loss_factory cannot be used with {type(model).__name__}, which computes its own loss from labels: "
            f"{comparison}, on random logits. A fused loss would replace it. Omit fused_loss_factory to use the model's own "
            "loss, or pass compute_loss_func, a function of (logits, labels), instead."
        )


def make_fused_loss(factory: FusedLossFactoryT, head: nn.Module) -> LossFunctionT:
    """Call the factory with the head and return its loss function; raise ValueError if the result is not callable."""
    loss_fn = factory(head)
    if not callable(loss_fn):
        raise ValueError(
            f"fused_loss_factory returned {loss_fn!r} for the output embeddings, but must return a loss function of hidden "
            "states and labels, such as LinearCrossEntropyLoss(output_embeddings)."
        )
    return loss_fn


def unfused(loss_fn: object, schedule: str) -> LossFunctionT:
    """Return the equivalent loss of logits, for a pipeline schedule that cannot use a fused loss."""
    reason = (
        f"schedule={schedule!r} computes gradients of inputs and weights separately, a fused loss computes both at once"
    )
    if not hasattr(loss_fn, "unfused"):
        raise ValueError(
            f"fused_loss_factory cannot be used here: {reason}, and {type(loss_fn).__name__} has no method unfused() that "
            "returns the same loss of logits. Use another schedule, such as 1f1b, or omit fused_loss_factory."
        )
    logger.warning("The loss is computed from logits, not fused with the head: %s.", reason)
    plain: LossFunctionT = loss_fn.unfused()
    return plain


def _head_is_all(model: Any, head: nn.Module) -> bool:
    """Return whether the head is the only step between hidden states and logits, by a trial run on two tokens.

    Hooks replace hidden states and logits by random values. The head must receive exactly these hidden states, and the
    model must return exactly these logits.
    """
    # Random values, because weights may not be loaded yet and scaled zeros stay zeros. Large values, so that a cap on
    # the logits shows. Detached values, so that a trainable scale or bias shows as `requires_grad` even if it is
    # neutral now (a scale of 1, a bias of 0).
    device: Any = head.weight.device
    tokens = {model.main_input_name: torch.zeros((1, 2), dtype=torch.int64, device=device)}
    given: dict[str, Tensor] = {}

    def replace_hidden(_: nn.Module, __: object, outputs: object) -> object:
        given["hidden"] = _random_like(_first_of(outputs))
        return _with_first(outputs, given["hidden"].clone())

    def replace_logits(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        given["taken"], given["made"] = inputs[0], _random_like(output)
        return given["made"].clone()

    try:
        with undisturbed_random_numbers(), set_train(model, False):
            sources = _modules_that_give_hidden_states(model, tokens)
            with torch.enable_grad(), _hooked(sources, replace_hidden), _hooked([head], replace_logits):
                logits = logits_of(model(**tokens))
    except Exception as error:
        raise _refusal(type(model).__name__, f"failed in a trial run on two tokens ({error})") from error
    if logits is None or given.keys() != {"hidden", "taken", "made"}:
        return False
    if given["taken"].requires_grad or logits.requires_grad:
        return False
    return _are_equal(given["hidden"], given["taken"]) and _are_equal(given["made"].to(logits.dtype), logits)


def _modules_that_give_hidden_states(model: Any, tokens: Mapping[str, Tensor]) -> list[nn.Module]:
    """Return the modules of the base model that return its hidden states, the base model included."""
    results: list[tuple[nn.Module, Any]] = []

    def note(module: nn.Module, _: object, outputs: object) -> None:
        results.append((module, _first_of(outputs)))

    # Some models call a submodule of their base model directly, so a hook on the base model alone would not run.
    modules = [one for one in model.base_model.modules() if not isinstance(one, torch.jit.ScriptModule)]
    with torch.no_grad(), _hooked(modules, note):
        hidden = HiddenStatesModel(model)(**tokens, return_hidden_states=True)
    return [module for module, result in results if result is hidden]


@contextlib.contextmanager
def _hooked(modules: Sequence[nn.Module], hook: Callable[..., object]) -> Iterator[None]:
    hooks = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def _first_of(outputs: object) -> Any:
    if isinstance(outputs, Mapping):
        outputs = tuple(outputs.values())
    return next(iter(outputs), None) if isinstance(outputs, (tuple, list)) else outputs


def _with_first(outputs: object, first: Tensor) -> object:
    if isinstance(outputs, Tensor):
        return first
    # A ModelOutput of Hugging Face is a MutableMapping. Its first entry holds the hidden states.
    if isinstance(outputs, MutableMapping):
        outputs[next(iter(outputs))] = first
        return outputs
    if hasattr(outputs, "_replace") and hasattr(outputs, "_fields"):
        replaced: object = outputs._replace(**{outputs._fields[0]: first})
        return replaced
    assert isinstance(outputs, (tuple, list)), "the first of it was found"
    return (first, *outputs[1:])


def _random_like(tensor: Tensor) -> Tensor:
    return (1000 * torch.randn_like(tensor)).detach()


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _hidden_states_of(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    for name in ("hidden_states", "last_hidden_state", "logits"):
        value = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
        if isinstance(value, Tensor):
            return value
    first: Tensor = outputs[0]
    return first


def fused_loss_refusal(setting: str) -> ValueError:
    """Return the error for a DDP wrapper that searches for unused parameters, which excludes a fused loss."""
    return ValueError(
        f"fused_loss_factory cannot be combined with {setting}: the loss uses the head after the forward pass, so DDP would "
        "treat the head as unused. Omit one of the two."
    )


def _refusal(name: str, reason: str) -> ValueError:
    return ValueError(
        f"fused_loss_factory cannot be used with {name}, which {reason}. Omit it, or give the model the attribute "
        "can_return_hidden_states=True, accept return_hidden_states=True in forward, and return the head from "
        "get_output_embeddings()."
    )
