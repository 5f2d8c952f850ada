"""Modification of a checkpoint: a new, complete checkpoint with changed settings, state or components.

The original is verified first and never changed. The new checkpoint is committed by the store's transaction. Large
unchanged files become hard links, or copies where the file system has none.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forgather.config import yaml_reader
from forgather.config.errors import UsageError
from forgather.config.parser import ConfigurationParser, Option, to_dict, trainer_kind
from forgather.config.yaml_reader import CONFIG_NAME
from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.components import MODEL_KEY
from forgather.ml.checkpoint.encoding.codec import encode_state
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointSaveError
from forgather.ml.checkpoint.files import durable
from forgather.ml.checkpoint.files.hashed_io import HashingWriter
from forgather.ml.checkpoint.files.layout import CHECKPOINT_PREFIX
from forgather.ml.checkpoint.files.planned_file import PlannedFile, RawContent, StateContent
from forgather.ml.checkpoint.files.regular_files import open_regular, path_inside
from forgather.ml.checkpoint.files.state_files import read_state
from forgather.ml.checkpoint.foreign.ownership import require_own
from forgather.ml.checkpoint.manifest import CheckpointManifest, ComponentManifest, FileRecord, utc_now
from forgather.ml.checkpoint.output_lock import OutputDirLock
from forgather.tools.checkpoints import edits
from forgather.tools.checkpoints.edits import Change, ModificationError
from forgather.tools.checkpoints.listing import output_dir_of
from forgather.tools.checkpoints.paths import find_checkpoint
from forgather.tools.checkpoints.stored_state import is_optimizer_state

OPTIMIZER, SCHEDULER = "optimizer", "scheduler"
_RATE = "lr"
# Arguments that are also options of the optimizer's groups.
_OPTIONS_OF_ARGUMENTS = {"args.learning_rate": _RATE, "args.weight_decay": "weight_decay"}
_LINKED_FROM = 2**20
"""Smaller files are copied, because users may edit them in place."""
_COPY_BYTES = 8 * 2**20

_IN_CONFIGURATION = "used by a run that is started with this checkpoint's config.yaml; other configurations win"
_AT_RESUME = "restored at resume"
_UNLESS_CONFIGURED = "restored at resume, unless the resumed run configures another value than the saving run"


@dataclass(frozen=True)
class Modification:
    """A modified checkpoint: where it is, what changed, and how its files were made."""

    source: str
    path: str
    changes: Sequence[Change]
    is_auto_resumed: bool
    """Whether auto-resume of the run takes it: it lies beside the original, and is the newest."""
    linked_bytes: int = 0
    copied_bytes: int = 0
    written_bytes: int = 0


def modify_checkpoint(
    path: str,
    output: str | None = None,
    *,
    settings: Sequence[tuple[str, str]] = (),
    scales: Sequence[tuple[str, str]] = (),
    drops: Sequence[str] = (),
    note_bytes: Callable[[int], None] | None = None,
) -> Modification:
    """Write a changed copy of a checkpoint, or of the newest checkpoint of a run; return its path and the changes.

    `settings` are keys and YAML values: `args.*` or `config.*` for the stored configuration, `optimizer.*` for options
    of all parameter groups, `<component>.*` for values of other components. `scales` multiplies numbers of the
    components. `drops` leaves components out. `output` is a new directory; by default `<name>-modified` beside the
    original. Raise `ModificationError` for changes that do not fit, `CheckpointCorruptError` for a damaged original.
    """
    if not (settings or scales or drops):
        raise ModificationError("Nothing to change: pass --set, --scale or --drop.")
    source = find_checkpoint(path)
    require_own(source)
    found = store.open_checkpoint(source)
    target = os.path.abspath(output or _free_name(source))
    if os.path.lexists(target):
        raise ModificationError(f"{target} exists already. Nothing is overwritten: choose another --output.")
    if not os.path.isdir(parent := os.path.dirname(target)):
        raise ModificationError(
            f"{target} cannot be created: there is no directory {parent}. Create it, or choose another --output."
        )
    edit = _Edit(found)
    for key, text in settings:
        edit.set(key, text)
    for key, text in scales:
        edit.scale(key, edits.number_of(key, text))
    for key in drops:
        edit.drop(key)
    is_beside = os.path.dirname(os.path.realpath(target)) == os.path.dirname(os.path.realpath(source))
    with _locked(output_dir_of(source)) if is_beside else contextlib.nullcontext():
        _refuse_damage(source, note_bytes)
        return _Copy(found, target, edit).write(is_beside)


def _free_name(source: str) -> str:
    folder, name = os.path.split(os.path.abspath(source))
    # Without the prefix, a run with the flat layout would not find it.
    name = name if name.startswith(CHECKPOINT_PREFIX) else f"{CHECKPOINT_PREFIX}{name}"
    candidates = (f"{name}-modified{'' if number == 1 else f'-{number}'}" for number in range(1, 10**6))
    return next(path for path in (os.path.join(folder, one) for one in candidates) if not os.path.lexists(path))


@contextlib.contextmanager
def _locked(output_dir: str) -> Iterator[None]:
    """Lock the run: a starting job would remove the temporary directory, and a running one could delete the original."""
    lock = OutputDirLock(output_dir)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _refuse_damage(source: str, note_bytes: Callable[[int], None] | None) -> None:
    problems = store.verify_checkpoint(source, note_bytes)
    if problems:
        raise CheckpointCorruptError(f"{source} is damaged, so nothing was written: {problems[0]}")


class _Edit:
    """Changes of one checkpoint in memory: states of changed files, changed configuration, and dropped components."""

    def __init__(self, found: store.FoundCheckpoint) -> None:
        self._path, self.manifest = found.path, found.manifest
        self._missing = set(found.missing_optional)
        self.states: dict[str, Any] = {}
        """Changed state by file."""
        self.configuration: ConfigurationParser | None = None
        self.dropped: list[str] = []
        self.changes: list[Change] = []

    # --- requests

    def set(self, key: str, text: str) -> None:
        section, _, rest = key.partition(".")
        if section in ("args", "config") and rest:
            self._set_configuration(key.removeprefix("config."), text)
        elif section == OPTIMIZER and rest == _RATE:
            rate = edits.fitting(key, 0.0, yaml_reader.load_value(text))
            self._change_rates(key, lambda _: float(rate))  # type: ignore[arg-type]
        else:
            value = yaml_reader.load_value(text)
            self._change(key, lambda old: edits.fitting(key, old, value))

    def scale(self, key: str, factor: float) -> None:
        if key == f"{OPTIMIZER}.{_RATE}":
            self._change_rates(key, lambda base: base * factor)
        else:
            self._change(key, lambda old: edits.scaled(key, old, factor))

    def drop(self, key: str) -> None:
        component = self._component(key)
        if key == MODEL_KEY or component.required:
            raise ModificationError(f"{key!r} cannot be dropped: a resume needs it.")
        self.dropped.append(key)
        self.changes.append(Change(key, "saved state", None, "starts fresh at resume"))

    # --- configuration

    def _set_configuration(self, key: str, text: str) -> None:
        parser = self.configuration or self._parser()
        before = _lookup(to_dict(parser.configuration()), key)
        try:
            parser.override(Option(key, text))
            after = _lookup(to_dict(parser.configuration()), key)
        except UsageError as error:
            raise ModificationError(str(error).replace("on the command line: ", "").replace("'--", "'")) from None
        self.configuration = parser
        self.changes.append(Change(key, before, after, _IN_CONFIGURATION))
        option = _OPTIONS_OF_ARGUMENTS.get(key)
        if option is not None and OPTIMIZER in self.manifest.components and before != after:
            self._follow_argument(option, before, after)

    def _parser(self) -> ConfigurationParser:
        path = os.path.join(self._path, CONFIG_NAME)
        if not any(record.path == CONFIG_NAME for record in self.manifest.files) or not os.path.isfile(path):
            raise ModificationError(
                f"{self._path} has no {CONFIG_NAME}: the run was started from Python, and its arguments are in that "
                "program. Options of the optimizer can be changed, as in --set optimizer.lr=1e-4."
            )
        parser = ConfigurationParser(trainer_kind(path, []))
        parser.read_file(path)
        return parser

    def _follow_argument(self, option: str, before: object, after: object) -> None:
        """Change groups that have the argument's old value too, so that a run with unchanged settings follows."""
        if not isinstance(before, (int, float)) or not isinstance(after, (int, float)):
            return
        old, new = float(before), float(after)
        if option == _RATE:
            self._change_rates(f"{OPTIMIZER}.{option}", lambda base: new if base == old else base)
        else:
            self._change(f"{OPTIMIZER}.{option}", lambda value: new if value == old else value)

    # --- state

    def _change_rates(self, key: str, new_rate: edits.NewRate) -> None:
        states = self._optimizer_states(key)
        groups = [group for state in states for group in state["param_groups"]]
        before, after = edits.change_rates(groups, new_rate)
        self.changes.append(Change(key, before, after, _UNLESS_CONFIGURED))
        if SCHEDULER in self.manifest.components:
            for state in self._states_of(SCHEDULER):
                edits.change_schedule(state, new_rate)
            self.changes.append(Change(f"{SCHEDULER}.base_lrs", before, after, "follows the optimizer at resume"))

    def _change(self, key: str, new: Callable[[object], object]) -> None:
        component, _, rest = key.partition(".")
        if not rest:
            raise ModificationError(
                f"{key!r} is not a value: give a key such as {component}.KEY, args.KEY or optimizer.lr."
            )
        if component == OPTIMIZER and "." not in rest:
            groups = [group for state in self._optimizer_states(key) for group in state["param_groups"]]
            before, after = edits.change_option(groups, rest, key, new)
            self.changes.append(Change(key, before, after, _UNLESS_CONFIGURED))
            return
        values = [edits.change_value(state, rest.split("."), key, new) for state in self._states_of(component)]
        self.changes.append(Change(key, *values[0], _AT_RESUME))

    def _optimizer_states(self, key: str) -> list[Any]:
        states = self._states_of(OPTIMIZER)
        if not all(map(is_optimizer_state, states)):
            raise ModificationError(f"{key}: the optimizer of {self._path} has no parameter groups by name.")
        return states

    def _states_of(self, key: str) -> list[Any]:
        """Return the states in all files of a component, read once, to be changed in place."""
        self._component(key)
        records = [
            one
            for one in self.manifest.component_files(key)
            if one.path.endswith(".pt") and one.path not in self._missing
        ]
        if not records:
            raise ModificationError(f"The component {key!r} has no state file that can be changed.")
        for record in records:
            if record.path not in self.states:
                # Mapped: the moments stay on disk until they are written to the new file.
                self.states[record.path] = read_state(path_inside(self._path, record.path), record, mapped=True)
        return [self.states[record.path] for record in records]

    def _component(self, key: str) -> ComponentManifest:
        if key not in self.manifest.components:
            raise ModificationError(
                f"{self._path} has no component {key!r}. Its components are {', '.join(self.manifest.components)}; "
                "settings of the run begin with args. or config."
            )
        return self.manifest.components[key]


def _lookup(content: Mapping[str, Any], key: str) -> object:
    value: object = content
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


@dataclass
class _Copy:
    """The new checkpoint while it is written."""

    found: store.FoundCheckpoint
    target: str
    edit: _Edit
    linked_bytes: int = 0
    copied_bytes: int = 0
    written_bytes: int = 0
    records: list[FileRecord] = field(default_factory=list)

    def write(self, is_beside: bool) -> Modification:
        transaction = store.Transaction(self.target, store.new_attempt())
        needed = sum(record.size for record in self.found.manifest.files)
        with transaction.accounting_for(needed):
            transaction.begin(needed)
            try:
                self._write_files(transaction.temporary_path)
                transaction.commit(self._manifest(transaction.attempt))
            # KeyboardInterrupt included: the temporary directory may be as large as the checkpoint.
            except BaseException:
                transaction.roll_back()
                raise
        return Modification(
            self.found.path,
            self.target,
            self.edit.changes,
            is_beside,
            self.linked_bytes,
            self.copied_bytes,
            self.written_bytes,
        )

    def _write_files(self, folder: str) -> None:
        for record in self.found.manifest.files:
            if record.component in self.edit.dropped or record.path in self.found.missing_optional:
                continue
            planned = self._planned(record)
            if planned is not None:
                new = planned.write(folder, record.writer_rank)
                self.written_bytes += new.size
                self.records.append(new)
            else:
                self.records.append(self._taken_over(folder, record))

    def _planned(self, record: FileRecord) -> PlannedFile | None:
        """Return the new content of a changed file; None for an unchanged file."""
        make = functools.partial(
            PlannedFile, record.path, record.component, owner=record.owner, owner_ranks=record.owner_ranks
        )
        if record.path in self.edit.states:
            return make(content=StateContent(encode_state(self.edit.states[record.path], record.component)))
        if record.path == CONFIG_NAME and self.edit.configuration is not None:
            text = yaml_reader.dump(to_dict(self.edit.configuration.configuration()))
            return make(content=RawContent(text.encode()))
        return None

    def _taken_over(self, folder: str, record: FileRecord) -> FileRecord:
        source, target = path_inside(self.found.path, record.path), os.path.join(folder, record.path)
        durable.make_parents_below(folder, record.path)
        if record.size >= _LINKED_FROM and record.path not in store.EDITABLE_FILES and _link(source, target):
            self.linked_bytes += record.size
            return record
        size, checksum = _copy(source, target)
        self.copied_bytes += size
        if record.path in store.EDITABLE_FILES:
            return replace(record, size=size, checksum=checksum)
        if checksum != record.checksum:
            raise CheckpointSaveError(f"{source} changed while it was copied, so nothing was written. Try again.")
        return record

    def _manifest(self, attempt: str) -> CheckpointManifest:
        manifest = self.found.manifest
        components = {key: one for key, one in manifest.components.items() if key not in self.edit.dropped}
        note = {
            "modified_from": os.path.basename(os.path.normpath(self.found.path)),
            "changes": [f"{one.key}: {one.before} -> {one.after}" for one in self.edit.changes],
        }
        return replace(
            manifest,
            checkpoint_path=self.target,
            timestamp=utc_now(),
            components={key: self._component(one) for key, one in components.items()},
            metadata={**manifest.metadata, **note},
            attempt=attempt,
            step=self._step(),
            files=self.records,
        )

    def _component(self, component: ComponentManifest) -> ComponentManifest:
        files = [record for record in self.records if record.component == component.key]
        checksum = files[0].checksum if len(files) == 1 else None
        return replace(component, size_bytes=sum(record.size for record in files), checksum=checksum)

    def _step(self) -> int | None:
        """Return the step of the manifest, which follows a changed step of the trainer."""
        for record in self.found.manifest.component_files("trainer"):
            state = self.edit.states.get(record.path)
            step = _lookup(state, "state.global_step") if isinstance(state, Mapping) else None
            if isinstance(step, int):
                return step
        return self.found.manifest.step


def _link(source: str, target: str) -> bool:
    """Make a hard link; return False where that is impossible: another file system, or a file of another user."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        return False
    return True


def _copy(source: str, target: str) -> tuple[int, str]:
    """Copy a file in parts; return the size and the checksum of the copy."""
    with open(open_regular(source), "rb") as file, HashingWriter(target) as writer:
        while part := file.read(_COPY_BYTES):
            writer.write(part)
    return writer.size, writer.checksum
