"""Checkpoint coordinator: saves and loads declared state across ranks, and exports the model.

The sharing patterns alone determine the ranks that write and read each file. A save has two halves: `take_snapshot`
collects state and plans files with the other ranks, on the training thread; `write_snapshot` is the transaction and
uses only the snapshot. `CheckpointManager` calls it.
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import forgather
from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.components import (
    MODEL_KEY,
    SharingPattern,
    StateComponent,
    check_declaration,
    is_list_of_modules,
    usable_components,
)
from forgather.ml.checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLoadError,
    CheckpointSaveError,
    CheckpointVersionError,
    OutputDirLockedError,
    ReplicationError,
    StateDecodingError,
    StateEncodingError,
)
from forgather.ml.checkpoint.files.layout import IN_FOLDER
from forgather.ml.checkpoint.manifest import CheckpointManifest, FileRecord, utc_now
from forgather.ml.checkpoint.rank_layout import RankLayout, StorageScope
from forgather.ml.checkpoint.state.optimizer_state import OptimizerState
from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.checkpoint.storage import newest_checkpoint
from forgather.ml.checkpoint.weights.index import ShardIndex
from forgather.ml.distributed import DistributedEnvInterface, Peers
from forgather.ml.utils import unwrap_model

__all__ = [
    "CheckpointCoordinator",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointLoadError",
    "CheckpointSaveError",
    "CheckpointVersionError",
    "OutputDirLockedError",
    "ReplicationError",
    "StateDecodingError",
    "StateEncodingError",
]

# Imported where they are used: a run needs none of the code that reads and writes files before its first step.
if TYPE_CHECKING:
    from forgather.ml.checkpoint.foreign.report import ImportReport
    from forgather.ml.checkpoint.snapshot import Snapshot, SnapshotTaker

logger = logging.getLogger(__name__)

# Files that show whether storages which should be separate are the same directory. Removed before the commit.
_LEADER_MARK = ".leader-"


class CheckpointCoordinator:
    """Saves and loads components on all ranks together. Every rank constructs one and calls its methods.

    `model` is the full model, or a stand-in with its configuration. `model_parts` are the modules of this rank if it
    does not hold the full model, such as pipeline stages. `storage_scope` is "job" if all ranks share one output
    directory, "node" or "rank" if each node or rank has a separate directory.
    """

    def __init__(
        self,
        state_components: Sequence[StateComponent],
        process_groups: Mapping[str, ProcessGroup],
        dist: DistributedEnvInterface,
        output_dir: str,
        save_safetensors: bool = True,
        model: nn.Module | None = None,
        model_parts: Sequence[nn.Module] | None = None,
        shard_index: ShardIndex | None = None,
        *,
        model_preprocessor: object = None,
        mesh: DeviceMesh | None = None,
        trainer_class: str | None = None,
        storage_scope: StorageScope = "job",
        save_on_local_rank: int = 0,
        checkpoint_layout: str = IN_FOLDER,
    ) -> None:
        _require_process_group(dist)
        self._env = dist
        self._output_dir, self._checkpoint_layout = output_dir, checkpoint_layout
        self._mesh = mesh
        self._trainer_class = trainer_class
        self._storage_scope = storage_scope
        self._save_on_local_rank = save_on_local_rank
        self._save_safetensors = save_safetensors
        self._shard_index = shard_index
        # Checkpoints store the FQNs of the plain model. DDP and torch.compile add prefixes.
        self._model = None if model is None else unwrap_model(model)
        self._given_parts = None if model_parts is None else [unwrap_model(part) for part in model_parts]
        self._model_preprocessor = model_preprocessor
        self._layout: RankLayout | None = None
        self.import_report: ImportReport | None = None
        """Report of the last load, if it imported a checkpoint of another program."""
        self.declare(state_components, process_groups)

    def declare(self, state_components: Sequence[StateComponent], process_groups: Mapping[str, ProcessGroup]) -> None:
        """Replace the declared components; the next save or load uses them. Not collective."""
        check_declaration(state_components, process_groups)
        self._process_groups = process_groups
        usable = usable_components(state_components)
        self._left_out = {one.key for one in state_components} - {one.key for one in usable}
        parts = self._parts_of(usable)
        self._components = [_adapt_optimizer(component, parts) for component in usable]
        # The component "model" may hold an object that is not a module. Its state is then saved as a plain state file.
        self._model_parts = parts if self._has_weights(usable) else None

    def _parts_of(self, components: Sequence[StateComponent]) -> list[nn.Module]:
        """Return this rank's modules: `model_parts` if passed, else the declared modules, else the model."""
        if self._given_parts is not None:
            return self._given_parts
        declared = next((one.stateful for one in components if one.key == MODEL_KEY), None)
        if is_list_of_modules(declared):
            return [unwrap_model(part) for part in declared]
        model = declared if isinstance(declared, nn.Module) else self._model
        return [] if model is None else [unwrap_model(model)]

    def _has_weights(self, components: Sequence[StateComponent]) -> bool:
        """Return whether the component "model" consists of modules, so that it is saved as weight files."""
        if self._given_parts is not None:
            return True
        declared = next((one.stateful for one in components if one.key == MODEL_KEY), self._model)
        return isinstance(declared, nn.Module) or is_list_of_modules(declared)

    @property
    def component_keys(self) -> list[str]:
        """Keys of the components that a save writes and a load reads."""
        return [component.key for component in self._components]

    @property
    def layout(self) -> RankLayout | None:
        """Layout of ranks at the last save or load."""
        return self._layout

    @property
    def random_state(self) -> RNGState | None:
        """The `RNGState` among the components, under any key."""
        return next((one.stateful for one in self._components if isinstance(one.stateful, RNGState)), None)

    def save_checkpoint(
        self,
        checkpoint_path: str | None = None,
        checkpoint_id: str | int | None = None,
        validate: bool = False,
        *,
        step: int | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        metadata: Mapping[str, object] | None = None,
        before_commit: Callable[[str], None] | None = None,
    ) -> str:
        """Save all components in one transaction and return the path of the checkpoint. Collective.

        `validate=True` compares the copies of every component that has copies; components that declare
        `validate_replication` are always compared. `extra_files` are small files to add. `step` is recorded if the
        path does not contain one. `before_commit` is called with the path, on the committing rank, before the commit.
        """
        path, step = self.target_of(checkpoint_path, checkpoint_id, step)
        snapshot = self.take_snapshot(validate, extra_files)
        self.write_snapshot(snapshot, path, step, metadata, before_commit=before_commit)
        return path

    def load_checkpoint(
        self, checkpoint_path: str | None = None, strict: bool = True, *, skip: Collection[str] = ()
    ) -> None:
        """Load all components, by default from the newest complete checkpoint of the output directory. Collective.

        `strict=False` allows tensors that are only in the model or only in the checkpoint. Components in `skip` keep
        their current state. A checkpoint of another program is imported, and one message lists the state that is not.
        """
        peers = Peers.world()
        layout = self._discover(peers)
        if checkpoint_path is None:
            checkpoint_path = self._newest_checkpoint(peers)
        # Optional components without state are not loaded anyway. Their keys must not be reported as unknown.
        skip = [key for key in skip if key not in self._left_out]
        from forgather.ml.checkpoint.foreign.importing import foreign_owner, import_checkpoint
        from forgather.ml.checkpoint.reader import CheckpointReader

        owner = foreign_owner(checkpoint_path, peers)
        if owner is not None:
            parts = self._model_parts or []
            self.import_report = import_checkpoint(
                checkpoint_path, owner, self._components, parts, peers, model=self._model, strict=strict, skip=skip
            )
            return
        reader = CheckpointReader(checkpoint_path, self._components, self._model_parts, layout, peers)
        reader.load(strict, skip)

    def export_model(self, output_dir: str, overwrite: bool = False) -> None:
        """Write only the model, into a directory that may contain other files. Collective."""
        peers = Peers.world()
        layout = self._discover(peers)
        component = self._component_to_export()
        snapshot = self._snapshot_taker([component], layout, peers).take(False, {}, is_export=True)
        from forgather.ml.checkpoint.weights.export import ModelExport

        export = ModelExport(os.path.abspath(output_dir), peers.broadcast(store.new_attempt()))

        # Two agreements, because files are installed only after all ranks have written theirs.
        def write() -> None:
            snapshot.write(export.temporary_path, layout.rank, begin=lambda: export.begin(overwrite))

        def install() -> None:
            if layout.leads_storage:
                export.verify(snapshot.weight_names)
                export.install()

        try:
            on_every_rank(peers, write, f"writing the model to {output_dir}", CheckpointSaveError)
            on_every_rank(peers, install, f"installing the model in {output_dir}", CheckpointSaveError)
            export.clean_up()
        except CheckpointError as error:
            # As in `write_snapshot`: without contact, the leader may still be installing these files.
            if layout.leads_storage or not error.contact_lost:
                export.clean_up()
            raise

    def _component_to_export(self) -> StateComponent:
        declared = next((one for one in self._components if one.key == MODEL_KEY), None)
        if declared is not None:
            return declared
        if self._model is None:
            raise ValueError("There is no model to export: the coordinator was constructed without a model.")
        return StateComponent(MODEL_KEY, self._model, SharingPattern.GLOBAL)

    def take_snapshot(
        self, validate: bool = False, extra_files: Mapping[str, bytes] | None = None, *, compares_later: bool = False
    ) -> "Snapshot":
        """Collect the state of this rank and plan its files with the other ranks. Collective.

        `compares_later` leaves the comparison of replicas to a background save (`background/comparison.py`).
        """
        peers = Peers.world()
        taker = self._snapshot_taker(self._components, self._discover(peers), peers)
        return taker.take(validate, extra_files or {}, compares_later=compares_later)

    def _snapshot_taker(
        self, components: Sequence[StateComponent], layout: RankLayout, peers: Peers
    ) -> "SnapshotTaker":
        from forgather.ml.checkpoint.snapshot import SnapshotTaker

        return SnapshotTaker(
            components=components,
            model=self._model,
            model_parts=self._model_parts,
            model_preprocessor=self._model_preprocessor,
            shard_index=self._shard_index,
            safetensors=self._save_safetensors,
            process_groups=self._process_groups,
            layout=layout,
            peers=peers,
        )

    def write_snapshot(
        self,
        snapshot: "Snapshot",
        path: str,
        step: int | None = None,
        metadata: Mapping[str, object] | None = None,
        peers: Peers | None = None,
        before_commit: Callable[[str], None] | None = None,
    ) -> None:
        """Write a snapshot in one transaction. Collective over `peers`, by default all ranks of the job.

        Groups and storages are the ones `take_snapshot` discovered.
        """
        peers = peers or Peers.world()
        layout = self._layout or self._discover(peers)
        # The attempt is broadcast because it is part of the temporary directory's name, which all ranks write into.
        transaction = store.Transaction(os.path.abspath(path), peers.broadcast(store.new_attempt()))
        sizes = on_every_rank(peers, lambda: snapshot.num_bytes, "sizing the checkpoint", CheckpointSaveError)
        # Ranks that share a disk also share its free space.
        needed = sum(sizes[member] for member in layout.storage)
        # Each agreement is also a barrier: no rank writes before the directories exist, and no rank commits before
        # every file of every rank is on disk.
        try:
            on_every_rank(
                peers,
                lambda: _begin(transaction, needed, layout),
                "preparing the checkpoint directory",
                CheckpointSaveError,
            )
            written = on_every_rank(
                peers,
                lambda: _write_files(transaction, snapshot, needed, layout),
                "writing checkpoint files",
                CheckpointSaveError,
            )
            records = [record for records in written for record in records]
            on_every_rank(
                peers,
                lambda: self._commit(layout, transaction, snapshot, records, step, metadata, before_commit),
                "committing the checkpoint",
                CheckpointSaveError,
            )
        except BaseException as error:
            # Without contact, this rank does not know whether the leader is still committing, and might empty the
            # directory that is being renamed. The leader knows, and rolls back after it has stopped.
            if layout.leads_storage or not getattr(error, "contact_lost", False):
                _roll_back(transaction)
            raise

    def _commit(
        self,
        layout: RankLayout,
        transaction: store.Transaction,
        snapshot: "Snapshot",
        records: Sequence[FileRecord],
        step: int | None,
        metadata: Mapping[str, object] | None,
        before_commit: Callable[[str], None] | None,
    ) -> None:
        from forgather.ml.checkpoint.snapshot import describe_components

        if not layout.leads_storage:
            return
        if before_commit is not None:
            before_commit(transaction.final_path)
        # The mark is in no manifest and must not become part of the checkpoint.
        if len(layout.storages) > 1:
            os.remove(transaction.path_of(f"{_LEADER_MARK}{layout.rank}"))
        # With separate storages, each manifest lists only the files in its own directory.
        here = [record for record in records if layout.storage_of[record.writer_rank] == layout.storage_of[layout.rank]]
        transaction.commit(
            CheckpointManifest(
                checkpoint_path=transaction.final_path,
                world_size=layout.world_size,
                timestamp=utc_now(),
                components=describe_components(snapshot, here, layout),
                forgather_version=forgather.__version__,
                pytorch_version=torch.__version__,
                metadata=dict(metadata or {}),
                step=step,
                trainer_class=self._trainer_class,
                mesh=_describe_mesh(self._mesh),
                num_nodes=len(layout.nodes),
                attempt=transaction.attempt,
                weights=self._where_weights_are(snapshot),
                files=sorted(here, key=lambda record: record.path),
            )
        )

    def _where_weights_are(self, snapshot: "Snapshot") -> str:
        if any(component.key == MODEL_KEY for component in snapshot.components):
            return "included"
        return "none" if self._model is None else "external"

    def target_of(self, path: str | None, checkpoint_id: str | int | None, step: int | None) -> tuple[str, int | None]:
        """Return the path and the step of a save."""
        if path is None:
            if checkpoint_id is None:
                raise ValueError("save_checkpoint needs a checkpoint_path or a checkpoint_id (the step).")
            path = store.checkpoint_path(self._output_dir, checkpoint_id, self._checkpoint_layout)
        # The step in the name takes precedence, so that the name and the manifest agree.
        named_step = store.step_of(path)
        return path, step if named_step is None else named_step

    def _newest_checkpoint(self, peers: Peers) -> str:
        looks = self._storage_scope != "job" or peers.rank == 0

        def find() -> str:
            return newest_checkpoint(self._output_dir, self._checkpoint_layout) if looks else ""

        # In shared storage rank 0 chooses for all ranks. With separate storages each rank uses its own path, and the
        # reader checks that all of them are the same save.
        paths = on_every_rank(peers, find, "looking for a checkpoint", CheckpointLoadError)
        return paths[0] if self._storage_scope == "job" else paths[peers.rank]

    def _discover(self, peers: Peers) -> RankLayout:
        """Return the layout of ranks over groups, nodes and storages. Collective, at every save and load."""
        self._layout = RankLayout.discover(
            peers, self._env, self._process_groups, self._storage_scope, self._save_on_local_rank
        )
        return self._layout


def _adapt_optimizer(component: StateComponent, parts: Sequence[nn.Module]) -> StateComponent:
    """Wrap a plain torch optimizer, which identifies parameters by position, so that its state is keyed by FQN."""
    if not parts or not isinstance(component.stateful, torch.optim.Optimizer):
        return component
    # Training may have changed the options of the optimizer by now, so they follow the checkpoint at a load.
    named = [pair for part in parts for pair in part.named_parameters()]
    return replace(component, stateful=OptimizerState(component.stateful, named, knows_configuration=False))


def _roll_back(transaction: store.Transaction) -> None:
    try:
        transaction.roll_back()
    except OSError as error:
        # Only warn, so that the caller raises the error that made the save fail.
        logger.warning(
            "%s could not be removed (%s). It is harmless, and the next start removes it.",
            transaction.temporary_path,
            error,
        )


def _begin(transaction: store.Transaction, needed_bytes: int, layout: RankLayout) -> None:
    with transaction.accounting_for(needed_bytes):
        transaction.begin(needed_bytes)
    # `_refuse_shared_storage` looks for these marks after the next agreement, when all leaders have written theirs.
    if len(layout.storages) > 1 and layout.leads_storage:
        with open(transaction.path_of(f"{_LEADER_MARK}{layout.rank}"), "x"):
            pass


def _write_files(
    transaction: store.Transaction, snapshot: "Snapshot", needed_bytes: int, layout: RankLayout
) -> list[FileRecord]:
    with transaction.accounting_for(needed_bytes):
        return snapshot.write(
            transaction.temporary_path, layout.rank, begin=lambda: _refuse_shared_storage(transaction, layout)
        )


def _refuse_shared_storage(transaction: store.Transaction, layout: RankLayout) -> None:
    """Raise `OSError` if storages that should be separate are one directory: the last commit would win."""
    if len(layout.storages) == 1:
        return
    marks = [name for name in os.listdir(transaction.temporary_path) if name.startswith(_LEADER_MARK)]
    if len(marks) > 1:
        raise OSError(
            f"{os.path.dirname(transaction.final_path)} is shared by several nodes or ranks, but save_on_each_node and "
            "save_on_all_ranks need separate storage for each of them. Turn these settings off for shared storage, or "
            "give each node or rank its own output_dir."
        )


def _describe_mesh(mesh: DeviceMesh | None) -> dict[str, list[int] | list[str]] | None:
    if mesh is None:
        return None
    return {"shape": list(mesh.shape), "axis_names": list(mesh.mesh_dim_names or ())}


def _require_process_group(env: DistributedEnvInterface) -> None:
    # Without a process group, every rank would act as the only rank, and all of them would write the same files.
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    if env.world_size > 1 and not initialised:
        raise RuntimeError(
            f"The environment has world_size={env.world_size}, but torch.distributed is not initialised, so ranks "
            "cannot coordinate a checkpoint. Construct a DistributedEnvironment or call init_process_group first."
        )
