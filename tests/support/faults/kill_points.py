"""Kill-point script: kills a job at every file operation of its saves, restarts it, and writes a report.

Started as `python -m tests.support.faults.kill_points <world size> <variant> <directory> <report file> [<every nth>]`. The
variants are "exchange", "renames", "sharded", "background" and "background-sharded". With the prefix "flat-", checkpoints
lie in the output directory itself, beside a checkpoint and a temporary directory of other programs.
Importing torch takes longer than a whole job, so this process imports it once and forks the ranks. It must not start
threads.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.files import durable, hashed_io
from forgather.ml.checkpoint.files.layout import IN_FOLDER, IN_OUTPUT_DIR, checkpoints_root
from forgather.ml.distributed import Peers
from tests.support.faults.file_operations import AFTER, BEFORE, KINDS_WITH_AFTER, FileOperations
from tests.support.faults.forked import Notes, fork, read_notes, wait_for
from tests.support.faults.job import Job, debris, warm_up

NUM_LANES = 2
# A small buffer makes small files take the path of large files: several direct writes, and a final truncate.
SMALL_BUFFER_BYTES = 16 * 1024
NUM_TRIES = 5
# Files of other programs by path: a checkpoint of transformers, and the temporary directory of a tool.
NEIGHBOURS = {"checkpoint-1000/trainer_state.json": "{}", ".tmp-upload-0123456789ab/part": "data"}
# The pattern of get_last_checkpoint.
LAST_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


@dataclass(frozen=True)
class KillPoint:
    rank: int
    operation: str
    when: str


@dataclass
class Outcome:
    """Result of one kill; the test judges it."""

    point: KillPoint
    exit_codes: list[int]
    survivor_seconds: float
    survivor_error: str
    saved: list[str]
    """Saves that had returned when the rank died."""
    visible: list[str]
    """Names of the visible checkpoints before recovery."""
    misleading: list[str] = field(default_factory=list)
    """Incomplete directories with the name of a checkpoint, before recovery."""
    restart: list[dict[str, Any]] = field(default_factory=list)
    """Per rank of the next start: the resumed state and its problems."""


@dataclass(frozen=True)
class Setting:
    world_size: int
    has_exchange: bool
    directory: str
    is_sharded: bool = False
    in_background: bool = False
    """Whether training continues during the saves."""
    layout: str = IN_FOLDER

    @property
    def limit(self) -> int:
        return self.world_size

    @property
    def options(self) -> dict[str, Any]:
        return {"sharded": self.is_sharded, "layout": self.layout}

    @property
    def template(self) -> str:
        return os.path.join(self.directory, "template")


def join_group(setting: Setting, rank: int, meeting_point: str) -> None:
    torch.set_num_threads(1)
    hashed_io.BUFFER_BYTES = SMALL_BUFFER_BYTES
    if not setting.has_exchange:
        durable.exchange = lambda first, second: False
    if setting.world_size > 1:
        rendezvous = dist.FileStore(meeting_point, setting.world_size)
        dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=setting.world_size)


def prepare(setting: Setting, notes: Notes) -> None:
    """Write the checkpoints that exist before the job under test starts."""
    job = Job(setting.template, setting.limit, **setting.options)
    for _ in range(2):
        job.train()
        notes.add("digest", [f"step {job.state.global_step}", job.digest()])
        job.save()
    job.manager.close()


def run_job(setting: Setting, output_dir: str, notes: Notes, operations: FileOperations) -> None:
    """Resume, save a new step, record it as the best, and save the same step again with other content."""
    operations.install()
    job = Job(output_dir, setting.limit, **setting.options, async_save=setting.in_background)
    job.manager.load_checkpoint()
    job.train()
    notes.add("digest", ["step 3", job.digest()])
    path = job.save()
    if setting.in_background:
        # The save is in flight here, and must not contain this step.
        job.train(count=False)
    job.manager.finish_save()
    notes.add("saved", "step 3")
    job.manager.update_best_checkpoints(path, {"loss": 0.5}, "loss", None, 1)
    if not setting.in_background:
        job.train(count=False)
    job.manager.set_eval_metrics({"loss": 0.25})
    notes.add("digest", ["step 3 again", job.digest()])
    job.save()
    if setting.in_background:
        job.train(count=False)
    job.manager.finish_save()
    notes.add("saved", "step 3 again")
    job.manager.close()
    Peers.world().gather(None)


def wait_for_others(setting: Setting, rank: int, directory: str) -> None:
    paths = [os.path.join(directory, f"joined{one}") for one in range(setting.world_size)]
    os.close(os.open(paths[rank], os.O_CREAT))
    while not all(map(os.path.exists, paths)):
        time.sleep(0.001)


def rank_of_job(setting: Setting, rank: int, directory: str, point: KillPoint | None) -> None:
    notes = Notes(directory, rank)
    output_dir = os.path.join(directory, "output")
    mine = point if point is not None and point.rank == rank else None
    operations = FileOperations(output_dir, mine.operation if mine else None, mine.when if mine else BEFORE)
    join_group(setting, rank, os.path.join(directory, "meeting"))
    # A rank that is killed at once would break the rendezvous of the others, which is not under test.
    wait_for_others(setting, rank, directory)
    try:
        run_job(setting, output_dir, notes, operations)
    except Exception as error:  # The test checks the survivor's error.
        notes.add("error", f"{type(error).__name__}: {error}")
        raise
    notes.add("operations", operations.seen)


def start_ranks(setting: Setting, directory: str, point: KillPoint | None) -> list[int]:
    return [
        fork(lambda rank=rank: rank_of_job(setting, rank, directory, point))  # type: ignore[misc]
        for rank in range(setting.world_size)
    ]


def fresh_start(setting: Setting, rank: int, directory: str, connection: Connection) -> None:
    """Restart the job as one rank in each received directory."""
    join_group(setting, rank, os.path.join(directory, "meeting"))
    while (output_dir := connection.recv()) is not None:
        try:
            connection.send(resume_in(setting, output_dir))
        except Exception as error:  # noqa: BLE001 - shown in the report
            connection.send({"error": f"{type(error).__name__}: {error}"})


def resume_in(setting: Setting, output_dir: str) -> dict[str, Any]:
    job = Job(output_dir, setting.limit, seed=1234, **setting.options)
    left_over = own_debris(output_dir)
    path = job.manager.load_checkpoint()
    assert path is not None, "there was a complete checkpoint before the kill"
    facts = {
        "step": store.step_of(path),
        "digest": job.digest(),
        "problems": store.verify_checkpoint(path) + lost_neighbours(setting, output_dir),
        "debris": left_over,
    }
    job.train()
    Peers.world().gather(None)
    facts["problems_of_next_save"] = store.verify_checkpoint(job.save())
    Peers.world().gather(None)
    job.manager.close()
    facts["debris_of_next_save"] = own_debris(output_dir)
    return facts


def add_neighbours(setting: Setting) -> None:
    """Add directories of other programs beside the checkpoints of a flat layout."""
    if setting.layout == IN_FOLDER:
        return
    for name, content in NEIGHBOURS.items():
        os.makedirs(os.path.dirname(os.path.join(setting.template, name)))
        with open(os.path.join(setting.template, name), "w") as file:
            file.write(content)


def lost_neighbours(setting: Setting, output_dir: str) -> list[str]:
    names = [] if setting.layout == IN_FOLDER else list(NEIGHBOURS)
    return [f"{name} was touched" for name in names if not _has(os.path.join(output_dir, name), NEIGHBOURS[name])]


def _has(path: str, content: str) -> bool:
    if not os.path.exists(path):
        return False
    with open(path) as file:
        return file.read() == content


def own_debris(output_dir: str) -> list[str]:
    return [name for name in debris(output_dir) if name not in map(os.path.dirname, NEIGHBOURS)]


def misleading_names(root: str) -> list[str]:
    """Return directories that look like a checkpoint to get_last_checkpoint of transformers, and are incomplete."""
    names = [name for name in os.listdir(root) if LAST_CHECKPOINT.search(name)]
    others = list(map(os.path.dirname, NEIGHBOURS))
    return [name for name in names if name not in others and not store.is_complete(os.path.join(root, name))]


class Restarts:
    """Ranks that resume any directory sent to them."""

    def __init__(self, setting: Setting, directory: str) -> None:
        os.makedirs(directory)
        pairs = [Pipe() for _ in range(setting.world_size)]
        self._connections = [ours for ours, _ in pairs]
        self._children = [
            fork(lambda rank=rank: fresh_start(setting, rank, directory, pairs[rank][1]))  # type: ignore[misc]
            for rank in range(setting.world_size)
        ]

    def resume(self, output_dir: str) -> list[dict[str, Any]]:
        for connection in self._connections:
            connection.send(output_dir)
        return [connection.recv() if connection.poll(60) else {"error": "hangs"} for connection in self._connections]

    def close(self) -> None:
        for connection in self._connections:
            connection.send(None)
        wait_for(self._children)


def try_point(setting: Setting, restarts: Restarts, point: KillPoint) -> Outcome:
    with tempfile.TemporaryDirectory(dir=setting.directory) as directory:
        output_dir = os.path.join(directory, "output")
        shutil.copytree(setting.template, output_dir)
        codes, seconds = wait_for(start_ranks(setting, directory, point))
        errors = [error for rank in range(setting.world_size) for error in read_notes(directory, rank, "error")]
        root = checkpoints_root(output_dir, setting.layout)
        visible = sorted(os.listdir(root))
        return Outcome(
            point=point,
            exit_codes=codes,
            survivor_seconds=seconds,
            survivor_error=errors[0] if errors else "",
            saved=read_notes(directory, point.rank, "saved"),
            visible=[name for name in visible if not name.startswith(".")],
            misleading=misleading_names(root),
            restart=restarts.resume(output_dir),
        )


def try_until_reached(setting: Setting, restarts: Restarts, point: KillPoint) -> Outcome:
    """Try a point again if another rank won the race to create a directory."""
    for _ in range(NUM_TRIES):
        outcome = try_point(setting, restarts, point)
        if any(outcome.exit_codes):
            break
    return outcome


def run_lane(setting: Setting, points: Sequence[KillPoint], number: int) -> None:
    restarts = Restarts(setting, os.path.join(setting.directory, f"restarts{number}"))
    outcomes = [try_until_reached(setting, restarts, point) for point in points]
    restarts.close()
    with open(os.path.join(setting.directory, f"lane{number}.json"), "w") as file:
        json.dump([asdict(outcome) for outcome in outcomes], file)


def make_template(setting: Setting) -> dict[str, list[str]]:
    """Write the template directory, and return the digest of each rank for each saved step."""
    directory = os.path.join(setting.directory, "preparation")
    os.makedirs(directory)

    def rank_of_preparation(rank: int) -> None:
        join_group(setting, rank, os.path.join(directory, "meeting"))
        prepare(setting, Notes(directory, rank))

    codes, _ = wait_for([fork(lambda rank=rank: rank_of_preparation(rank)) for rank in range(setting.world_size)])  # type: ignore[misc]
    assert codes == [0] * setting.world_size, codes
    add_neighbours(setting)
    return read_digests(setting, directory)


def read_digests(setting: Setting, directory: str) -> dict[str, list[str]]:
    by_rank = [dict(read_notes(directory, rank, "digest")) for rank in range(setting.world_size)]
    return {name: [digests[name] for digests in by_rank] for name in by_rank[0]}


def dry_run(setting: Setting) -> tuple[list[KillPoint], dict[str, list[str]]]:
    """Return all kill points, and the digests of the states that a run without a kill saves."""
    directory = os.path.join(setting.directory, "dry")
    shutil.copytree(setting.template, os.path.join(directory, "output"))
    codes, _ = wait_for(start_ranks(setting, directory, None))
    assert codes == [0] * setting.world_size, codes
    points = []
    for rank in range(setting.world_size):
        for operation in read_notes(directory, rank, "operations")[0]:
            points.append(KillPoint(rank, operation, BEFORE))
            if operation.split()[0] in KINDS_WITH_AFTER:
                points.append(KillPoint(rank, operation, AFTER))
    return points, read_digests(setting, directory)


def main(world_size: str, variant: str, directory: str, report_path: str, every: str = "1") -> None:
    layout, variant = (IN_OUTPUT_DIR if variant.startswith("flat-") else IN_FOLDER), variant.removeprefix("flat-")
    is_sharded, in_background = variant.endswith("sharded"), variant.startswith("background")
    setting = Setting(int(world_size), variant != "renames", directory, is_sharded, in_background, layout)
    torch.set_num_threads(1)
    warm_up()
    digests = make_template(setting)
    points, later_digests = dry_run(setting)
    if not setting.has_exchange:
        # The rest of the job is the same as with the atomic exchange.
        points = points_of_replacement(points)
    points = sampled(points, int(every))
    lanes = [
        fork(lambda number=number: run_lane(setting, points[number::NUM_LANES], number))  # type: ignore[misc]
        for number in range(NUM_LANES)
    ]
    codes, _ = wait_for(lanes, limit=120.0)
    assert codes == [0] * NUM_LANES, codes
    outcomes = []
    for number in range(NUM_LANES):
        with open(os.path.join(directory, f"lane{number}.json")) as file:
            outcomes += json.load(file)
    with open(report_path, "w") as file:
        json.dump({"digests": {**digests, **later_digests}, "outcomes": outcomes}, file)


def sampled(points: Sequence[KillPoint], every: int) -> list[KillPoint]:
    """Return every nth point, and the first point of each kind on each rank."""
    kinds: set[tuple[int, str, str]] = set()
    chosen = []
    for number, point in enumerate(points):
        kind = (point.rank, point.operation.split()[0], point.when)
        if number % every == 0 or kind not in kinds:
            chosen.append(point)
        kinds.add(kind)
    return chosen


def points_of_replacement(points: Sequence[KillPoint]) -> list[KillPoint]:
    """Return the points of the committing rank from the last manifest on."""
    of_committer = [point for point in points if point.rank == 0]
    manifests = [
        number
        for number, point in enumerate(of_committer)
        if point.operation.startswith("create") and "checkpoint_manifest.json" in point.operation
    ]
    return of_committer[manifests[-1] :]


if __name__ == "__main__":
    main(*sys.argv[1:])
