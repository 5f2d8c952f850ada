"""Server that runs the ranks of `chaos_client` as forks of a process with torch already imported.

Started as `python -m tests.support.faults.chaos_server <socket path>`. A rank arms the injector of ckpt-chaos, as the
tool's own start-up hook does in a new process.
"""

import json
import os
import select
import signal
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from forgather.ml.checkpoint.files.durable import replace_file
from forgather.ml.distributed import Peers
from tests.support.faults.forked import fork
from tests.support.faults.job import Job, warm_up

NUM_STEPS = 2


def train(output_dir: str) -> None:
    """Resume from any checkpoint and train to the end, with a checkpoint after each step."""
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        meeting = dist.FileStore(meeting_point(output_dir), world_size)
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    job = Job(output_dir)
    job.manager.load_checkpoint()
    print(f"resumed from step {job.state.global_step}", flush=True)
    while job.state.global_step < NUM_STEPS:
        job.train()
        job.save()
    digests = Peers.world().gather(job.digest())
    if job.rank == 0:
        replace_file(os.path.join(output_dir, "result.json"), json.dumps(digests).encode())
    job.manager.close()
    Peers.world().gather(None)


def meeting_point(output_dir: str) -> str:
    """Return a rendezvous file for the ranks of one start, outside of the directory that the tool watches.

    The port named by the tool was free when it looked, but may be taken before a rank listens on it. It only
    distinguishes one start in a directory from the next.
    """
    kind = "armed" if "CKPT_CHAOS_WATCH" in os.environ else "plain"
    name = "-".join(["meeting", *output_dir.strip("/").split("/"), kind, os.environ["MASTER_PORT"]])
    return os.path.join(os.path.dirname(os.environ["CHAOS_SOCKET"]), name)


def run_rank(request: dict[str, Any]) -> None:
    os.environ.update(request["environment"])
    if "CKPT_CHAOS_WATCH" in os.environ:
        from ckpt_chaos.targets.common import arm_from_env

        arm_from_env(int(os.environ.get("RANK", "0")), lazy=True)
    train(request["output_dir"])


def serve(connection: socket.socket) -> None:
    """Run one rank and send back its exit code; kill the rank if its client dies."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, descriptors, _, _ = socket.recv_fds(connection, 8, 2)
    size, data = int.from_bytes(header, "little"), b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    for target, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    rank = fork(lambda: run_rank(json.loads(data)))
    while True:
        ended, status = os.waitpid(rank, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            connection.sendall(bytes([code if code >= 0 else 128 - code]))
            return
        if select.select([connection], [], [], 0.005)[0]:
            os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)
            return


def main(path: str) -> None:
    torch.set_num_threads(1)
    warm_up()
    # With SIG_IGN the kernel reaps the children that serve a rank.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            fork(lambda connection=connection: serve(connection))  # type: ignore[misc]
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
