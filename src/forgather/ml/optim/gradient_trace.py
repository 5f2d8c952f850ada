"""Tracing of non-finite gradients: finds the parameters with NaN or infinite gradients after the gradients are freed.

Filled where gradient norms are computed (gradient clipping, `StepInBackward`), read when a norm is not finite.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradientTrace:
    """Values that a gradient norm was computed from; they identify parameters with non-finite gradients later."""

    parameters: Sequence[Tensor]
    values: Tensor
    """A norm for each parameter, or the concatenated elements of all gradients."""

    def nonfinite(self) -> list[Tensor]:
        """Return the parameters with a non-finite gradient; synchronises with the device."""
        are_finite = torch.isfinite(self.values).cpu()
        if len(are_finite) != len(self.parameters):
            parts = torch.split(are_finite, [parameter.numel() for parameter in self.parameters])
            are_finite = torch.stack([part.all() for part in parts])
        return [one for one, is_finite in zip(self.parameters, are_finite.tolist(), strict=True) if not is_finite]
