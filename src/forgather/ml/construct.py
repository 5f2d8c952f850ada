"""Parsing of dtype names in configurations.

Called by the training arguments and by the code that builds models.
"""

import torch

_ALIASES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the dtype with this name: torch's name ("bfloat16", "torch.bfloat16", "half") or a short one ("bf16")."""
    if isinstance(name, torch.dtype):
        return name
    short = str(name).removeprefix("torch.")
    dtype = _ALIASES.get(short, getattr(torch, short, None))
    if not isinstance(dtype, torch.dtype):
        known = sorted({key for key, value in vars(torch).items() if isinstance(value, torch.dtype)} | set(_ALIASES))
        raise ValueError(f"{name!r} is not the name of a torch dtype; choose one of {', '.join(known)}.")
    return dtype
