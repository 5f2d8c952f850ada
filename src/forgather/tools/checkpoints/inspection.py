"""Description of one checkpoint from its manifest and file headers: components, files, topology, trainer, versions.

Tensors are listed by name, shape and dtype, without reading their content.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.checkpoint.foreign.ownership import require_own
from forgather.ml.checkpoint.manifest import CheckpointManifest, ComponentManifest
from forgather.tools.checkpoints.configuration import stored_settings
from forgather.tools.checkpoints.listing import ListedCheckpoint, list_checkpoints
from forgather.tools.checkpoints.paths import find_checkpoint
from forgather.tools.checkpoints.stored_state import read_stored_state


@dataclass(frozen=True)
class FileDetails:
    """One file of a checkpoint, from its manifest record."""

    path: str
    size_bytes: int
    writer_rank: int
    owner_ranks: Sequence[int]
    """Ranks that share the state in the file; empty for all ranks."""
    checksum: str
    num_tensors: int


@dataclass(frozen=True)
class ComponentDetails:
    """One component: its sharing pattern and its files. The key "metadata" has the files of no component."""

    key: str
    pattern: str | None
    required: bool
    size_bytes: int
    writer_ranks: Sequence[int]
    group: str | None
    files: Sequence[FileDetails]


@dataclass(frozen=True)
class TensorDetails:
    """Name, shape and dtype of one stored tensor."""

    component: str
    name: str
    shape: Sequence[int]
    dtype: str
    size_bytes: int
    file: str


@dataclass(frozen=True)
class CheckpointDetails:
    """Contents of a checkpoint, and the job that wrote it."""

    path: str
    summary: ListedCheckpoint
    components: Sequence[ComponentDetails]
    mesh: Mapping[str, object] | None
    num_nodes: int
    weights: str
    forgather_version: str | None
    pytorch_version: str | None
    exactness: Mapping[str, str]
    notes: Mapping[str, object] = field(default_factory=dict)
    """Additional entries of the manifest, such as the origin of a modified checkpoint."""
    settings: Mapping[str, object] | None = None
    """Configuration of the run by key, such as "args.max_steps"; None for runs that were started from Python."""
    tensors: Sequence[TensorDetails] | None = None
    """None unless they were requested."""


def inspect_checkpoint(path: str, tensors: bool = False) -> CheckpointDetails:
    """Return the contents of a checkpoint, or of the newest checkpoint of a run; `tensors` lists its tensors.

    Raise `CheckpointError` for a damaged checkpoint or one of another program. Checksums of large files are not
    verified.
    """
    checkpoint = find_checkpoint(path)
    require_own(checkpoint)
    found = store.open_checkpoint(checkpoint)
    manifest = found.manifest
    listed = list_checkpoints(checkpoint).checkpoints[0]
    return CheckpointDetails(
        path=checkpoint,
        summary=listed,
        components=_components_of(manifest),
        mesh=manifest.mesh,
        num_nodes=manifest.num_nodes,
        weights=manifest.weights,
        forgather_version=manifest.forgather_version,
        pytorch_version=manifest.pytorch_version,
        exactness=manifest.exactness,
        notes=manifest.metadata,
        settings=_settings_of(checkpoint),
        tensors=_tensors_of(found) if tensors else None,
    )


def _components_of(manifest: CheckpointManifest) -> list[ComponentDetails]:
    keys = [*manifest.components, *(record.component for record in manifest.files)]
    return [_component(manifest, key, manifest.components.get(key)) for key in dict.fromkeys(keys)]


def _component(manifest: CheckpointManifest, key: str, entry: ComponentManifest | None) -> ComponentDetails:
    files = [
        FileDetails(
            record.path,
            record.size,
            record.writer_rank,
            record.owner_ranks,
            record.checksum,
            # One entry is the checksum of the header.
            max(0, len(record.tensors) - 1),
        )
        for record in manifest.component_files(key)
    ]
    return ComponentDetails(
        key=key,
        pattern=None if entry is None else entry.sharing_pattern,
        required=entry is not None and entry.required,
        size_bytes=sum(file.size_bytes for file in files),
        writer_ranks=sorted({file.writer_rank for file in files}),
        group=None if entry is None else entry.group_name,
        files=files,
    )


def _settings_of(checkpoint: str) -> Mapping[str, object] | None:
    try:
        return stored_settings(checkpoint)
    except (CheckpointError, OSError):
        # Only the configuration is damaged; `verify` reports it.
        return None


def _tensors_of(found: store.FoundCheckpoint) -> list[TensorDetails]:
    state = read_stored_state(found, with_data=False)
    return [
        TensorDetails(
            one.component, one.name, one.shape, str(one.dtype).removeprefix("torch."), one.num_bytes, one.file
        )
        for one in state.tensors.values()
    ]
