"""Whose gradient was not finite, told from the numbers that a norm was made of."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradientTrace:
    """What a norm was made of, so that it can be told whose gradient was not finite when the gradients are gone."""

    parameters: Sequence[Tensor]
    values: Tensor
    """A norm for each parameter, or all elements of all gradients, one after the other."""

    def nonfinite(self) -> list[Tensor]:
        """The parameters whose gradients were not finite; waits for the device."""
        are_finite = torch.isfinite(self.values).cpu()
        if len(are_finite) != len(self.parameters):
            parts = torch.split(are_finite, [parameter.numel() for parameter in self.parameters])
            are_finite = torch.stack([part.all() for part in parts])
        return [one for one, is_finite in zip(self.parameters, are_finite.tolist(), strict=True) if not is_finite]
