"""Loading a checkpoint: which files this rank reads, also when the job has another shape than the one that saved."""

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.components import StateComponent, select_components
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError, naming
from forgather.ml.checkpoint.files.state_files import read_state, verify_file
from forgather.ml.checkpoint.manifest import CheckpointManifest, ComponentManifest, FileRecord
from forgather.ml.checkpoint.rank_layout import RankLayout
from forgather.ml.checkpoint.sharing import ComponentSharing
from forgather.ml.checkpoint.snapshot import METADATA_COMPONENT, MODEL_KEY
from forgather.ml.checkpoint.weights.module_weights import get_all_fqns, load_into_modules, locate_weights
from forgather.ml.distributed import Peers

logger = logging.getLogger(__name__)

RNG_KEY = "rng"
_READ_BY_COMPONENTS = (".pt", ".safetensors", ".bin")


class CheckpointReader:
    """One load of one checkpoint, on every rank alike.

    Phases, each of which all ranks finish before the next begins: the checkpoint is complete and the same everywhere;
    every state file is read and verified; the weights are read into the model; components take their states, random
    numbers last. So nothing is changed by a checkpoint whose state is unreadable, or does not fit this job's ranks.
    """

    def __init__(
        self,
        path: str,
        components: Sequence[StateComponent],
        model_parts: Sequence[nn.Module],
        layout: RankLayout,
        peers: Peers,
    ) -> None:
        self._path = path
        # Whatever a component draws while it takes its state, the random state has the last word.
        self._components = sorted(components, key=lambda component: component.key == RNG_KEY)
        self._model_parts = model_parts
        self._layout = layout
        self._peers = peers

    def load(self, strict: bool, skip: Collection[str]) -> None:
        """Collective. Every error names the checkpoint."""
        try:
            self._load(strict, skip)
        except CheckpointError as error:
            if self._path in str(error):
                raise
            named = type(error)(f"{error}\nThe checkpoint is {self._path}.")
            named.is_misfit, named.contact_lost = error.is_misfit, error.contact_lost
            raise named from error

    def _load(self, strict: bool, skip: Collection[str]) -> None:
        skipped = select_components(self._components, skip, "skip_checkpoint_components") if skip else []
        if skipped:
            logger.info("Not loaded from %s, as asked: %s", self._path, ", ".join(one.key for one in skipped))
        wanted = [component for component in self._components if component not in skipped]
        manifest = self._open()
        # Asked of all ranks at once, so that all of them take the same way.
        names = self._everywhere(
            lambda: [name for part in self._model_parts for name in get_all_fqns(part)], "naming the model's tensors"
        )
        weights = [one for one in wanted if one.key == MODEL_KEY and any(names)]
        states: dict[str, Any] = {}

        def read_states() -> None:
            self._verify_small_files(manifest)
            for component in wanted:
                if component not in weights:
                    self._read_component(component, manifest, states)

        self._everywhere(read_states, f"reading the state in {self._path}")
        if weights:
            self._load_weights(weights[0], manifest, strict, {name for part in names for name in part})
        for component in wanted:
            if component not in weights:
                self._everywhere(lambda one=component: self._apply(one, states), f"restoring {component.key!r}")  # type: ignore[misc]

    def _everywhere(self, work: Callable[[], Any], during: str) -> list[Any]:
        return on_every_rank(self._peers, work, during, CheckpointLoadError)

    def _open(self) -> CheckpointManifest:
        found: list[store.FoundCheckpoint] = []

        def open_here() -> str | None:
            found.append(store.open_checkpoint(self._path))
            return found[0].manifest.attempt

        attempts = set(self._everywhere(open_here, f"opening the checkpoint {self._path}"))
        if len(attempts) > 1:
            raise CheckpointLoadError.misfit(
                f"Ranks see different checkpoints at {self._path} (saves {sorted(map(str, attempts))}). With storage of its "
                "own each node must have the checkpoint of the same save; else all ranks must see one directory."
            )
        own = found[0]
        for name in own.missing_optional:
            logger.warning("%s is missing from %s: that part starts fresh.", name, self._path)
        return own.manifest

    def _verify_small_files(self, manifest: CheckpointManifest) -> None:
        """Configurations and metadata are read by others, later: one rank looks at them now."""
        if not self._layout.leads_storage:
            return
        for record in manifest.files:
            present = os.path.lexists(os.path.join(self._path, record.path))
            if not record.path.endswith(_READ_BY_COMPONENTS) and (present or record.component != METADATA_COMPONENT):
                verify_file(self._path, record)

    def _load_weights(
        self, component: StateComponent, manifest: CheckpointManifest, strict: bool, all_names: Collection[str]
    ) -> None:
        def load() -> None:
            saved = manifest.components.get(MODEL_KEY)
            if saved is None:
                raise _missing_component(component, self._path, "was saved without it")
            location = locate_weights(self._path, saved.metadata.get("param_sharing"))
            load_into_modules(location, self._model_parts, strict, all_names)

        self._everywhere(load, f"loading weights from {self._path}")

    def _read_component(self, component: StateComponent, manifest: CheckpointManifest, states: dict[str, Any]) -> None:
        saved = manifest.components.get(component.key)
        if saved is None:
            self._absent(component, "was saved without it")
            return
        records = self._records(component, saved, manifest)
        own = {record.path for record in records}
        others = [one for one in manifest.component_files(component.key) if one.path not in own]
        parts = self._read_files(component, records)
        with self._naming(records):
            is_divided = bool(parts and others and _has_missing_names(component, parts[0]))
        if parts and is_divided:
            # The same ranks as before, but the model is divided among them in another way.
            more = self._read_files(component, others)
            parts = None if more is None else parts + more
        if parts is None:
            return
        if not parts:
            states[component.key] = _NewRank(manifest.step or 0)
            return
        with self._naming(records):
            states[component.key] = self._joined(component, parts, manifest)

    def _joined(self, component: StateComponent, parts: Sequence[Any], manifest: CheckpointManifest) -> Any:
        """The one state that several files make, checked by the component before anything is applied."""
        stateful = component.stateful
        state = parts[0] if len(parts) == 1 else stateful.merge_state_dicts(parts)
        if hasattr(stateful, "add_tied_names") and MODEL_KEY in manifest.components:
            stateful.add_tied_names(state, manifest.components[MODEL_KEY].metadata.get("param_sharing", []))
        if hasattr(stateful, "check_state_dict"):
            stateful.check_state_dict(state)
        return state

    def _naming(self, records: Sequence[FileRecord]) -> contextlib.AbstractContextManager[None]:
        return naming(*(os.path.join(self._path, record.path) for record in records))

    def _read_files(self, component: StateComponent, records: Sequence[FileRecord]) -> list[Any] | None:
        """None, once that was reported, when one of them is not there."""
        for record in records:
            if not os.path.exists(os.path.join(self._path, record.path)):
                self._absent(component, f"has no file {record.path}")
                return None
        return [read_state(os.path.join(self._path, record.path), record) for record in records]

    def _absent(self, component: StateComponent, reason: str) -> None:
        if component.required:
            raise _missing_component(component, self._path, reason)
        logger.warning("Component %r starts fresh: %s %s.", component.key, self._path, reason)

    def _records(
        self, component: StateComponent, saved: ComponentManifest, manifest: CheckpointManifest
    ) -> list[FileRecord]:
        """The files from which this rank's state is made; none for a rank that is new to a state which each rank has."""
        records = manifest.component_files(component.key)
        if len(records) == 1 and records[0].owner is None:
            return records
        rank = self._layout.rank
        then = sorted(tuple(record.owner_ranks) for record in records)
        now = sorted(owner.ranks for owner in ComponentSharing(component, self._layout).owners)
        own = [record for record in records if rank in record.owner_ranks]
        # A node's own copy of a checkpoint lists only what its ranks need.
        if own and (then == now or (set(then) < set(now) and manifest.world_size == self._layout.world_size)):
            return own
        covered = {member for record in records for member in record.owner_ranks}
        if hasattr(component.stateful, "init_new_rank"):
            return own
        if covered != set(range(manifest.world_size)):
            raise self._misfit(component, saved, manifest, "this node's copy of the checkpoint holds only a part of it")
        if hasattr(component.stateful, "merge_state_dicts"):
            return records
        # One state does for one copy; copies that are meant to differ cannot all begin with it.
        if len(records) == 1 and len(now) == 1:
            return records
        raise self._misfit(component, saved, manifest, "its state cannot be divided anew")

    def _misfit(
        self, component: StateComponent, saved: ComponentManifest, manifest: CheckpointManifest, reason: str
    ) -> CheckpointLoadError:
        remedy = (
            'To give up the position in the data, set skip_checkpoint_components=["dataset"]; to be able to change the '
            "number of ranks in future, save one global position, by dispatch_batches=True of a trainer that has it."
            if component.key == "dataset"
            else f"Resume with the number of ranks that saved it, or set skip_checkpoint_components=[{component.key!r}] to "
            "start it fresh."
        )
        return CheckpointLoadError.misfit(
            f"Component {component.key!r} was saved as {saved.sharing_pattern} by {manifest.world_size} ranks "
            f"({len(manifest.component_files(component.key))} files), and this job has {self._layout.world_size} ranks with "
            f"pattern {component.sharing_pattern.value}: {reason}. {remedy}"
        )

    def _apply(self, component: StateComponent, states: dict[str, Any]) -> None:
        if component.key not in states:
            return
        state = states.pop(component.key)
        if isinstance(state, _NewRank):
            component.stateful.init_new_rank(self._layout.rank, state.step)
        else:
            component.stateful.load_state_dict(state)


class _NewRank:
    """Stands for the state of a rank that did not exist when the checkpoint was saved."""

    def __init__(self, step: int) -> None:
        self.step = step


def _missing_component(component: StateComponent, path: str, reason: str) -> CheckpointLoadError:
    return CheckpointLoadError.misfit(
        f"The required component {component.key!r} cannot be loaded: {path} {reason}. Choose another checkpoint, or set "
        f"skip_checkpoint_components=[{component.key!r}] to keep its present state."
    )


def _has_missing_names(component: StateComponent, state: Any) -> bool:
    return hasattr(component.stateful, "missing_names") and bool(component.stateful.missing_names(state))
