"""Loss functions."""

from forgather.ml.loss.causal_loss import CausalLoss
from forgather.ml.loss.rescale_loss import RescaleLoss

__all__ = ["CausalLoss", "RescaleLoss"]
