"""Rank worker: receives function calls from the test process and runs each in a new process group.

A fork of `rank_nursery`; it lives until its stdin closes.
"""

import contextlib
import gc
import importlib
import operator
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch
import torch.distributed as dist

from forgather.ml.distributed import reset_process_groups
from tests.support.rank_protocol import Clean, Finished, Job, Ready, TearDown, describe_error, rank_variables
from tests.support.rank_stacks import register

# Longer than any test: the test process, not gloo, reports a hang, with stacks.
COLLECTIVE_TIMEOUT = timedelta(hours=1)


def main(descriptor: int, stacks_path: str) -> None:
    connection = Connection(descriptor)
    stacks_file = open(stacks_path, "a")  # noqa: SIM115 - faulthandler writes to it for the whole life of the process
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # The collection after each job need not look at the modules, which stay.
    gc.freeze()
    while True:
        # Register before each job, because a job that trains handles the same signal.
        register(stacks_file)
        try:
            job = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        _serve(job, connection)


def _exit_with_parent() -> None:
    """End this process, even inside a collective, once the test process has closed this stdin or died."""
    while os.read(0, 4096):
        pass
    if os.getpgrp() == os.getpid():
        # Each worker leads a process group, so this also kills the processes that the test started here.
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _serve(job: Job, connection: Connection) -> None:
    threads_before = set(threading.enumerate())
    with _original_surroundings():
        connection.send(_run(job, connection))
        request = connection.recv()
        assert isinstance(request, TearDown), request
        # Torch counts groups, and a group that could not be created stays counted on the ranks that tried. The names of
        # later groups would differ between ranks.
        leftovers = [] if dist.is_initialized() else ["no process group"]
        _leave_process_group()
    leftovers += [f"thread {thread.name!r}" for thread in threading.enumerate() if thread not in threads_before]
    connection.send(Clean(leftovers))


def _run(job: Job, connection: Connection) -> Finished:
    try:
        function = _find(job.module, job.qualname)
        args = pickle.loads(job.pickled_args)
        _join_process_group(job)
        _seed_everything()
        connection.send(Ready())
        return Finished(pickle.dumps(function(*args)), None)
    except BaseException as error:  # noqa: BLE001 - whatever a test raises, SystemExit included, is its outcome
        return Finished(None, describe_error(error))


def _find(module: str, qualname: str) -> Callable[..., Any]:
    return operator.attrgetter(qualname)(importlib.import_module(module))


def _join_process_group(job: Job) -> None:
    os.environ.update(rank_variables(job.rank, job.world_size, job.store_port))
    # The test process owns the store, as the agent does under torchrun. So the store survives the death of rank 0.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    store = dist.TCPStore("127.0.0.1", job.store_port, is_master=False)
    # On the rehearsal device, collectives of device tensors follow NCCL's rules.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if os.environ.get("REHEARSAL") == "1" else "gloo",
        store=dist.PrefixStore("rank_worker", store),
        rank=job.rank,
        world_size=job.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    reset_process_groups()
    _forget_accelerator()
    # Trainers are in reference cycles and hold groups. Each group has threads, which wake up a hundred times per second.
    gc.collect()


def _forget_accelerator() -> None:
    """Forget the rank of this job: accelerate keeps it for the life of a process, and the next job may have another."""
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _seed_everything() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@contextlib.contextmanager
def _original_surroundings() -> Iterator[None]:
    """Restore the environment variables, the working directory and torch's global modes after the call."""
    variables, directory, dtype = dict(os.environ), os.getcwd(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(directory)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_grad_enabled(True)
