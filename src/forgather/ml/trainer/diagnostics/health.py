"""Health check: tests the accelerator of each rank, its free memory, and the links between ranks before training.

A defective device gives wrong numbers or a hang much later. `prepare_device` calls the check. It does nothing on CPUs.
"""

import logging
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from forgather.ml.construct import torch_dtype

if TYPE_CHECKING:
    from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
    from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

_SIZE, _DEPTH = 512, 256
_LEAST_MEMORY = 0.02
"""Fraction of the device memory below which no training can start."""
_FEW_MEMORY = 0.5
_LINK_SECONDS = 60.0
_NUM_LINK_VALUES = 64
_MOST_RANKS = 16
"""Number of ranks that an error lists."""
_HALF_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class HealthCheckError(RuntimeError):
    """Error about devices or links that do not work. Every rank raises it with the same message."""


class Place(NamedTuple):
    """Rank, host and device of a process, for messages."""

    rank: int
    host: str
    device: str
    device_name: str

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host}, device {self.device} ({self.device_name})"


def place_of(rank: int, device: torch.device) -> Place:
    return Place(rank, socket.gethostname(), str(device), device_name(device))


def device_name(device: torch.device) -> str:
    """Return the product name of an accelerator, or its type if the backend has no names."""
    get_name = getattr(torch.get_device_module(device.type), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))


def check_health(trainer: "Trainer[Any]") -> None:
    """Raise HealthCheckError on every rank if the device or a link of any rank does not work; collective."""
    device, team, args = trainer.device, trainer.team, trainer.args
    # Ranks have devices of one type (`settings_of` compares it), so all of them return here or none does.
    if device.type == "cpu" or not args.health_check:
        return
    place = place_of(team.rank, device)
    _raise_problems(team.gather(_reported(place, device_problem(device, dtypes_of(args)))))
    if team.size > 1 and carries(device.type):
        _raise_problems(team.gather(_reported(place, link_problem(device, team.rank, team.size))))


def dtypes_of(args: "TrainingArguments") -> list[torch.dtype]:
    """Return the dtypes of the matrix products in training: float32, and the 16-bit types of the arguments."""
    chosen = {_HALF_PRECISIONS.get(args.mixed_precision or "")}
    if args.param_precision != "fp32":
        chosen.add(torch.bfloat16)
    if args.default_dtype is not None:
        chosen.add(torch_dtype(args.default_dtype))
    return [torch.float32, *(dtype for dtype in (torch.bfloat16, torch.float16) if dtype in chosen)]


def device_problem(device: torch.device, dtypes: Sequence[torch.dtype]) -> str | None:
    """Return why the device cannot be used for training, or None."""
    try:
        problem = _memory_problem(device)
        wrong = (_product_problem(device, dtype) for dtype in dtypes)
        return problem or next((text for text in wrong if text is not None), None)
    except RuntimeError as error:
        # Raised on all ranks by the caller. A second rank must not wait for this one in a collective.
        return f"the device failed with {type(error).__name__}: {_first_line(error)}"


def _product_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    # With entries -1, 0 and 1, each partial sum is an integer of at most 256. All dtypes, TF32 and any order of
    # summation give the exact result, so any difference is a fault of the device.
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randint(-1, 2, shape, generator=generator, dtype=torch.float32, device="cpu")
        for shape in ((_SIZE, _DEPTH), (_DEPTH, _SIZE))
    )
    product = (left.to(device, dtype) @ right.to(device, dtype)).float().cpu()
    num_wrong = int((product != left @ right).sum())
    if num_wrong == 0:
        return None
    return (
        f"a matrix product in {str(dtype).removeprefix('torch.')} has {num_wrong} wrong elements of {product.numel()}, "
        "compared with the CPU"
    )


def _memory_problem(device: torch.device) -> str | None:
    if device.type not in ("cuda", "xpu"):
        # Other backends may not implement `get_memory_info`.
        return None
    free, total = torch.accelerator.get_memory_info(device)
    # Memory in the cache of this process is available too: an earlier run may have left it.
    free += torch.accelerator.memory_reserved(device)
    if free < _LEAST_MEMORY * total:
        return f"only {format_bytes(free)} of its {format_bytes(total)} memory is free. Another process may be using the device"
    if free < _FEW_MEMORY * total:
        logger.warning(
            "%s has only %s of its %s memory free: other processes are using it.",
            device,
            *map(format_bytes, (free, total)),
        )
    return None


def carries(device_type: str) -> bool:
    """Return whether the default process group has a backend for device tensors, such as NCCL."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    # The configuration has the form "cpu:gloo,cuda:nccl". The links of gloo have been tested by earlier messages.
    backends = dict(pair.split(":", 1) for pair in dist.get_backend_config().split(","))
    return backends.get(device_type, "gloo") != "gloo"


def link_problem(device: torch.device, rank: int, size: int) -> str | None:
    """Sum known numbers over all ranks by the backend of the device; return what went wrong, or None. Collective."""
    # Each rank contributes one row, so that a wrong row names its rank.
    expected = torch.arange(size * _NUM_LINK_VALUES, dtype=torch.float32).view(size, _NUM_LINK_VALUES) % 1024 + 1
    numbers = torch.zeros_like(expected)
    numbers[rank] = expected[rank]
    try:
        summed = numbers.to(device)
        work = dist.all_reduce(summed, async_op=True)
        assert work is not None
        # A link that is down would otherwise block for the timeout of the group, which may be 30 minutes.
        work.wait(timedelta(seconds=_LINK_SECONDS))
        is_wrong = (summed.cpu() != expected).any(dim=1)
    except RuntimeError as error:
        return f"an all-reduce over {size} ranks failed with {type(error).__name__}: {_first_line(error)}"
    wrong = is_wrong.nonzero().flatten().tolist()
    return f"an all-reduce over {size} ranks gave wrong numbers from rank(s) {_listed(wrong)}" if wrong else None


def _reported(place: Place, problem: str | None) -> str | None:
    return None if problem is None else f"{place}: {problem}"


def _raise_problems(reports: Sequence[str | None]) -> None:
    problems = [report for report in reports if report is not None]
    if problems:
        raise HealthCheckError(
            f"The health check failed on {len(problems)} of {len(reports)} rank(s):\n  "
            + "\n  ".join(problems[:_MOST_RANKS])
            + ("" if len(problems) <= _MOST_RANKS else f"\n  and {len(problems) - _MOST_RANKS} more")
            + "\nStart the job without these devices or hosts, or free their memory. health_check=False skips the check."
        )


def format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    return shown if len(ranks) <= _MOST_RANKS else f"{shown} and {len(ranks) - _MOST_RANKS} more"


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
