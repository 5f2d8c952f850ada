"""Objects from the names that configurations give them."""

import torch

_ALIASES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """The dtype of that name, which may be torch's ("bfloat16", "torch.bfloat16", "half") or a short one ("bf16")."""
    if isinstance(name, torch.dtype):
        return name
    short = str(name).removeprefix("torch.")
    dtype = _ALIASES.get(short, getattr(torch, short, None))
    if not isinstance(dtype, torch.dtype):
        known = sorted({key for key, value in vars(torch).items() if isinstance(value, torch.dtype)} | set(_ALIASES))
        raise ValueError(f"{name!r} is not the name of a torch dtype; choose one of {', '.join(known)}.")
    return dtype
