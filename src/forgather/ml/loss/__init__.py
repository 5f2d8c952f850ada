"""Loss functions for next-token prediction, full, chunked and fused with the output layer, and loss rescaling.

Trainers count targets with `num_targets` and sum losses over micro-batches and ranks with `sum_over_targets`.
"""

from forgather.ml.loss.causal_loss import CausalLoss
from forgather.ml.loss.chunked_causal_loss import ChunkedCausalLoss
from forgather.ml.loss.linear_cross_entropy import LinearCrossEntropyLoss
from forgather.ml.loss.rescale_loss import RescaleLoss

__all__ = ["CausalLoss", "ChunkedCausalLoss", "LinearCrossEntropyLoss", "RescaleLoss"]
