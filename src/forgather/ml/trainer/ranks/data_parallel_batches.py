"""Batches of data-parallel ranks: each rank trains on its own shard of every step.

Rank 0 reads for all ranks (dispatch), or every rank reads its own shard. `DDPTrainer` and `FSDP2Trainer` call it.
"""

from typing import Any, Protocol

from torch.distributed import DeviceMesh

from forgather.ml.trainer.loading.data_order import Part
from forgather.ml.trainer.ranks.parallel_loading import DataLayout
from forgather.ml.trainer.ranks.team import Team


class DispatchArguments(Protocol):
    """Arguments that decide how batches reach the ranks."""

    dispatch_batches: bool
    dispatch_eval_batches: bool | None


def dispatches_evaluation(args: DispatchArguments) -> bool:
    """Return whether rank 0 reads the evaluation batches for all ranks."""
    choice = args.dispatch_eval_batches
    return bool(args.dispatch_batches if choice is None else choice)


def data_parallel_layout(team: Team, mesh: DeviceMesh | None, dispatches: bool) -> DataLayout:
    """Return the layout of batches; `mesh` is one-dimensional and contains all ranks."""
    part = Part(team.rank, team.size)
    if mesh is None or not dispatches:
        return DataLayout(part)
    return DataLayout(part, readers=[range(team.size)], reads_whole=True, mesh=mesh, axis=0)


def evaluation_settings(args: DispatchArguments, effective: bool) -> dict[str, Any]:
    """Return the settings of dispatch for a message about an evaluation."""
    return {
        "dispatch_batches": args.dispatch_batches,
        "dispatch_eval_batches": args.dispatch_eval_batches,
        "dispatch_eval_batches (effective)": effective,
    }
