"""Slurm cluster on this machine: slurmctld and two slurmd without authentication, in a temporary directory."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.launch import INHERITED_VARIABLES, free_port

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")
POLL_SECONDS = 0.5
CONFIGURATION = """\
ClusterName=forgather
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# A job that is queued again waits as long as its credentials live.
AuthInfo=cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
JobRequeue=1
PropagateResourceLimits=NONE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName={host} NodeAddr=127.0.0.1 Port={first_port} CPUs={cpus} State=UNKNOWN
NodeName={host}-second NodeAddr=127.0.0.1 Port={second_port} CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def has_slurm() -> bool:
    # Debian installs the daemons where only root looks for programs.
    return all(_find(name) for name in PROGRAMS)


@dataclass(frozen=True)
class Cluster:
    """Running cluster. Only the first of its nodes has a name that can be resolved."""

    folder: Path

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, seconds: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm; stdout and stderr are in `stdout`."""
        return subprocess.run(
            [_find(command[0]) or command[0], *command[1:]],
            env={**self._environment(), **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )

    def submit(self, cwd: Path, env: Mapping[str, str], *words: str) -> str:
        """Submit a batch job; returns its number."""
        done = self.run("sbatch", "--parsable", *words, env=env, cwd=cwd)
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()

    def describe(self, job: str) -> dict[str, str]:
        """Return the fields of a job, such as JobState and Restarts."""
        words = self.run("scontrol", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until_over(self, job: str, seconds: float = 300) -> dict[str, str]:
        end = time.monotonic() + seconds
        while (found := self.describe(job))["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < end, found
            time.sleep(POLL_SECONDS)
        return found

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith((*INHERITED_VARIABLES, "SLURM"))
        }
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf")}


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start the daemons, and stop them at the end."""
    host = socket.gethostname().split(".")[0]
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            host=host,
            user=getpass.getuser(),
            folder=folder,
            cpus=os.cpu_count(),
            controller_port=free_port(),
            first_port=free_port(),
            second_port=free_port(),
        )
    )
    daemons = [_start(folder, "slurmctld")]
    try:
        daemons += [_start(folder, "slurmd", "-N", name) for name in (host, f"{host}-second")]
        cluster = Cluster(folder)
        _wait_for_nodes(cluster)
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)


def _start(folder: Path, name: str, *words: str) -> "subprocess.Popen[bytes]":
    command: Sequence[str] = (_find(name) or name, "-D", "-f", str(folder / "slurm.conf"), *words)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait_for_nodes(cluster: Cluster) -> None:
    end = time.monotonic() + 60
    while (done := cluster.run("sinfo", "--noheader", "--Node", "--format=%t")).stdout.split() != ["idle", "idle"]:
        logs = "\n".join(path.read_text()[-2000:] for path in sorted(cluster.folder.glob("*.log")))
        assert time.monotonic() < end, f"{done.stdout}\n{logs}"
        time.sleep(POLL_SECONDS)


def _find(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin")))
