"""Launch options from the environment: PET_* of Kubernetes operators and torchrun, SLURM_* for `--nnodes slurm`.

Imports no torch, except to count devices. `options` calls these functions.
"""

import os
from collections.abc import Mapping

from forgather._slurm import is_in_step, read_slurm_task
from forgather.cli.errors import UsageError

ALL_PROCESSES = ("auto", "cpu", "gpu")
"""Values of --nproc that stand for a number, as in torchrun."""
_PREFIX = "PET_"
_DEFAULT_PORT = "29500"
_OPTIONS = {
    "--nproc": "PET_NPROC_PER_NODE",
    "--nnodes": "PET_NNODES",
    "--max-restarts": "PET_MAX_RESTARTS",
}
_OPTIONS_OF_NODES = {"--node-rank": "PET_NODE_RANK", "--rdzv-endpoint": "PET_RDZV_ENDPOINT"}
_BACKENDS = ("", "c10d", "static")


def is_pet_node() -> bool:
    """Return whether the PET_* variables describe this process as a node, on which a launcher starts the ranks."""
    return bool(os.environ.get("PET_NNODES"))


def pet_variables() -> list[str]:
    """Return the PET_* variables as NAME=VALUE, for messages."""
    return [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_PREFIX)]


def pet_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return defaults of launch options from the PET_* variables; options of the command line win."""
    found = {option: os.environ[name] for option, name in _OPTIONS.items() if os.environ.get(name)}
    if "-d" in given:
        found.pop("--nproc", None)
    if given.get("--nnodes", found.get("--nnodes", "1")) == "1":
        # Operators set rank and endpoint for a single node too.
        return found
    backend = os.environ.get("PET_RDZV_BACKEND", "")
    if backend not in _BACKENDS:
        raise UsageError(
            f"PET_RDZV_BACKEND is {backend}, but Forgather's rendezvous is c10d. Set it to c10d, or unset it."
        )
    found.update({option: os.environ[name] for option, name in _OPTIONS_OF_NODES.items() if os.environ.get(name)})
    address = os.environ.get("PET_MASTER_ADDR")
    if address and "--rdzv-endpoint" not in found:
        found["--rdzv-endpoint"] = f"{address}:{os.environ.get('PET_MASTER_PORT') or _DEFAULT_PORT}"
    return found


def slurm_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return number of nodes, node rank and endpoint for --nnodes slurm; each task of the step is a launcher."""
    if not is_in_step():
        raise UsageError(
            "--nnodes slurm needs one task of srun on each node: srun --ntasks-per-node=1 forgather train --nnodes slurm "
            "--nproc N. This process is not in a job step."
        )
    if "--node-rank" in given:
        raise UsageError("--nnodes slurm takes the node rank from Slurm; remove --node-rank.")
    try:
        task = read_slurm_task()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if task.num_tasks != task.num_nodes:
        raise UsageError(
            f"--nnodes slurm starts one launcher on each node, but the step has {task.num_tasks} tasks on {task.num_nodes} "
            "node(s). Start it with srun --ntasks-per-node=1, or remove --nnodes and --nproc to make each task a rank."
        )
    if task.num_nodes == 1:
        return {"--nnodes": "1"}
    endpoint = given.get("--rdzv-endpoint", f"{task.first_host}:{task.port}")
    return {"--nnodes": str(task.num_nodes), "--node-rank": str(task.node_rank), "--rdzv-endpoint": endpoint}


def count_processes(kind: str) -> int:
    """Return the number that --nproc auto, cpu or gpu stands for; auto means gpu if there is one, else cpu."""
    # The launcher must not initialise a device. Counting does not.
    import torch

    num_devices = torch.accelerator.device_count()
    if kind == "cpu" or (kind == "auto" and num_devices == 0):
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_devices == 0:
        raise UsageError("--nproc gpu: this machine has no accelerator. Write --nproc with a number, or --nproc cpu.")
    return num_devices
