"""CheckpointManager: saves, retention, best checkpoints and resume for one output directory.

Methods are collective: every rank saves and loads the same checkpoint, or all ranks raise the same error. Trainers use
it; so can any training loop that declares its state.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.background import background_saves
from forgather.ml.checkpoint.components import (
    MODEL_KEY,
    declared_components,
    declared_process_groups,
    select_components,
    undeclared_pattern,
)
from forgather.ml.checkpoint.coordinator import CheckpointCoordinator
from forgather.ml.checkpoint.errors import (
    CheckpointError,
    CheckpointLoadError,
    CheckpointSaveError,
    CheckpointVersionError,
    naming,
    release_locals,
)
from forgather.ml.checkpoint.metadata import METADATA_NAME, CheckpointMetadata, extra_files_of
from forgather.ml.checkpoint.retention import LatestN, RetentionPolicy
from forgather.ml.checkpoint.rotation import CheckpointRotation, Ranking, soundness_note, stored_weight_decay_groups
from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.checkpoint.storage import CheckpointConfig, OutputDirectory
from forgather.ml.checkpoint.weights.external import WeightSuppliers
from forgather.ml.checkpoint.weights.index import ShardIndex
from forgather.ml.distributed import DistributedEnvInterface, Peers

if TYPE_CHECKING:
    from forgather.ml.checkpoint.background.growth import StateGrowth
    from forgather.ml.checkpoint.background.update_gate import UpdateGate
    from forgather.ml.checkpoint.foreign.report import ImportReport

__all__ = ["CheckpointConfig", "CheckpointManager", "RNGState"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CheckpointManager:
    """Saves, retains, finds and loads the checkpoints of one output directory.

    All ranks construct one and call its methods together. It locks the output directory until `close` or the end of the
    process; `read_only=True` takes no lock. `stateful_provider` declares components at every save and load. A `model`
    that it does not declare is saved and loaded too, unless `checkpoint_components` excludes it. Attribute `trainer`
    (initially the provider) supplies the step. `retention` replaces `save_total_limit`; the best checkpoints are always
    kept. With `on_save_error="warn"`, training continues after a failed save, and `num_save_errors` counts it. With
    `async_save=True`, saves run in the background; `finish_save` waits for the one in flight and raises its error.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        dist: DistributedEnvInterface,
        stateful_provider: object,
        model: nn.Module | None,
        model_parts: Sequence[nn.Module] | None = None,
        model_preprocessor: object = None,
        shard_index: ShardIndex | None = None,
        *,
        callbacks: Iterable[object] = (),
        checkpoint_components: Collection[str] | None = None,
        skip_checkpoint_components: Collection[str] = (),
        retention: RetentionPolicy | None = None,
        on_save_error: str = "raise",
        async_save: bool = False,
        async_save_memory: str | float | None = None,
        mesh: DeviceMesh | None = None,
        read_only: bool = False,
    ) -> None:
        if on_save_error not in ("raise", "warn"):
            raise ValueError(f"on_save_error={on_save_error!r} is not one of 'raise', 'warn'.")
        self.config = config
        self.is_read_only = read_only
        self.num_save_errors = 0
        self.trainer = stateful_provider
        self._provider = stateful_provider
        self._model = model
        self._model_parts = model_parts
        self._callbacks = callbacks
        self._checkpoint_components = checkpoint_components
        self._skip = skip_checkpoint_components
        self._raise_save_errors = on_save_error == "raise"
        self._eval_metrics: Mapping[str, object] | None = None
        self._peers = Peers.world()
        self._directory = OutputDirectory(config, dist, self._peers, read_only)
        self._rotation = CheckpointRotation(self._directory, retention or LatestN(config.save_total_limit), self._peers)
        self._suppliers = WeightSuppliers(callbacks, model, model_parts)
        # No components yet: `_declare` asks the provider for them at every save and load.
        self._coordinator = CheckpointCoordinator(
            [],
            {},
            dist,
            config.output_dir,
            config.save_safetensors,
            model,
            model_parts,
            shard_index,
            model_preprocessor=model_preprocessor,
            mesh=mesh,
            trainer_class=type(stateful_provider).__name__,
            storage_scope=self._directory.scope,
            save_on_local_rank=config.save_on_local_rank,
            checkpoint_layout=config.checkpoint_layout,
        )
        self._background = background_saves(async_save, async_save_memory, read_only)
        if not read_only:
            self._take_directory()

    def _take_directory(self) -> None:
        try:
            taken = self._everywhere(self._directory.take, "locking the output directory", CheckpointError)
            # The names of all storages together, because all ranks must choose the same name for a checkpoint.
            self._directory.names_of_others = frozenset().union(*taken)
        except BaseException:
            # This rank may hold the lock while another rank failed.
            self.close()
            raise

    @property
    def coordinator(self) -> CheckpointCoordinator:
        """Coordinator with the components that the provider declares now."""
        return self._declare("save")

    @property
    def preserve_n_best(self) -> int:
        """Number of best checkpoints to keep besides the newest."""
        return self._rotation.preserve_n_best

    @preserve_n_best.setter
    def preserve_n_best(self, number: int) -> None:
        self._rotation.preserve_n_best = number

    def set_save_total_limit(self, number: int | None) -> None:
        """Keep this number of newest checkpoints from the next save on; all ranks call it."""
        if self._rotation.follow_limit(number):
            self.config.save_total_limit = number

    # --- saving

    def save_checkpoint(
        self,
        checkpoint_path: str | None = None,
        checkpoint_id: str | int | None = None,
        *,
        is_sound: bool = True,
        ranking: Ranking | None = None,
    ) -> str:
        """Save a checkpoint, then delete the surplus ones. Return its path, or "" after an error that only warns.

        `is_sound=False`: the weights are not finite, and the checkpoint never displaces a sound one. `ranking` ranks it
        among the best. With `async_save`, it returns before the commit, and raises the error of the previous save.
        """
        self.finish_save()
        if checkpoint_path is None:
            checkpoint_id = self._current_step() if checkpoint_id is None else checkpoint_id
            self._directory.warn_of_taken_name(checkpoint_id)
            checkpoint_path = self._directory.path_of(checkpoint_id)
        try:
            path = self._save(checkpoint_path, is_sound, ranking)
        except CheckpointSaveError as error:
            return self._continue_after(error)
        if self._background is None:
            self._rotation.after_commit(path, ranking, self._peers)
        return path

    def path_of(self, checkpoint_id: str | int) -> str:
        """Return the path of the checkpoint that a save of this step writes."""
        return self._directory.path_of(checkpoint_id)

    def finish_save(self) -> str | None:
        """Wait for the background save, if any. Return its path, "" after an error that only warns, None without one."""
        save = None if self._background is None else self._background.finish()
        if save is None:
            return None
        if isinstance(save.error, CheckpointSaveError) and not save.is_committed:
            return self._continue_after(save.error)
        if save.error is not None:
            raise save.error
        return save.path

    def expect_background_saves(self, growth: "StateGrowth") -> None:
        """Start to allocate the memory of background saves before the first step, which adds `growth` to the state."""
        if self._background is not None:
            self._background.expect(self._declared("save"), growth)

    def prepare_background_saves(self) -> None:
        """Allocate the memory of background saves now. Call it after the first step, when the optimizer has its state."""
        if self._background is not None:
            self._background.prepare(self._declared("save"))

    @property
    def update_gate(self) -> "UpdateGate | None":
        """Gate that lets training continue up to the optimizer step while a save reads state; None without async_save."""
        return None if self._background is None else self._background.gate

    @property
    def num_saves(self) -> tuple[int, int]:
        """Numbers of background saves that were started, and that have ended."""
        return (0, 0) if self._background is None else (self._background.num_started, self._background.num_finished)

    def _continue_after(self, error: CheckpointSaveError) -> str:
        # All ranks have the same error, so all continue here. Other classes, such as ReplicationError, always raise.
        if self._raise_save_errors:
            raise error
        self.num_save_errors += 1
        logger.error("Training continues without this checkpoint (on_save_error='warn'): %s", error)
        return ""

    def set_eval_metrics(self, metrics: Mapping[str, object] | None) -> None:
        """Set the evaluation metrics that the next checkpoint contains."""
        self._eval_metrics = metrics

    def save_model(self, output_dir: str | None = None, overwrite_output_dir: bool = False) -> None:
        """Write only the model, as a Hugging Face directory. The default is the output directory."""
        self._declared("save").export_model(output_dir or self.config.output_dir, overwrite_output_dir)

    def update_best_checkpoints(
        self,
        checkpoint_path: str,
        metrics: Mapping[str, float],
        metric_key: str,
        greater_is_better: bool | None = None,
        preserve_n_best: int | None = None,
    ) -> bool:
        """Rank a checkpoint among the best, and delete the surplus ones. Return whether it is one of the best.

        `preserve_n_best` also sets the attribute of that name; None leaves it unchanged.
        """
        self._wait_for_save()
        ranking = Ranking(metrics, metric_key, greater_is_better, preserve_n_best)
        return self._rotation.rank_checkpoint(checkpoint_path, ranking, self._peers)

    @property
    def best_checkpoints(self) -> list[tuple[str, float]]:
        """Paths and metrics of the best checkpoints, best first."""
        return list(self._rotation.best.entries)

    def get_best_checkpoints_summary(self, metric_key: str = "loss") -> str:
        return self._rotation.best.summary(metric_key)

    def newest_sound_checkpoint(self) -> str | None:
        """Return the newest checkpoint with finite weights. None on ranks that do not lead a storage."""
        return self._rotation.newest_sound()

    # --- resuming

    def begin_fresh_run(self) -> None:
        """Start a run without resume. Its first save moves the checkpoints of the older run to a separate folder."""
        self._rotation.begin_fresh_run()

    def resolve_checkpoint_path(self, path: str | bool | None = None) -> str | None:
        """Return the path to resume from, or None.

        None or True: the newest complete checkpoint, if any. A path: this path, which must be a complete checkpoint or
        an importable checkpoint of another program. False: None.
        """
        self._wait_for_save()
        if path is False:
            return None
        if isinstance(path, (str, os.PathLike)):
            from forgather.ml.checkpoint.foreign.importing import require_loadable

            self._everywhere(lambda: require_loadable(str(path)), f"opening {path}", CheckpointLoadError)
            return str(path)
        candidates = self._rotation.candidates()
        if not candidates:
            self._refuse_others()
        return candidates[-1] if candidates else None

    def complete_checkpoints(self) -> list[str]:
        """Return the complete checkpoints, oldest first, the same on every rank. Collective."""
        return self._rotation.candidates()

    def load_checkpoint(self, checkpoint_path: str | None = None) -> str | None:
        """Load a checkpoint and return its path; None if there is no checkpoint.

        Without a path, the newest intact checkpoint is loaded. A damaged checkpoint is skipped with a warning, and the
        next older one is tried. If all fail, the error of the newest checkpoint is raised.
        """
        self._wait_for_save()
        if checkpoint_path is not None:
            loaded: str | None = checkpoint_path
            self._load(checkpoint_path)
        else:
            loaded = self._load_newest()
        if loaded is not None:
            self._rotation.continue_run()
        return loaded

    def _load_newest(self) -> str | None:
        candidates = self._rotation.candidates()
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
                    # The job is at fault, not the checkpoint. Falling back would only lose training.
                    raise
                # Free the tensors of this checkpoint before the next one is read.
                release_locals(error)
                first_error = first_error or error
                # No older checkpoint is left. The error of the newest one explains the most.
                if position == 0:
                    raise first_error from None
                self._rotation.note_damaged(path)
                logger.warning(
                    "%s is damaged, falling back to %s. The damage: %s", path, candidates[position - 1], error
                )
            else:
                return path
        return None

    def _refuse_others(self) -> None:
        """Raise if the output directory has checkpoints of other programs only. Collective.

        The user has to choose between an import and a fresh start beside them.
        """

        def refuse() -> None:
            from forgather.ml.checkpoint.foreign.importing import refuse_others

            if self._directory.is_led_here:
                refuse_others(self.config.output_dir)

        self._everywhere(refuse, "looking for checkpoints", CheckpointLoadError)

    @property
    def import_report(self) -> "ImportReport | None":
        """Report of the last load, if it imported a checkpoint of another program."""
        return self._coordinator.import_report

    @property
    def random_state(self) -> RNGState | None:
        """Random state that the last load applied. `restore()` applies it again after data iterators are built."""
        return self._coordinator.random_state

    def is_own(self, path: str) -> bool:
        """Return whether a checkpoint is in this output directory."""
        return self._rotation.contains(path)

    def close(self) -> None:
        """Wait for a background save, and release the lock of the output directory."""
        try:
            if self._background is not None:
                self._background.close(self.finish_save)
        finally:
            self._directory.give_back()

    # --- inside

    def _save(self, path: str, is_sound: bool, ranking: Ranking | None) -> str:
        extra_files: dict[str, bytes] = {}

        def collect() -> dict[str, object]:
            # If the lock is lost, another job may use the directory, and the two would delete each other's checkpoints.
            self._directory.require_held()
            extra_files.update(extra_files_of((*self._callbacks, self._provider), self._eval_metrics))
            return CheckpointMetadata.states_of(self._callbacks)

        states = self._everywhere(collect, "collecting callbacks' state", CheckpointSaveError)
        groups = getattr(self._provider, "weight_decay_groups", "all")
        extra_files[METADATA_NAME] = CheckpointMetadata.of(self._rotation.best, states, groups).to_bytes()
        coordinator = self._declared("save")
        target, step = coordinator.target_of(path, None, self._step_or_none())
        snapshot = coordinator.take_snapshot(extra_files=extra_files, compares_later=self._background is not None)
        note, clear_the_way = soundness_note(is_sound), self._rotation.clear_the_way
        if self._background is None:
            coordinator.write_snapshot(snapshot, target, step, note, before_commit=clear_the_way)
        else:
            from forgather.ml.checkpoint.background.saves import SaveRequest

            then = partial(self._rotation.after_commit, target, ranking)
            self._background.start(coordinator, snapshot, SaveRequest(target, step, note, clear_the_way, then))
        self._eval_metrics = None
        return target

    def _wait_for_save(self) -> None:
        if self._background is not None:
            self._background.wait()

    def stored_weight_decay_groups(self, path: str) -> str | None:
        """Return the weight-decay grouping of a checkpoint's optimizer; see `rotation.stored_weight_decay_groups`."""
        return stored_weight_decay_groups(path)

    def load_external_weights(self, path: str) -> bool:
        """Have callbacks supply the weights if the checkpoint was saved without them. Collective.

        Return False if the checkpoint contains the weights.
        """
        loads_model = MODEL_KEY in self._declared("load").component_keys
        during = f"loading the weights that belong to {path}"
        return any(self._everywhere(lambda: self._suppliers.supply(path, loads_model), during, CheckpointLoadError))

    def load_component(self, path: str, key: str) -> None:
        """Load only the component `key`, unless it is not declared or is skipped. Collective."""
        coordinator = self._declared("load")
        if key in coordinator.component_keys and key not in self._skip:
            coordinator.load_checkpoint(path, skip=set(coordinator.component_keys) - {key})

    def _load(self, path: str) -> None:
        coordinator = self._declared("load")
        loads_model = MODEL_KEY in coordinator.component_keys
        from forgather.ml.checkpoint.foreign.importing import foreign_owner

        if foreign_owner(path, self._peers) is not None:
            # A checkpoint of another program has no Forgather metadata: no best checkpoints, no callback state.
            coordinator.load_checkpoint(path, skip=set(self._skip) - (set() if loads_model else {MODEL_KEY}))
            return

        def needs_supplier() -> bool:
            return MODEL_KEY not in self._skip and self._suppliers.needed_for(path, loads_model) != []

        # This raises if no callback can supply the weights, so it must run before any state is changed.
        supplied = any(self._everywhere(needs_supplier, f"opening {path}", CheckpointLoadError))
        skip = {*self._skip, MODEL_KEY} if supplied else set(self._skip)
        # The reader rejects keys in `skip` that are not declared.
        if not loads_model:
            skip.discard(MODEL_KEY)

        # Callbacks are restored last, but their state is checked before components change.
        def check_metadata() -> None:
            with naming(os.path.join(path, METADATA_NAME)):
                CheckpointMetadata.read(path).check_callbacks(self._callbacks, self._peers.rank)

        self._everywhere(check_metadata, f"reading the metadata of {path}", CheckpointLoadError)
        coordinator.load_checkpoint(path, skip=skip)

        def finish() -> None:
            if supplied:
                self._suppliers.supply(path, loads_model)
            metadata = CheckpointMetadata.read(path)
            if self.is_own(path):
                # Only for checkpoints of this directory: the best values of another run might never be beaten here.
                self._rotation.best = metadata.best_below(os.path.abspath(self._directory.checkpoints))
            metadata.restore_callbacks(self._callbacks, self._peers.rank)

        self._everywhere(finish, f"restoring callbacks from {path}", CheckpointLoadError)

    def _declared(self, purpose: str) -> CheckpointCoordinator:
        """Return the coordinator with the components that the provider declares now. Collective."""
        # It has one layout of ranks, which a background save still uses.
        self._wait_for_save()
        with contextlib.nullcontext() if self._peers.size == 1 else self._peers.agreement("declaring the state"):
            return self._declare(purpose)

    def _declare(self, purpose: str) -> CheckpointCoordinator:
        model = self._model if self._model is not None else self._model_parts
        components = declared_components(
            self._provider, model, purpose, undeclared_pattern(self._model_parts, self._peers.size)
        )
        selected = select_components(components, self._checkpoint_components)
        self._coordinator.declare(selected, declared_process_groups(self._provider))
        return self._coordinator

    def _step_or_none(self) -> int | None:
        return getattr(getattr(self.trainer, "state", None), "global_step", None)

    def _current_step(self) -> int:
        step = self._step_or_none()
        if step is None:
            raise ValueError(
                "save_checkpoint needs a checkpoint_path or a checkpoint_id, because the trainer has no state.global_step."
            )
        return step

    def _everywhere(self, work: Callable[[], T], during: str, failure: type[CheckpointError]) -> list[T]:
        return on_every_rank(self._peers, work, during, failure)
