"""Checkpoint reader: loads weights and component state on every rank, also on another topology than the saving job.

All state is read and verified before anything is applied, so an unreadable checkpoint changes nothing. The coordinator
constructs one reader per load, on all ranks.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.components import MODEL_KEY, StateComponent, StateDict, select_components
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError, naming
from forgather.ml.checkpoint.files.state_files import read_state, verify_file
from forgather.ml.checkpoint.manifest import CheckpointManifest, ComponentManifest, FileRecord
from forgather.ml.checkpoint.rank_layout import RankLayout
from forgather.ml.checkpoint.sharding.sharded_tensors import is_sharded
from forgather.ml.checkpoint.sharing import ComponentSharing
from forgather.ml.checkpoint.snapshot import METADATA_COMPONENT
from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.checkpoint.weights.adapters import adapters_only
from forgather.ml.checkpoint.weights.module_weights import get_all_fqns, load_into_modules, locate_weights
from forgather.ml.distributed import Peers

logger = logging.getLogger(__name__)

T = TypeVar("T")

RNG_KEY = "rng"
# Files with these suffixes are verified when components and weights are read.
_READ_BY_COMPONENTS = (".pt", ".safetensors", ".bin")


class _NewRank:
    """Placeholder for the state of a rank that did not exist when the checkpoint was saved."""

    def __init__(self, step: int) -> None:
        self.step = step


_States = dict[str, StateDict | _NewRank]


class CheckpointReader:
    """Collective load of one checkpoint.

    All ranks finish each phase before the next begins:

    1. Open the checkpoint: it must be complete and the same save on every rank.
    2. Read and verify every state file.
    3. Read the weights into the model.
    4. Apply the states to the components, random state last.

    A checkpoint with unreadable state, or with state that does not fit this job's ranks, fails before phase 3.
    """

    def __init__(
        self,
        path: str,
        components: Sequence[StateComponent],
        model_parts: Sequence[nn.Module] | None,
        layout: RankLayout,
        peers: Peers,
    ) -> None:
        self._path = path
        # Random state comes last, because other components may draw random numbers in `load_state_dict`.
        self._components = sorted(components, key=_is_random_state)
        self._model_parts = model_parts
        self._layout = layout
        self._peers = peers

    def load(self, strict: bool, skip: Collection[str]) -> None:
        """Load all components except `skip`. Collective. Every error names the checkpoint."""
        try:
            self._load(strict, skip)
        except CheckpointError as error:
            if self._path in str(error):
                raise
            named = type(error)(f"{error}\nThe checkpoint is {self._path}.")
            # The manager decides by these flags whether to fall back to an older checkpoint.
            named.is_misfit, named.contact_lost = error.is_misfit, error.contact_lost
            raise named from error

    def _load(self, strict: bool, skip: Collection[str]) -> None:
        skipped = select_components(self._components, skip, "skip_checkpoint_components") if skip else []
        if skipped:
            logger.info("Not loaded from %s, as requested: %s", self._path, ", ".join(one.key for one in skipped))
        wanted = [component for component in self._components if component not in skipped]
        manifest = self._open()
        # Ranks may declare different components. The agreements below must be reached by every rank, so their number
        # and order follow from the plans of all ranks.
        plans = self._everywhere(lambda: self._plan(wanted), "planning what to load")
        states: _States = {}
        if any(plan.is_sharded for plan in plans):
            # A rank that reads only its rows cannot verify a checksum of full tensors. Ranks verify different files.
            self._everywhere(lambda: self._verify_own_share(manifest), f"verifying the files of {self._path}")

        def read_states() -> None:
            self._verify_small_files(manifest)
            self._refuse_other_kind_of_model(wanted, manifest)
            for component in wanted:
                if not self._is_weights(component):
                    self._read_component(component, manifest, states)

        self._everywhere(read_states, f"reading the state in {self._path}")
        if any(plan.has_weights for plan in plans):
            self._load_weights(wanted, manifest, strict, {name for plan in plans for name in plan.names})
        for key in _in_order([plan.keys for plan in plans]):
            self._everywhere(functools.partial(self._apply, key, wanted, states), f"restoring {key!r}")

    def _refuse_other_kind_of_model(self, wanted: Sequence[StateComponent], manifest: CheckpointManifest) -> None:
        """Raise if the checkpoint has adapters and the model is a full one, or the reverse; other errors say less."""
        component, records = _model_in(wanted), manifest.component_files(MODEL_KEY)
        if component is None or not records:
            return
        has_weights = any(record.tensors for record in records)
        if self._is_weights(component) and not has_weights and (message := adapters_only(self._path)) is not None:
            raise CheckpointLoadError.misfit(message)
        if has_weights and not self._is_weights(component):
            raise CheckpointLoadError.misfit(
                f"{self._path} has the weights of a full model, but the model of this run is saved as other state, such as "
                "the adapters of a PeftModel. Load these weights into the base model first, with from_pretrained or "
                "forgather.ml.sharded_checkpoint.load_checkpoint, and start the run in another output_dir."
            )

    def _plan(self, wanted: Sequence[StateComponent]) -> "_LoadPlan":
        weights = [component for component in wanted if self._is_weights(component)]
        names = [name for part in self._model_parts or () for name in get_all_fqns(part)] if weights else []
        return _LoadPlan(
            has_weights=bool(weights),
            names=names,
            is_sharded=any(map(self._is_sharded, wanted)),
            keys=[(component.key, _is_random_state(component)) for component in wanted if component not in weights],
        )

    def _is_sharded(self, component: StateComponent) -> bool:
        """Return whether this rank holds only rows of the tensors of a component."""
        if not self._is_weights(component):
            return getattr(component.state_holder, "is_sharded", False) is True
        return any(is_sharded(tensor) for part in self._model_parts or () for tensor in part.state_dict().values())

    def _verify_own_share(self, manifest: CheckpointManifest) -> None:
        """Verify the checksums of some weight and state files; together the ranks of a storage verify all of them."""
        storage = self._layout.storage
        files = [record for record in manifest.files if record.path.endswith(_READ_BY_COMPONENTS)]
        # Largest first, so that each rank gets about as many bytes.
        files.sort(key=lambda record: (-record.size, record.path))
        for record in files[storage.index(self._layout.rank) :: len(storage)]:
            if os.path.lexists(os.path.join(self._path, record.path)):
                verify_file(self._path, record)

    def _is_weights(self, component: StateComponent) -> bool:
        return component.key == MODEL_KEY and self._model_parts is not None

    def _everywhere(self, work: Callable[[], T], during: str) -> list[T]:
        return on_every_rank(self._peers, work, during, CheckpointLoadError)

    def _open(self) -> CheckpointManifest:
        found: list[store.FoundCheckpoint] = []

        def open_here() -> str | None:
            found.append(store.open_checkpoint(self._path))
            return found[0].manifest.attempt

        attempts = set(self._everywhere(open_here, f"opening the checkpoint {self._path}"))
        if len(attempts) > 1:
            raise CheckpointLoadError.misfit(
                f"Ranks see different checkpoints at {self._path} (saves {sorted(map(str, attempts))}). All ranks must "
                "share one directory, or every node must have its copy of the same save."
            )
        own = found[0]
        for name in own.missing_optional:
            logger.warning("%s is missing from %s: that part starts fresh.", name, self._path)
        return own.manifest

    def _verify_small_files(self, manifest: CheckpointManifest) -> None:
        """Verify the checksums of configuration and metadata files, on one rank per storage.

        No component reads them. Other code reads them later, without a checksum.
        """
        if not self._layout.leads_storage:
            return
        # Damaged or missing metrics must not prevent a resume.
        for record in manifest.files:
            present = os.path.lexists(os.path.join(self._path, record.path))
            is_read_later = not record.path.endswith(_READ_BY_COMPONENTS) and record.path not in store.EDITABLE_FILES
            if is_read_later and (present or record.component != METADATA_COMPONENT):
                verify_file(self._path, record)

    def _load_weights(
        self,
        wanted: Sequence[StateComponent],
        manifest: CheckpointManifest,
        strict: bool,
        all_names: Collection[str],
    ) -> None:
        def load() -> None:
            component = _model_in(wanted)
            if component is None or self._model_parts is None:
                return
            saved = manifest.components.get(MODEL_KEY)
            if saved is None:
                self._absent(component, "was saved without it")
                return
            # A tensor is unexpected only if no rank has it: this rank's stages are a subset of the model.
            location = locate_weights(self._path, saved.metadata.get("param_sharing"))
            load_into_modules(location, self._model_parts, strict, all_names)

        self._everywhere(load, f"loading weights from {self._path}")

    def _read_component(self, component: StateComponent, manifest: CheckpointManifest, states: _States) -> None:
        saved = manifest.components.get(component.key)
        if saved is None:
            self._absent(component, "was saved without it")
            return
        records = self._records(component, saved, manifest)
        own = {record.path for record in records}
        others = [one for one in manifest.component_files(component.key) if one.path not in own]
        parts = self._read_files(component, records)
        # Even with the same world size, this rank's file may lack parameters: the stages may be divided differently.
        with self._naming(records):
            is_divided = bool(parts and others and _has_missing_names(component, parts[0]))
        if parts and is_divided:
            more = self._read_files(component, others)
            parts = None if more is None else parts + more
        # None: a file of an optional component is missing, as already reported. Empty: this rank is new.
        if parts is None:
            return
        if not parts:
            states[component.key] = _NewRank(manifest.step or 0)
            return
        with self._naming(records):
            states[component.key] = self._joined(component, parts, manifest)

    def _joined(self, component: StateComponent, parts: Sequence[StateDict], manifest: CheckpointManifest) -> StateDict:
        """Merge the states of several files and let the component check the result, before anything is applied."""
        stateful = component.state_holder
        state = parts[0]
        if len(parts) > 1 and hasattr(stateful, "merge_state_dicts"):
            state = stateful.merge_state_dicts(parts)
        # A tied parameter may be saved under another name of its group.
        if hasattr(stateful, "add_tied_names") and MODEL_KEY in manifest.components:
            stateful.add_tied_names(state, manifest.components[MODEL_KEY].metadata.get("param_sharing", []))
        # After the merge, because only the merged state has to fit.
        if hasattr(stateful, "check_state_dict"):
            stateful.check_state_dict(state)
        return state

    def _naming(self, records: Sequence[FileRecord]) -> contextlib.AbstractContextManager[None]:
        return naming(*(os.path.join(self._path, record.path) for record in records))

    def _read_files(self, component: StateComponent, records: Sequence[FileRecord]) -> list[StateDict] | None:
        """Return the states in the files. Return None with a warning, or raise if required, when a file is missing."""
        for record in records:
            if not os.path.exists(os.path.join(self._path, record.path)):
                self._absent(component, f"has no file {record.path}")
                return None
        # A component that copies the state into its own tensors needs no second copy in memory. The file is verified
        # now, before any tensor changes, and read again from the page cache by the copies.
        sharded = self._is_sharded(component)
        mapped = sharded or getattr(component.state_holder, "copies_loaded_tensors", False) is True
        # The files of a sharded component are verified already, each by one rank.
        return [
            read_state(os.path.join(self._path, record.path), None if sharded else record, mapped=mapped)
            for record in records
        ]

    def _absent(self, component: StateComponent, reason: str) -> None:
        if component.required:
            raise _missing_component(component, self._path, reason)
        logger.warning("Component %r starts fresh: %s %s.", component.key, self._path, reason)

    def _records(
        self, component: StateComponent, saved: ComponentManifest, manifest: CheckpointManifest
    ) -> list[FileRecord]:
        """Return the files that make up this rank's state; none if the rank is new and the state is per rank.

        Raise a misfit error if the state cannot be moved to the topology of this job.
        """
        records = manifest.component_files(component.key)
        # GLOBAL and REPLICATED state: one file for all ranks, on any topology.
        if len(records) == 1 and records[0].owner is None:
            return records
        rank = self._layout.rank
        then = sorted(tuple(record.owner_ranks) for record in records)
        now = sorted(owner.ranks for owner in ComponentSharing(component, self._layout).owners)
        own = [record for record in records if rank in record.owner_ranks]
        # With separate storage per node, the manifest lists only the files that this node's ranks need.
        if own and (then == now or (set(then) < set(now) and manifest.world_size == self._layout.world_size)):
            return own
        # From here on the topology has changed. Per-rank state such as random state keeps the files of ranks that still
        # exist; state keyed by FQN is merged from all files.
        covered = {member for record in records for member in record.owner_ranks}
        if hasattr(component.stateful, "init_new_rank"):
            return own
        if covered != set(range(manifest.world_size)):
            raise self._misfit(
                component, saved, manifest, "this node's copy of the checkpoint contains only part of it"
            )
        if hasattr(component.stateful, "merge_state_dicts"):
            return records
        # A single file can serve a single copy. Copies that should differ must not all start from the same state.
        if len(records) == 1 and len(now) == 1:
            return records
        raise self._misfit(component, saved, manifest, "its state cannot be redistributed")

    def _misfit(
        self, component: StateComponent, saved: ComponentManifest, manifest: CheckpointManifest, reason: str
    ) -> CheckpointLoadError:
        remedy = (
            'Set skip_checkpoint_components=["dataset"] to give up the position in the data. To change the number of '
            "ranks in future, save one global position: set dispatch_batches=True, on a trainer that supports it."
            if component.key == "dataset"
            else f"Resume with the number of ranks that saved it, or set skip_checkpoint_components=[{component.key!r}] to "
            "start it fresh."
        )
        return CheckpointLoadError.misfit(
            f"Component {component.key!r} was saved as {saved.sharing_pattern} by {manifest.world_size} ranks "
            f"({len(manifest.component_files(component.key))} files), and this job has {self._layout.world_size} ranks with "
            f"pattern {component.sharing_pattern.value}: {reason}. {remedy}"
        )

    def _apply(self, key: str, wanted: Sequence[StateComponent], states: _States) -> None:
        # This rank does not have the component, or it is optional and missing in the checkpoint.
        if key not in states:
            return
        stateful = next(component.state_holder for component in wanted if component.key == key)
        # `pop` frees each state once it is applied.
        state = states.pop(key)
        if not isinstance(state, _NewRank):
            stateful.load_state_dict(state)
        elif hasattr(stateful, "init_new_rank"):
            stateful.init_new_rank(self._layout.rank, state.step)


@dataclass(frozen=True)
class _LoadPlan:
    """Components that one rank will load, as sent to the other ranks."""

    has_weights: bool
    names: list[str]
    """Names of the model's tensors on that rank."""
    is_sharded: bool
    """Whether that rank reads only rows of some tensors."""
    keys: list[tuple[str, bool]]
    """Keys of the other components, with a flag for random state."""


def _is_random_state(component: StateComponent) -> bool:
    return component.key == RNG_KEY or isinstance(component.stateful, RNGState)


def _in_order(by_rank: Sequence[Sequence[tuple[str, bool]]]) -> list[str]:
    """Return the keys of all ranks, random states last.

    Each key is one agreement. All ranks must reach it, including ranks without this component.
    """
    keys: dict[str, bool] = {}
    for declared in by_rank:
        for key, is_random_state in declared:
            keys[key] = keys.get(key, False) or is_random_state
    return sorted(keys, key=lambda key: keys[key])


def _model_in(components: Sequence[StateComponent]) -> StateComponent | None:
    return next((one for one in components if one.key == MODEL_KEY), None)


def _missing_component(component: StateComponent, path: str, reason: str) -> CheckpointLoadError:
    return CheckpointLoadError.misfit(
        f"The required component {component.key!r} cannot be loaded: {path} {reason}. Choose another checkpoint, or set "
        f"skip_checkpoint_components=[{component.key!r}] to keep its current state."
    )


def _has_missing_names(component: StateComponent, state: StateDict) -> bool:
    stateful = component.state_holder
    return hasattr(stateful, "missing_names") and bool(stateful.missing_names(state))
