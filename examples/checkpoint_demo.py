"""Demo of the checkpoint system: two real ranks, every sharing pattern, a kill during a save, and a resume.

Run it with `make demo-checkpoints` or `python examples/checkpoint_demo.py`. It starts its own ranks. Read `ToyTrainer`
first: a training loop that declares its state and leaves the rest to the checkpoint manager.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.encoding.digest import compute_state_hash, state_digests
from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager, RNGState
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.distributed import DistributedEnvironment

NUM_RANKS = 2
SAVE_STEPS = 3
NUM_STEPS = 6
BATCH_SIZE = 16


class Counter:
    """Minimal object with a state_dict."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class ToyTrainer:
    """Data-parallel trainer with manual all-reduce; the checkpoint system needs only `get_state_components`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, NUM_STEPS)
        torch.manual_seed(1 + dist.get_rank())
        self.data, self.averages, self.node_cache = Counter(), Counter(), Counter()
        self.rng = RNGState(seed=0)

    def get_process_groups(self) -> dict[str, Any]:
        return {"ddp_group": dist.group.WORLD}

    def get_state_components(self) -> list[StateComponent]:
        return [
            StateComponent("model", self.model, SharingPattern.REPLICATED, validate_replication=True),
            StateComponent("optimizer", self.optimizer, SharingPattern.REPLICATED, validate_replication=True),
            StateComponent("scheduler", self.scheduler, SharingPattern.GLOBAL),
            StateComponent("averages", self.averages, SharingPattern.PER_GROUP, process_group_name="ddp_group"),
            StateComponent("node_cache", self.node_cache, SharingPattern.PER_NODE, required=False),
            StateComponent("dataset", self.data, SharingPattern.PER_RANK),
            StateComponent("rng", self.rng, SharingPattern.PER_RANK),
        ]

    def step(self) -> float:
        batch = torch.randn(BATCH_SIZE, 64)
        loss = (self.model(batch) - batch.flip(1)).square().mean()
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.data.value += BATCH_SIZE
        return loss.item()


def run_rank(output_dir: str, killed_rank: int) -> None:
    """Resume, train and save on one rank of the job."""
    env = DistributedEnvironment(no_accelerator=True, log_level="WARNING")
    trainer = ToyTrainer()
    config = CheckpointConfig(output_dir=output_dir, save_total_limit=2)
    manager = CheckpointManager(config, env, trainer, trainer.model)
    resumed_from = manager.load_checkpoint()
    start = store.step_of(resumed_from) or 0 if resumed_from else 0
    tell(env.rank, f"resumes from step {start}" if start else "starts fresh")
    for step in range(start + 1, NUM_STEPS + 1):
        loss = trainer.step()
        tell(env.rank, f"step {step}: loss {loss:.4f}")
        if step % SAVE_STEPS == 0:
            if step == NUM_STEPS and env.rank == killed_rank:
                die_at_next_fsync()
            path = manager.save_checkpoint(checkpoint_id=step)
            tell(env.rank, f"saved {os.path.basename(path)}")
    final = {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }
    fingerprint = compute_state_hash(state_digests(final))
    print(f"rank {env.rank} ends with state {fingerprint[:16]}", flush=True)
    manager.close()
    dist.destroy_process_group()


def tell(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def die_at_next_fsync() -> None:
    """Replace `os.fsync` so that this rank is killed after it has written one more file."""

    def kill(_descriptor: int) -> None:
        print(f"rank {dist.get_rank()} is killed during the save", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = kill  # type: ignore[assignment]


def start_job(console: Console, title: str, output_dir: str, killed_rank: int = -1) -> list[str]:
    """Run the job with real ranks, print their output, and return the fingerprints of their final states."""
    console.rule(title, align="left")
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    ranks = []
    for rank in range(NUM_RANKS):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS}
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, output_dir, str(killed_rank)]
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    fingerprints = []
    for number, rank_process in enumerate(ranks):
        output, errors = rank_process.communicate()
        for line in output.splitlines():
            console.print(f"  {line}", highlight=False)
            if " ends with state " in line:
                fingerprints.append(line.rsplit(" ", 1)[1])
        if rank_process.returncode:
            console.print(
                f"  rank {number} ended: {how_it_ended(rank_process.returncode, errors)}", style="red", markup=False
            )
    return fingerprints


def how_it_ended(code: int, errors: str) -> str:
    if code < 0:
        return signal.Signals(-code).name
    raised = [line for line in errors.splitlines() if "CheckpointSaveError: " in line]
    return raised[-1].split(": ", 1)[1] if raised else errors


def show_directory(console: Console, output_dir: str) -> None:
    root = os.path.join(output_dir, store.CHECKPOINTS_FOLDER)
    table = Table("in checkpoints/", "status")
    for name in sorted(os.listdir(root)):
        path = os.path.join(root, name)
        problems = store.verify_checkpoint(path)
        table.add_row(name, problems[0] if problems else f"complete, {len(read_manifest(path).files)} files verified")
    console.print(table)


def show_files(console: Console, path: str) -> None:
    manifest = read_manifest(path)
    table = Table("component", "pattern", "file", "bytes", "written by", title=os.path.basename(path))
    for record in manifest.files:
        component = manifest.components.get(record.component)
        pattern = component.sharing_pattern if component else ""
        table.add_row(record.component, pattern, record.path, f"{record.size:,}", f"rank {record.writer_rank}")
    console.print(table)


def main() -> None:
    if "RANK" in os.environ:
        run_rank(sys.argv[1], int(sys.argv[2]))
        return
    console = Console(width=None if sys.stdout.isatty() else 110)
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="demo_output-") as folder:
        straight, interrupted = os.path.join(folder, "straight"), os.path.join(folder, "interrupted")
        expected = start_job(console, "1. Two ranks train six steps, saving at steps 3 and 6", straight)
        show_files(console, store.checkpoint_path(straight, NUM_STEPS))
        start_job(console, "2. The same job, but rank 1 is killed while it saves step 6", interrupted, killed_rank=1)
        show_directory(console, interrupted)
        found = start_job(console, "3. The restarted job finds step 3, verifies it, and resumes", interrupted)
        show_directory(console, interrupted)
        console.rule("Result", align="left")
        if not expected or found != expected:
            console.print(
                f"[red]The resumed run differs from the uninterrupted run: {found} instead of {expected}.[/red]"
            )
            sys.exit(1)
        console.print(
            "[green]The killed and resumed run ends with the same bits as the uninterrupted run, on both ranks.[/green]"
        )


if __name__ == "__main__":
    main()
