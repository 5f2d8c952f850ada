"""Fuzz runner: mutates a copy of a checkpoint, loads it in a forked child, and judges the result."""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from forgather.ml.checkpoint.errors import CheckpointError, CheckpointVersionError, release_locals
from tests.guarantees.hostile_checkpoints.fuzz import limits
from tests.guarantees.hostile_checkpoints.fuzz.mutations import Mutation
from tests.guarantees.hostile_checkpoints.fuzz.place import MANIFEST, METADATA, Place
from tests.guarantees.hostile_checkpoints.fuzz.sealing import seal
from tests.guarantees.hostile_checkpoints.fuzz.subjects import SUBJECTS, Resumed, Subject, draw
from tests.support.warm_up import get_ready_to_fork

EQUAL, DATA, REFUSED = "equal", "other data", "refused"
GOOD = (EQUAL, DATA, REFUSED)
# Ordered by severity.
BAD = (
    "code ran",
    "outside touched",
    "crashed",
    "hung",
    "memory",
    "wrong error",
    "unnamed",
    "accepted",
    "no fallback",
    "no save",
    "not built",
)
_NO_MEMORY = ("MemoryError", "can't allocate memory", "Cannot allocate memory", "bad_alloc", "Unable to allocate")
_NEWEST, _OLDER = "checkpoint-2", "checkpoint-1"


@dataclass
class Result:
    """Outcome of a child: its own report, or its crash or time-out."""

    outcome: str
    detail: str = ""
    where: str = ""
    """Innermost line of the library in the traceback."""
    seconds: float = 0.0
    peak_bytes: int = 0
    """Peak address space beyond the child's start."""

    @property
    def is_good(self) -> bool:
        return self.outcome in GOOD


@dataclass(frozen=True)
class Pristine:
    """Untouched output directory of a subject, with the state of its two checkpoints."""

    subject: Subject
    output_dir: Path
    newest: dict[str, str]
    older: dict[str, str]
    fresh: dict[str, str]
    file_names: list[str]


@dataclass
class Fuzzer:
    """Fuzzer that keeps pristine directories and tries mutations on copies."""

    scratch: Path
    is_verbose: bool = False
    pristine: dict[str, Pristine] = field(default_factory=dict)
    num_retries: int = 0

    def prepare(self) -> None:
        """Write all checkpoints, and prepare this process for forking."""
        torch.set_num_threads(1)
        self.outside.mkdir(parents=True)
        torch.save({"sentinel": torch.ones(4)}, self.outside / "sentinel.pt")
        for subject in SUBJECTS.values():
            self.pristine[subject.name] = self._write(subject)
        self._remember()
        get_ready_to_fork()

    def _remember(self) -> None:
        self._sentinel, self._originals = tree_of(self.outside), tree_of(self.scratch / "pristine")

    @property
    def is_pristine(self) -> bool:
        """Whether the directories that are copied for each example are unchanged."""
        return tree_of(self.scratch / "pristine") == self._originals

    @property
    def outside(self) -> Path:
        return self.scratch / "outside"

    @property
    def marker(self) -> Path:
        return self.scratch / "marker"

    @property
    def output_dir(self) -> Path:
        """Constant path, so that paths in states are equal."""
        return self.scratch / "work" / "output"

    @property
    def file_names(self) -> dict[str, list[str]]:
        return {name: pristine.file_names for name, pristine in self.pristine.items()}

    def _write(self, subject: Subject) -> Pristine:
        shutil.rmtree(self.output_dir, ignore_errors=True)
        subject.write(self.output_dir)
        checkpoints = self.output_dir / "checkpoints"
        kept = Path(shutil.copytree(self.output_dir, self.scratch / "pristine" / subject.name))
        newest, older = (self._parts(subject, str(checkpoints / name)) for name in (_NEWEST, _OLDER))
        names = sorted(path.name for path in (checkpoints / _NEWEST).iterdir())
        return Pristine(subject, kept, newest, older, self._parts(subject, None), names)

    def _parts(self, subject: Subject, path: str | None) -> dict[str, str]:
        """Return the state after a load, or the state of a fresh job if `path` is None."""
        directory = self.output_dir if path else self.scratch / "work" / "empty"
        job = subject.build(directory)
        job.load(path)
        return job.parts()

    def run(self, mutation: Mutation, checks_resume: bool) -> Result:
        """Try one mutation."""
        place = self.set_up(mutation)
        try:
            is_data = mutation.apply(place)
            if mutation.is_sealed:
                seal(place.checkpoint, place.name)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not cost the results of all others
            return Result("not built", _described(error), "".join(traceback.format_tb(error.__traceback__)[-1:]))
        pristine = self.pristine[mutation.subject]
        allowed = _Allowed(pristine, mutation, is_data)
        result = self.in_child(lambda: _attempt(self, allowed, checks_resume))
        if result.outcome == "hung":
            # The machine may have stalled, so a hung example gets a second attempt.
            self.num_retries += 1
            result = self.in_child(lambda: _attempt(self, allowed, checks_resume))
        return self.look_around(result)

    def set_up(self, mutation: Mutation) -> Place:
        shutil.rmtree(self.output_dir, ignore_errors=True)
        shutil.copytree(self.pristine[mutation.subject].output_dir, self.output_dir)
        checkpoint = self.output_dir / "checkpoints" / _NEWEST
        return Place(checkpoint, mutation.target, self.marker, self.outside)

    def in_child(self, work: Callable[[], Result], seconds: float = limits.WALL_SECONDS) -> Result:
        """Run `work` in a forked child, and return its report or how it ended."""
        reader, writer = os.pipe()
        file_bytes = limits.tree_bytes(self.output_dir)
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _be_child(work, writer, file_bytes, self.is_verbose)
        os.close(writer)
        code, is_late = limits.wait_or_kill(child, seconds)
        with open(reader, "rb") as file:
            os.set_blocking(reader, False)
            said = file.read() or b""
        result = _judge(code, is_late, said)
        result.seconds = time.monotonic() - started
        return result

    def look_around(self, result: Result) -> Result:
        """Override the child's report if code ran or a file outside of the checkpoint changed."""
        if self.marker.exists():
            self.marker.unlink()
            return Result("code ran", result.detail, result.where, result.seconds)
        if tree_of(self.outside) != self._sentinel:
            self._remember()
            return Result("outside touched", result.detail, result.where, result.seconds)
        return result


def tree_of(directory: Path) -> list[tuple[str, int, bytes]]:
    """Return all files with modification time and content."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return [(str(path), path.stat().st_mtime_ns, path.read_bytes()) for path in found]


@dataclass(frozen=True)
class _Allowed:
    """States that a mutated checkpoint may load as."""

    pristine: Pristine
    mutation: Mutation
    is_data: bool

    @property
    def takes_any_data(self) -> bool:
        """Whether any loaded value is fine. Unsealed changes never are, because the checksum detects them."""
        target = self.mutation.target
        is_users = target.startswith(tuple(f"{key}_state" for key in self.pristine.subject.user_components))
        # An EMA missing from the checkpoint starts from the weights, with a warning: models may gain parameters.
        lacks_average = target == "ema_state.pt" and (
            self.mutation.kind in ("state.remove", "state.rename") or self.mutation.arguments.get("way") == "missing"
        )
        # A checkpoint from before the first step has None for the loss and the metrics.
        is_unknown_yet = target == "trainer_state.pt" and self.mutation.arguments.get("value") == "none"
        is_data = self.is_data or is_users or lacks_average or is_unknown_yet
        return self.mutation.is_sealed and is_data and target != MANIFEST

    @property
    def may_begin_anew(self) -> bool:
        """Whether optional parts may start fresh, because the manifest, a file or an entry lacks them."""
        kind, target = self.mutation.kind, self.mutation.target
        removes = kind == "json.remove" or self.mutation.arguments.get("way") == "missing"
        # Another JSON object is metadata without any known entries.
        is_empty = target == METADATA and kind in ("json.text", "file.exchange")
        return target == MANIFEST or removes or is_empty

    def difference(self, parts: Mapping[str, str]) -> list[str]:
        """Return the parts of a state that neither equal the saved ones nor may start fresh."""
        wanted, fresh = self.pristine.newest, self.pristine.fresh
        anew = self.pristine.subject.optional if self.may_begin_anew else frozenset()
        return [
            name
            for name, value in parts.items()
            if value != wanted[name] and not (name in anew and (value == fresh[name] or name == "rng"))
        ]


def _attempt(fuzzer: Fuzzer, allowed: _Allowed, checks_resume: bool) -> Result:
    """Load by path and, if requested, auto-resume and save. Runs in the child."""
    subject = allowed.pristine.subject
    path = str(fuzzer.output_dir / "checkpoints" / _NEWEST)
    job = subject.build(fuzzer.output_dir)
    error: BaseException | None = None
    try:
        job.load(path)
    except BaseException as raised:  # noqa: BLE001 - which one it is, is what this is about
        error = raised
        release_locals(error)
    result = _judge_load(job, error, allowed, path)
    if checks_resume and result.outcome in (EQUAL, REFUSED):
        return _resume(fuzzer, allowed, error) or result
    return result


def _judge_load(job: Resumed, error: BaseException | None, allowed: _Allowed, path: str) -> Result:
    if error is not None:
        return judge_error(error, allowed.mutation.target, path)
    if allowed.takes_any_data:
        draw()
        return Result(DATA)
    try:
        different = allowed.difference(job.parts())
        draw()
    except Exception as odd:  # noqa: BLE001 - a state that cannot even be looked at is another one
        return Result("accepted", f"cannot be read: {_described(odd)}", _where(odd))
    return Result("accepted", f"other than saved: {', '.join(different)}") if different else Result(EQUAL)


def judge_error(error: BaseException, name: str, path: str) -> Result:
    text = _described(error)
    if _is_about_memory(error):
        return Result("memory", text, _where(error))
    if not isinstance(error, CheckpointError):
        return Result("wrong error", text, _where(error))
    if name not in str(error) and path not in str(error):
        return Result("unnamed", text, _where(error))
    return Result(REFUSED, text, _where(error))


def _resume(fuzzer: Fuzzer, allowed: _Allowed, refusal: BaseException | None) -> Result | None:
    """Auto-resume and save; return a failure, or None if damage fell back to the older checkpoint."""
    limits.limit_memory(limits.tree_bytes(fuzzer.output_dir), num_checkpoints=2)
    job = allowed.pristine.subject.build(fuzzer.output_dir)
    try:
        loaded = job.load(None)
    except BaseException as error:  # noqa: BLE001 - judged here
        # A misfit is an error of the job and not of the checkpoint, so no older checkpoint is tried.
        stops = isinstance(refusal, CheckpointVersionError) or (
            isinstance(refusal, CheckpointError) and refusal.is_misfit
        )
        if stops and isinstance(error, CheckpointError):
            return None
        return Result("no fallback", _described(error), _where(error))
    parts = job.parts()
    is_older = parts == allowed.pristine.older
    if refusal is not None and not is_older:
        return Result("no fallback", f"loaded {loaded} after {_described(refusal)}", _where(refusal))
    if not is_older and allowed.difference(parts):
        return Result("accepted", f"{loaded} by auto-resume: {', '.join(allowed.difference(parts))}")
    try:
        job.save()
    except BaseException as error:  # noqa: BLE001 - judged here
        return Result("no save", _described(error), _where(error))
    return None


def _be_child(work: Callable[[], Result], writer: int, file_bytes: int, is_verbose: bool) -> None:
    """Run `work`, write its result to the pipe, and exit. Never returns."""
    if not is_verbose:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, sys.stdout.fileno())
        os.dup2(nowhere, sys.stderr.fileno())
    try:
        before = limits.address_space()
        limits.limit_myself(file_bytes)
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - the parent is told
            result = Result("memory" if _is_about_memory(error) else "wrong error", _described(error), _where(error))
            if is_verbose:
                traceback.print_exc()
        limits.lift_memory_limit()
        result.peak_bytes = limits.peak_address_space() - before
        os.write(writer, json.dumps(asdict(result)).encode())
    finally:
        os._exit(0)


def _judge(code: int, is_late: bool, said: bytes) -> Result:
    if is_late or code == -signal.SIGXCPU:
        return Result("hung", f"took more than {limits.WALL_SECONDS:g} s")
    if code < 0:
        return Result("crashed", signal.Signals(-code).name)
    if not said:
        return Result("crashed", f"ended with {code} and without a word")
    return Result(**json.loads(said))


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _is_about_memory(error: BaseException) -> bool:
    return any(isinstance(one, MemoryError) or any(word in str(one) for word in _NO_MEMORY) for one in _chain(error))


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"


def _where(error: BaseException) -> str:
    """Return the innermost line of the library in the innermost error."""
    for one in reversed(_chain(error)):
        frames = [frame for frame in traceback.extract_tb(one.__traceback__) if "/forgather/" in frame.filename]
        if frames:
            return f"{frames[-1].filename.rpartition('/forgather/')[2]}:{frames[-1].lineno}"
    return ""
