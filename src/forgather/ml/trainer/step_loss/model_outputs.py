"""Model outputs: finding logits and loss in what a forward pass returned (ModelOutput, dict, tuple or tensor)."""

from collections.abc import Mapping, Sequence

from torch import Tensor


def logits_of(outputs: object) -> Tensor | None:
    """The logits among a model's outputs: an attribute, a key, the first of a tuple, or the tensor itself."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs.get("logits")
    if isinstance(outputs, Sequence):
        return next((value for value in outputs if isinstance(value, Tensor) and value.ndim > 0), None)
    return getattr(outputs, "logits", None)


def own_loss_of(outputs: object) -> Tensor | None:
    """The loss that a model computed by itself: an attribute, a key, or the first of a tuple, if that is a scalar."""
    if isinstance(outputs, Sequence):
        loss = outputs[0] if outputs else None
        return loss if isinstance(loss, Tensor) and loss.ndim == 0 else None
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def logits_from_outputs(outputs: object) -> Tensor:
    """The logits of a forward pass; an error where there are none."""
    logits = logits_of(outputs)
    if logits is None:
        raise ValueError(
            f"The model returned no logits: its output is {type(outputs).__name__}. Let forward return a tensor, a tuple that "
            "begins with it, or an object with the attribute or key 'logits'."
        )
    return logits


def loss_from_outputs(outputs: object) -> Tensor:
    """The loss that the model computed by itself; an error where there is none."""
    loss = own_loss_of(outputs)
    if loss is None:
        raise ValueError(
            f"The model returned no loss: its output is {type(outputs).__name__}. Call it with labels, or let forward return "
            "a tuple that begins with a scalar loss, or an object with the attribute or key 'loss'."
        )
    return loss


def loss_and_logits_from_outputs(outputs: object) -> tuple[Tensor, Tensor]:
    return loss_from_outputs(outputs), logits_from_outputs(outputs)
