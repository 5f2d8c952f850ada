"""Model FLOPs utilisation (MFU): peak FLOP/s of known accelerators, and the FLOPs of a token in training.

The peaks are dense matrix products in the data sheets of the vendors. `DefaultMetrics` divides the FLOPs per second of
a run by them. A device or precision without an entry has no MFU.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from forgather.ml.utils import unwrap_model

_TERA = 1e12


class Peaks(NamedTuple):
    """Peak TFLOP/s of dense matrix products by precision; None if the device does not have it."""

    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float | None


_PEAKS = {
    # Longer names come before their prefixes, because the first entry that the device name contains is used.
    "GB200": Peaks(2500, 2500, 1250, 80),
    "B200": Peaks(2250, 2250, 1125, 75),
    "GH200": Peaks(989.4, 989.4, 494.7, 66.9),
    "H200 NVL": Peaks(835.5, 835.5, 417.5, 60),
    "H200": Peaks(989.4, 989.4, 494.7, 66.9),
    "H100 NVL": Peaks(835.5, 835.5, 417.5, 60),
    "H100 PCIe": Peaks(756, 756, 378, 51),
    "H100": Peaks(989.4, 989.4, 494.7, 66.9),
    "A100": Peaks(312, 312, 156, 19.5),
    "A40": Peaks(149.7, 149.7, 74.8, 37.4),
    "A30": Peaks(165, 165, 82, 10.3),
    "A10G": Peaks(70, 70, 35, 31.5),
    "A10": Peaks(125, 125, 62.5, 31.2),
    "L40S": Peaks(362, 362, 183, 91.6),
    "L40": Peaks(181, 181, 90.5, 90.5),
    "L4": Peaks(121, 121, 60, 30.3),
    "T4": Peaks(None, 65, None, 8.1),
    "V100S": Peaks(None, 130, None, 16.4),
    "V100-PCIE": Peaks(None, 112, None, 14),
    "V100": Peaks(None, 125, None, 15.7),
    # Peaks with float32 accumulation, as in training. GeForce devices are faster with 16-bit accumulation.
    "RTX 3090 Ti": Peaks(80, 80, 40, 40),
    "RTX 3090": Peaks(71, 71, 35.6, 35.6),
    "RTX 4090 D": Peaks(147, 147, 73.5, 73.5),
    "RTX 4090": Peaks(165.2, 165.2, 82.6, 82.6),
    "RTX 5090": Peaks(209.5, 209.5, 104.8, 104.8),
    "RTX A6000": Peaks(154.8, 154.8, 77.4, 38.7),
    "RTX 6000 Ada": Peaks(364.2, 364.2, 182.1, 91.1),
    # Peaks of one of the two dies of a module, because torch sees each die as a device.
    "MI250X": Peaks(191.5, 191.5, None, 47.9),
    "MI250": Peaks(181, 181, None, 45.3),
    "MI210": Peaks(181, 181, None, 45.3),
    "MI300X": Peaks(1307.4, 1307.4, 653.7, 163.4),
    "MI325X": Peaks(1307.4, 1307.4, 653.7, 163.4),
}

_OTHER_DEVICES = ("LAPTOP", "MAX Q", "MIG")
"""Words in the names of slower variants and partitions of a device, which have no entry."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device by its name in torch, or None if it is unknown."""
    words = f" {device_name.replace('-', ' ')} ".upper()
    if any(f" {word} " in words for word in _OTHER_DEVICES):
        return None
    for name, peaks in _PEAKS.items():
        # Whole words: an RTX A1000 is not an A100.
        if f" {name.replace('-', ' ')} ".upper() in words:
            tera: float | None = getattr(peaks, precision)
            return None if tera is None else tera * _TERA
    return None


def precision_of(args: object, model: nn.Module) -> str | None:
    """Return the precision of most matrix products, as a field of `Peaks`; None for other dtypes."""
    autocast = getattr(args, "mixed_precision", None)
    if autocast in ("bf16", "fp16"):
        return str(autocast)
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    dtype = max(sizes, key=lambda one: sizes[one], default=None)
    if dtype == torch.float32:
        return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype) if dtype is not None else None


def peak_of_run(args: object, device: torch.device, model: nn.Module) -> float | None:
    """Return the peak FLOP/s of this device at the precision of the run; None on CPUs and unknown devices."""
    # ROCm devices have the type "cuda" too.
    precision = precision_of(args, model) if device.type == "cuda" else None
    return None if precision is None else peak_flops(torch.cuda.get_device_name(device), precision)


def attention_flops(model: nn.Module, length: float) -> float:
    """Return the training FLOPs of attention scores per token of a sequence, for models with a Hugging Face config.

    Each layer multiplies queries with keys, and weights with values: 2 x 2 x width x length in the forward pass, and
    twice that in the backward pass. As is usual for MFU, causal masks are not subtracted.
    """
    config = getattr(unwrap_model(model), "config", None)
    # Composite models keep the configuration of their language model here.
    config = getattr(config, "text_config", None) or config
    num_layers, num_heads = (_number(config, name) for name in ("num_hidden_layers", "num_attention_heads"))
    head_width = _number(config, "head_dim") or (_number(config, "hidden_size") / num_heads if num_heads else 0)
    return 12 * num_layers * num_heads * head_width * length


def _number(config: Any, name: str) -> float:
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return float(value) if isinstance(value, int) else 0.0
