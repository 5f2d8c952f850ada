"""Environment variables of launchers: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE; read and checked.

In a job step of Slurm with several tasks, the variables of Slurm give the missing ones.

Inconsistent values raise `ValueError` before any collective, where the job would hang. `DistributedEnvironment` and the
set-up of the trainers call the checks.
"""

import os

from forgather._slurm import adopt_slurm_task

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def read_int(variable: str, default: int) -> int:
    """Return an environment variable as an integer, or `default` if it is not set."""
    text = os.environ.get(variable)
    if text is None and adopt_slurm_task():
        text = os.environ.get(variable)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"environment variable {variable} is {text!r}, but must be an integer. Correct it or unset it."
        ) from None


def check_launch_variables() -> None:
    """Raise `ValueError` for contradictory variables: the job would hang, or its processes would train separately."""
    world_size = read_int("WORLD_SIZE", 1)
    check_place(read_int("RANK", 0), world_size, read_int("LOCAL_RANK", 0), read_int("LOCAL_WORLD_SIZE", 1))
    if world_size > 1 and "RANK" not in os.environ:
        raise _error(f"this process is one of {world_size}, but RANK is not set: all of them would be rank 0")


def check_place(rank: int, world_size: int, local_rank: int, local_world_size: int) -> None:
    """Raise `ValueError` if a rank is outside its world size, or a node larger than the job."""
    for name, place, size in (("rank", rank, world_size), ("local rank", local_rank, local_world_size)):
        if size < 1:
            raise _error(f"{name} {place} of {size} process(es) is impossible: a job has at least one")
        if not 0 <= place < size:
            raise _error(f"{name} {place} does not exist among {size} process(es); ranks start at 0")
    if local_world_size > world_size:
        raise _error(f"a node cannot have {local_world_size} processes of a job of {world_size}")


def _error(problem: str) -> ValueError:
    found = ", ".join(f"{name}={os.environ[name]}" if name in os.environ else f"{name} not set" for name in _NAMES)
    return ValueError(
        f"The rank of this process is inconsistent: {problem}. Environment variables: {found}. Start the job with torchrun "
        "or forgather train --nproc, which set all four, or unset them to train in one process. If you set them yourself: "
        "RANK is from 0 to WORLD_SIZE - 1, and LOCAL_RANK from 0 to LOCAL_WORLD_SIZE - 1."
    )
