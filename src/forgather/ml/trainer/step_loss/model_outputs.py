"""Model outputs: extraction of logits and loss from a ModelOutput, dict, tuple or tensor.

The `*_of` functions return None for a missing value; the `*_from_outputs` functions, which users call, raise ValueError.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor


def logits_of(outputs: object) -> Tensor | None:
    """Return the logits: the attribute or key "logits", the first non-scalar tensor of a tuple, or the tensor itself."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs.get("logits")
    if isinstance(outputs, Sequence):
        # A scalar in front of the logits is the model's own loss.
        return next((value for value in outputs if isinstance(value, Tensor) and value.ndim > 0), None)
    return getattr(outputs, "logits", None)


def own_loss_of(outputs: object) -> Tensor | None:
    """Return the model's own loss: the attribute or key "loss", or the first item of a tuple if it is a scalar."""
    if isinstance(outputs, Sequence):
        loss = outputs[0] if outputs else None
        return loss if isinstance(loss, Tensor) and loss.ndim == 0 else None
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def logits_from_outputs(outputs: object) -> Tensor:
    """Return the logits of a forward pass; raise ValueError if there are none."""
    logits = logits_of(outputs)
    if logits is None:
        raise ValueError(
            f"The model returned no logits: its output is {type(outputs).__name__}. Let forward return a tensor, a tuple that "
            "starts with a tensor, or an object with the attribute or key 'logits'."
        )
    return logits


def loss_from_outputs(outputs: object) -> Tensor:
    """Return the loss that the model computed; raise ValueError if the output has no loss."""
    loss = own_loss_of(outputs)
    if loss is None:
        raise ValueError(
            f"The model returned no loss: its output is {type(outputs).__name__}. Call it with labels, or let forward return "
            "a tuple that starts with a scalar loss, or an object with the attribute or key 'loss'."
        )
    return loss


def loss_and_logits_from_outputs(outputs: object) -> tuple[Tensor, Tensor]:
    return loss_from_outputs(outputs), logits_from_outputs(outputs)
