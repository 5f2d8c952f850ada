"""When and where to save, what to keep, and what to resume from."""

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import DeviceMesh

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.components import declared_components, declared_process_groups, select_components
from forgather.ml.checkpoint.coordinator import CheckpointCoordinator
from forgather.ml.checkpoint.errors import (
    CheckpointError,
    CheckpointLoadError,
    CheckpointSaveError,
    CheckpointVersionError,
    naming,
    release_locals,
)
from forgather.ml.checkpoint.foreign.importing import foreign_owner, require_loadable
from forgather.ml.checkpoint.foreign.ownership import recognise
from forgather.ml.checkpoint.manifest import CheckpointManifest, FileRecord
from forgather.ml.checkpoint.metadata import METADATA_NAME, CheckpointMetadata
from forgather.ml.checkpoint.output_lock import OutputDirLock
from forgather.ml.checkpoint.retention import (
    BestCheckpoints,
    CheckpointInfo,
    LatestN,
    RetentionPolicy,
    checkpoints_to_delete,
)
from forgather.ml.checkpoint.snapshot import METADATA_COMPONENT, MODEL_KEY
from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.checkpoint.weights.export import remove_unfinished_exports
from forgather.ml.checkpoint.weights.module_weights import (
    EVAL_METRICS_NAME,
    ShardIndex,
    load_checkpoint_metrics,
    metrics_bytes,
)
from forgather.ml.distributed import DistributedEnvInterface, Peers

__all__ = ["CheckpointConfig", "CheckpointManager", "RNGState"]

logger = logging.getLogger(__name__)

# A metric beyond what a float holds is no metric.
_LARGEST = 1e308
_IS_FINITE = "weights_are_finite"


@dataclass(kw_only=True)
class CheckpointConfig:
    """Where checkpoints go and how many are kept."""

    output_dir: str
    save_total_limit: int | None
    """The newest so many are kept, beside the best; None or 0 keeps all."""
    save_on_each_node: bool = False
    """Each node has storage of its own, and keeps there what its ranks need."""
    save_safetensors: bool = True
    save_on_local_rank: int = 0
    """With save_on_each_node: the local rank that commits a node's checkpoints."""
    save_on_all_ranks: bool = False
    """Each rank has storage of its own."""

    @property
    def storage_scope(self) -> str:
        if self.save_on_all_ranks:
            return "rank"
        return "node" if self.save_on_each_node else "job"


class CheckpointManager:
    """Every rank has one, constructed and used by all ranks together.

    It takes the output directory for this job until `close` (or the end of the process); `read_only` leaves it to
    others. `retention` replaces the rule of `save_total_limit`; the best checkpoints are kept in any case.
    `on_save_error="warn"` lets training go on after a failed save, which is counted in `num_save_errors`.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        dist: DistributedEnvInterface,
        stateful_provider: Any,
        model: nn.Module | None,
        model_parts: Sequence[nn.Module] | None = None,
        model_preprocessor: Any = None,
        shard_index: ShardIndex | None = None,
        *,
        callbacks: Iterable[Any] = (),
        checkpoint_components: Collection[str] | None = None,
        skip_checkpoint_components: Collection[str] = (),
        retention: RetentionPolicy | None = None,
        on_save_error: str = "raise",
        mesh: DeviceMesh | None = None,
        read_only: bool = False,
    ) -> None:
        if on_save_error not in ("raise", "warn"):
            raise ValueError(f"on_save_error={on_save_error!r} is not one of 'raise', 'warn'.")
        self.config = config
        self.is_read_only = read_only
        self.num_save_errors = 0
        self._env = dist
        self._provider = stateful_provider
        self._model = model
        self._model_parts = model_parts
        self._model_preprocessor = model_preprocessor
        self._shard_index = shard_index
        self._callbacks = callbacks
        self._checkpoint_components = checkpoint_components
        self._skip = skip_checkpoint_components
        self._retention = retention or LatestN(config.save_total_limit)
        self._raise_save_errors = on_save_error == "raise"
        self._mesh = mesh
        self._best = BestCheckpoints()
        self._eval_metrics: Mapping[str, Any] | None = None
        self._is_fresh_run = False
        self._damaged: set[str] = set()
        self._coordinators: dict[str, CheckpointCoordinator] = {}
        self._peers = Peers.world()
        self._lock = OutputDirLock(config.output_dir)
        self._lock_is_held = False
        self._names_of_others: frozenset[str] = frozenset()
        if not read_only:
            try:
                taken = self._everywhere(self._take_directory, "taking the output directory", CheckpointError)
                self._names_of_others = frozenset().union(*taken)
            except BaseException:
                self.close()
                raise

    # --- saving

    def save_checkpoint(
        self,
        checkpoint_path: str | None = None,
        checkpoint_id: str | int | None = None,
        *,
        is_sound: bool = True,
    ) -> str:
        """Save, then remove what need not be kept; returns the checkpoint's path, "" after an error that only warns.

        One that is not sound, because its weights are not finite, never takes the place of one that is.
        """
        if checkpoint_path is None:
            checkpoint_id = self._current_step() if checkpoint_id is None else checkpoint_id
            checkpoint_id = store.name_beside_others(checkpoint_id, self._names_of_others)
        try:
            path = self._save(checkpoint_path, checkpoint_id, is_sound)
        except CheckpointSaveError as error:
            if self._raise_save_errors:
                raise
            self.num_save_errors += 1
            logger.error("Training goes on without this checkpoint (on_save_error='warn'): %s", error)
            return ""
        self._remove_surplus()
        return path

    def set_eval_metrics(self, metrics: Mapping[str, Any] | None) -> None:
        """Metrics to put into the next checkpoint; the evaluation that ran for it calls this."""
        self._eval_metrics = metrics

    def save_model(self, output_dir: str | None = None, overwrite_output_dir: bool = False) -> None:
        """Write the model alone, as a Hugging Face directory, by default into the output directory itself."""
        self._coordinator("save").export_model(output_dir or self.config.output_dir, overwrite_output_dir)

    def update_best_checkpoints(
        self,
        checkpoint_path: str,
        metrics: Mapping[str, float],
        metric_key: str,
        greater_is_better: bool | None,
        preserve_n_best: int,
    ) -> bool:
        """Enter a checkpoint into the list of the best; True when it is one of them. Surplus ones are removed."""
        with self._agreement("ranking the checkpoints"):
            is_best = self._best.update(checkpoint_path, metrics, metric_key, greater_is_better, preserve_n_best)

        def note() -> None:
            # The checkpoint's own copy of the list, so that a resume from it knows of itself.
            if self._leads_storage and os.path.isdir(checkpoint_path):
                self._amend_best(checkpoint_path)

        self._everywhere(note, "noting the best checkpoints", CheckpointSaveError)
        self._remove_surplus()
        return is_best

    @property
    def best_checkpoints(self) -> list[tuple[str, float]]:
        """Path and metric of the best checkpoints, best first."""
        return list(self._best.entries)

    def get_best_checkpoints_summary(self, metric_key: str = "loss") -> str:
        return self._best.summary(metric_key)

    # --- resuming

    def begin_fresh_run(self) -> None:
        """Note that nothing is resumed: the first save moves the checkpoints of the older run out of retention's way."""
        self._is_fresh_run = True

    def resolve_checkpoint_path(self, path: str | bool | None = None) -> str | None:
        """What to resume from. None or True: the newest complete checkpoint, or None; a path: that one, which must be
        complete, or a directory of another program that can be imported; False: nothing.
        """
        if path is False:
            return None
        if isinstance(path, (str, os.PathLike)):
            self._everywhere(lambda: require_loadable(str(path)), f"opening {path}", CheckpointLoadError)
            return str(path)
        candidates = self._candidates()
        if not candidates:
            self._refuse_others()
        return candidates[-1] if candidates else None

    def load_checkpoint(self, checkpoint_path: str | None = None) -> str | None:
        """Load, and return what was loaded: the path given, or the newest checkpoint that is intact; None without any.

        Without a path, a checkpoint that cannot be read or applied is passed over with a warning in favour of the next
        older one. When none can, the error is the newest one's.
        """
        if checkpoint_path is not None:
            loaded: str | None = checkpoint_path
            self._load(checkpoint_path)
        else:
            loaded = self._load_newest()
        if loaded is not None:
            self._is_fresh_run = False
        return loaded

    def _load_newest(self) -> str | None:
        candidates = self._candidates()
        if not candidates:
            self._refuse_others()
        first_error: CheckpointLoadError | None = None
        for position, path in reversed(list(enumerate(candidates))):
            try:
                self._load(path)
            except CheckpointVersionError:
                raise
            except CheckpointLoadError as error:
                if error.contact_lost or error.is_misfit:
                    # The job is wrong, not the checkpoint: an older one would lose what was trained since.
                    raise
                # Before the next one is read: the memory of a start is that of one checkpoint.
                release_locals(error)
                first_error = first_error or error
                if position == 0:
                    raise first_error from None
                self._damaged.add(os.path.abspath(path))
                logger.warning(
                    "%s is damaged, falling back to %s. The damage: %s", path, candidates[position - 1], error
                )
            else:
                return path
        return None

    def _refuse_others(self) -> None:
        """Stop where only other programs have trained; collective."""

        def refuse() -> None:
            if not self._leads_storage:
                return
            others = store.checkpoints_of_others(self.config.output_dir, self._own_folder)
            if others:
                path, owner = others[-1]
                raise CheckpointLoadError(
                    f"The output directory {self.config.output_dir!r} has no checkpoint of ours to resume from, but {path} "
                    f"is {owner.value}. Import it with resume_from_checkpoint={path!r}, choose another output_dir, or start "
                    "afresh beside it with resume_from_checkpoint=False; it is never replaced or deleted."
                )

        self._everywhere(refuse, "looking for checkpoints", CheckpointLoadError)

    def is_own(self, path: str) -> bool:
        """Whether a checkpoint is one of those in the output directory."""
        return os.path.dirname(os.path.realpath(path)) == os.path.realpath(self._own_folder)

    @property
    def _own_folder(self) -> str:
        return os.path.join(self.config.output_dir, store.CHECKPOINTS_FOLDER)

    def close(self) -> None:
        """Give the output directory back."""
        if self._lock_is_held:
            self._lock_is_held = False
            self._lock.release()

    # --- inside

    def _save(self, path: str | None, checkpoint_id: str | int | None, is_sound: bool) -> str:
        extra_files: dict[str, bytes] = {}

        def collect() -> dict[str, Any]:
            self._require_lock()
            if self._eval_metrics is not None:
                extra_files[EVAL_METRICS_NAME] = metrics_bytes(self._eval_metrics)
            for callback in self._callbacks:
                if hasattr(callback, "checkpoint_files"):
                    extra_files.update(callback.checkpoint_files())
            return CheckpointMetadata.states_of(self._callbacks)

        states = self._everywhere(collect, "collecting callbacks' state", CheckpointSaveError)
        groups = getattr(self._provider, "weight_decay_groups", "all")
        extra_files[METADATA_NAME] = CheckpointMetadata.of(self._best, states, groups).to_bytes()
        saved = self._coordinator("save").save_checkpoint(
            path,
            checkpoint_id,
            step=self._step_or_none(),
            extra_files=extra_files,
            metadata={} if is_sound else {_IS_FINITE: False},
            before_commit=self._clear_the_way,
        )
        self._eval_metrics = None
        self._is_fresh_run = False
        return saved

    def _require_lock(self) -> None:
        if self._lock_is_held and self._lock.is_lost:
            raise OSError(
                f"the output directory {self.config.output_dir!r}, or its lock file, was removed or renamed while this job was "
                "running, so another job may use it now. Restore it and start again, or choose another output_dir."
            )

    def _clear_the_way(self, path: str) -> None:
        """Just before a commit, on the rank that commits: older runs and damaged checkpoints are kept, but elsewhere."""
        if self._is_fresh_run and self.is_own(path):
            moved_to = store.move_older_run(self._own_folder)
            if moved_to is not None:
                logger.warning(
                    "This run started afresh (resume_from_checkpoint=False): the checkpoints of an older run are now in %s.",
                    moved_to,
                )
        if os.path.abspath(path) in self._damaged:
            self._damaged.discard(os.path.abspath(path))
            store.set_aside(path, store.new_attempt())

    def stored_weight_decay_groups(self, path: str) -> str | None:
        """How the optimizer of a checkpoint groups its parameters; of a damaged one, the nearest older one tells.

        None for a checkpoint of another program: the settings of this run decide.
        """
        if recognise(path) is not None:
            return None
        try:
            return CheckpointMetadata.read(path).weight_decay_groups
        except (CheckpointError, OSError):
            # Loading it will say what is wrong; the run goes on from an older one then.
            pass
        for other in reversed(store.find_checkpoints(os.path.dirname(os.path.abspath(path)))):
            with contextlib.suppress(CheckpointError, OSError):
                return CheckpointMetadata.read(other.path).weight_decay_groups
        return "all"

    def load_external_weights(self, path: str) -> bool:
        """Have callbacks supply the weights of a checkpoint that was saved without any; False if it has them.

        Collective.
        """
        during = f"loading the weights that belong to {path}"
        return any(self._everywhere(lambda: self._supply_weights(path), during, CheckpointLoadError))

    def load_component(self, path: str, key: str) -> None:
        """Load one component alone, if it is among those that are loaded at all; collective."""
        coordinator = self._coordinator("load")
        if key in coordinator.component_keys and key not in self._skip:
            coordinator.load_checkpoint(path, skip=set(coordinator.component_keys) - {key})

    def _supply_weights(self, path: str) -> bool:
        suppliers = self._suppliers_for(path)
        for supply in suppliers:
            supply(checkpoint_path=path, model=self._model, model_parts=self._model_parts)
        return bool(suppliers)

    def _load(self, path: str) -> None:
        coordinator = self._coordinator("load")
        if foreign_owner(path, self._peers) is not None:
            # It has no metadata of ours: no best checkpoints, no callbacks, no suppliers of weights.
            coordinator.load_checkpoint(path, skip=set(self._skip) - ({MODEL_KEY} - set(coordinator.component_keys)))
            return
        # Before anything is changed: there may be nobody to supply the weights.
        skips_model = MODEL_KEY in self._skip
        supplied = not skips_model and any(
            self._everywhere(lambda: self._suppliers_for(path) != [], f"opening {path}", CheckpointLoadError)
        )
        skip = {*self._skip, MODEL_KEY} if supplied else set(self._skip)
        if MODEL_KEY not in coordinator.component_keys:
            skip.discard(MODEL_KEY)

        def check_metadata() -> None:
            with naming(os.path.join(path, METADATA_NAME)):
                CheckpointMetadata.read(path).check_callbacks(self._callbacks, self._peers.rank)

        self._everywhere(check_metadata, f"reading the metadata of {path}", CheckpointLoadError)
        coordinator.load_checkpoint(path, skip=skip)

        def finish() -> None:
            if supplied:
                self._supply_weights(path)
            metadata = CheckpointMetadata.read(path)
            if self.is_own(path):
                # The best of another run would keep this run's own off the list for ever.
                self._best = metadata.best_below(os.path.abspath(self._own_folder))
            metadata.restore_callbacks(self._callbacks, self._peers.rank)

        self._everywhere(finish, f"restoring callbacks from {path}", CheckpointLoadError)

    def _suppliers_for(self, path: str) -> list[Callable[..., Any]]:
        """Who supplies the weights of this checkpoint; nobody where it has them."""
        left_out = self._model is not None and MODEL_KEY not in self._coordinator("load").component_keys
        if not (left_out or store.open_checkpoint(path).manifest.weights == "external"):
            return []
        suppliers = [one.on_load_model_weights for one in self._callbacks if hasattr(one, "on_load_model_weights")]
        if not suppliers:
            raise CheckpointLoadError(
                f"The model's weights are not loaded from {path} (checkpoint_components, now or when it was saved, is without "
                "'model'), and no callback implements on_load_model_weights to supply them. Add the callback that does, or "
                "set skip_checkpoint_components=['model'] to keep the weights the model has."
            )
        return suppliers

    def _candidates(self) -> list[str]:
        """Complete checkpoints, oldest first, the same ones on every rank: rank 0 decides."""

        def find() -> list[tuple[str, str]]:
            if self.config.storage_scope == "job" and self._peers.rank != 0:
                return []
            found = store.find_checkpoints(self._own_folder)
            return [(str(one.manifest.attempt), one.path) for one in found]

        told = self._everywhere(find, "looking for checkpoints", CheckpointLoadError)
        if self.config.storage_scope == "job":
            return [path for _, path in told[0]]
        # With storage of its own, each node must have the checkpoint; it may lie under another path there.
        own = dict(told[self._peers.rank])
        return [own[attempt] for attempt, _ in told[0] if all(attempt in dict(one) for one in told)]

    def _remove_surplus(self) -> None:
        if not self._leads_storage:
            return
        try:
            for surplus in checkpoints_to_delete(self._known_checkpoints(), self._policy()):
                store.delete_checkpoint(surplus.path)
        except (OSError, ValueError, CheckpointError) as error:
            # The checkpoint of this save is there, and the other ranks have gone on: one rank must not fail now.
            logger.warning("Old checkpoints could not be removed: %s", error)

    def _known_checkpoints(self) -> list[CheckpointInfo]:
        found = store.find_checkpoints(self._own_folder)
        return [
            CheckpointInfo(
                one.path, one.manifest.step, one.manifest.written_at, _metrics_of(one.path), _is_sound(one.manifest)
            )
            for one in found
        ]

    def newest_sound_checkpoint(self) -> str | None:
        """The newest checkpoint with finite weights, on ranks that lead a storage; others know of none."""
        if not self._leads_storage:
            return None
        found = store.find_checkpoints(self._own_folder)
        return next((one.path for one in reversed(found) if _is_sound(one.manifest)), None)

    def _policy(self) -> RetentionPolicy:
        return self._best | self._retention

    def _amend_best(self, path: str) -> None:
        metadata = CheckpointMetadata.read(path).with_best(self._best)
        record = FileRecord(METADATA_NAME, 0, "", self._peers.rank, METADATA_COMPONENT)
        store.amend_file(path, record, metadata.to_bytes())

    def _take_directory(self) -> frozenset[str]:
        """Lock and clean the directory; returns the names that other programs' checkpoints have there."""
        if not self._leads_storage:
            return frozenset()
        self._lock.acquire()
        self._lock_is_held = True
        taken = store.names_taken_by_others(self._own_folder)
        remove_unfinished_exports(self.config.output_dir)
        for line in store.recover(self._own_folder):
            logger.info("Recovery: %s", line)
        return taken

    @property
    def _leads_storage(self) -> bool:
        scope = self.config.storage_scope
        if scope == "node":
            return self._env.local_rank == self.config.save_on_local_rank
        return scope == "rank" or self._peers.rank == 0

    def _coordinator(self, purpose: str) -> CheckpointCoordinator:
        """Made when first needed: the provider declares its state once everything that has state exists."""
        if purpose not in self._coordinators:
            with self._agreement("declaring the state"):
                self._coordinators[purpose] = self._new_coordinator(purpose)
        return self._coordinators[purpose]

    def _new_coordinator(self, purpose: str) -> CheckpointCoordinator:
        components = declared_components(self._provider, self._model, purpose)
        return CheckpointCoordinator(
            select_components(components, self._checkpoint_components),
            declared_process_groups(self._provider),
            self._env,
            self.config.output_dir,
            self.config.save_safetensors,
            self._model,
            self._model_parts,
            self._shard_index,
            model_preprocessor=self._model_preprocessor,
            mesh=self._mesh,
            trainer_class=type(self._provider).__name__,
            storage_scope=self.config.storage_scope,
            save_on_local_rank=self.config.save_on_local_rank,
        )

    def _step_or_none(self) -> int | None:
        return getattr(getattr(self._provider, "state", None), "global_step", None)

    def _current_step(self) -> int:
        step = self._step_or_none()
        if step is None:
            raise ValueError(
                "save_checkpoint needs a checkpoint_path or a checkpoint_id, because the trainer has no state.global_step "
                "to name the checkpoint by."
            )
        return step

    def _agreement(self, during: str) -> contextlib.AbstractContextManager[None]:
        """For what goes wrong on all ranks or on none, as a rule: alone, the error stays what it is."""
        return contextlib.nullcontext() if self._peers.size == 1 else self._peers.agreement(during)

    def _everywhere(self, work: Callable[[], Any], during: str, failure: type[CheckpointError]) -> list[Any]:
        return on_every_rank(self._peers, work, during, failure)


def _is_sound(manifest: CheckpointManifest) -> bool:
    return manifest.metadata.get(_IS_FINITE) is not False


def _metrics_of(path: str) -> dict[str, Any]:
    """What retention policies see; a damaged file of metrics must not stop training."""
    try:
        metrics = load_checkpoint_metrics(path) or {}
        return {name: value for name, value in metrics.items() if type(value) in (int, float) and abs(value) < _LARGEST}
    except (OSError, CheckpointError) as error:
        logger.warning("The metrics of %s cannot be read: %s", path, error)
        return {}
