"""Reports about failed runs on accelerators: out-of-memory advice, memory snapshots and NCCL traces.

`Trainer._run_context` enters `reporting_failures` once around a run, so it adds no cost to a step.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forgather._run_files import check_in_run
from forgather.ml.distributed import flight_recorder
from forgather.ml.trainer.diagnostics.health import place_of
from forgather.ml.trainer.diagnostics.memory_use import measure
from forgather.ml.trainer.loop.signals import Preempted

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

_MOST_CAUSES = 20


@contextlib.contextmanager
def reporting_failures(trainer: "Trainer[Any]") -> Iterator[None]:
    """Explain an out-of-memory error of the body, and write the NCCL trace of this rank after any error."""
    try:
        yield
    # A stop signal is not a failure.
    except Preempted:
        raise
    except Exception as error:
        if trainer.attempt is not None:
            trainer.attempt.note(error)
        if trainer.team.size > 1:
            flight_recorder.write_trace(trainer.args.output_dir, trainer.team.rank)
        cause = out_of_memory_in(error)
        if cause is None or trainer.device.type == "cpu":
            raise
        # Keep the type, so that a user's `except` clause still catches it.
        raise torch.OutOfMemoryError(explanation(trainer, cause)) from error


def out_of_memory_in(error: BaseException) -> torch.OutOfMemoryError | None:
    """Return the out-of-memory error in a chain of causes, such as below a DistributedError or a compiler's error."""
    present: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if present is None or isinstance(present, torch.OutOfMemoryError):
            return present
        present = present.__cause__
    return None


def explanation(trainer: "Trainer[Any]", error: torch.OutOfMemoryError) -> str:
    """Return the message: place, batch, memory by purpose, settings that would help, and the snapshot."""
    # Measure first, while the traceback still holds the activations.
    use = measure(trainer)
    snapshot = write_snapshot(trainer.args.output_dir, trainer.team.rank, trainer.device)
    step = "" if trainer.state is None else f", in step {trainer.state.global_step + 1}"
    lines = [
        str(error),
        f"Out of memory on {place_of(trainer.team.rank, trainer.device)}{step}.",
        batch_line(trainer.args, trainer.steps.failed_batches),
        str(use),
    ]
    from forgather.ml.trainer.diagnostics.memory_advice import proposals

    found = proposals(trainer, use)
    lines.append(
        "Settings that would save memory in this run:" if found else "All settings that save memory are already on."
    )
    lines += [f"  {proposal}" for proposal in found]
    if snapshot is not None:
        lines.append(
            f"Memory snapshot: {snapshot} (view it at https://pytorch.org/memory_viz). It contains stack traces if "
            "torch.cuda.memory._record_memory_history() was called before training."
        )
    return "\n".join(lines)


def batch_line(args: Any, batches: Sequence[Mapping[str, Any]]) -> str:
    """Return a line about the size of the batch: samples and length of the largest micro-batch, and the settings."""
    settings = (
        f"per_device_train_batch_size={args.per_device_train_batch_size}, gradient_accumulation_steps="
        f"{args.gradient_accumulation_steps}"
    )
    shapes = [shape for shape in map(_shape, batches) if shape]
    if not shapes:
        return f"Batch: {settings}."
    largest = max(shapes, key=lambda shape: shape.numel())
    length = "" if len(largest) < 2 else f" x {largest[1]} tokens"
    return f"Batch: {largest[0]} samples{length} ({settings})."


def _shape(batch: Mapping[str, Any]) -> torch.Size | None:
    """Return the shape of the token ids, or else of the first tensor."""
    tensors = [
        value for value in (batch.get("input_ids"), *batch.values()) if isinstance(value, Tensor) and value.dim()
    ]
    return tensors[0].shape if tensors else None


def write_snapshot(output_dir: str, rank: int, device: torch.device) -> str | None:
    """Write the allocator's snapshot of this process; return its path, or None if it cannot be written."""
    memory = getattr(torch.get_device_module(device.type), "memory", None)
    dump = getattr(memory, "_dump_snapshot", None)
    if dump is None or not hasattr(torch._C, f"_{device.type}_memorySnapshot"):
        return None
    path = os.path.join(output_dir, f"memory_snapshot_rank{rank}.pickle")
    try:
        os.makedirs(output_dir, exist_ok=True)
        check_in_run(*os.path.split(path))
        dump(path)
    except (OSError, RuntimeError) as error:
        # The error of the run matters more than its snapshot.
        logger.warning("The memory snapshot %s could not be written: %s", path, error)
        return None
    return path
