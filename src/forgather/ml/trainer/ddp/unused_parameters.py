"""Unused parameters under DDP: errors that list their names and mention `ddp.find_unused_parameters`.

`DDPTrainer` checks after the first reduced backward pass, and replaces DDP's own error.
"""

import re

from torch import nn


def refuse_unused(model: nn.Module) -> None:
    """Raise RuntimeError if parameters have no gradient after the first reduced backward pass."""
    # DDP silently leaves all gradients in the buckets of such parameters unreduced.
    unused = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    if unused:
        raise RuntimeError(_message(unused))


def explained(error: RuntimeError, model: nn.Module) -> RuntimeError | None:
    """Return a clearer error for DDP's own error, which comes a step later and has indices instead of names."""
    if "Expected to have finished reduction" not in str(error):
        return None
    # DDP numbers the trainable parameters in the order of named_parameters().
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    numbers = [int(number) for number in found[1].split()] if found else []
    return RuntimeError(_message([names[number] for number in numbers if number < len(names)]))


def _message(names: list[str]) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"These parameters got no gradient, because the loss does not depend on them: {shown or 'unknown'}. DDP reduces a "
        "bucket only after all of its parameters have gradients. Use the parameters in the forward pass, freeze them with "
        "requires_grad_(False), or set ddp={'find_unused_parameters': True} (ddp.find_unused_parameters on the command "
        "line), which searches for them in every step."
    )
