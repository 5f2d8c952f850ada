"""Import of a checkpoint of another program: weights always; optimizer, schedule and step if their files are safe.

The coordinator calls `import_checkpoint` instead of `CheckpointReader`. All ranks import the same components, or all
raise the same error. The foreign directory is never changed.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import nn

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.components import StateComponent, select_components
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError
from forgather.ml.checkpoint.files.layout import LAYOUTS, checkpoints_root
from forgather.ml.checkpoint.foreign.moments import moments_by_name, possible_orders, require_same_kind
from forgather.ml.checkpoint.foreign.ownership import Owner, recognise
from forgather.ml.checkpoint.foreign.report import ImportReport, LeftOut
from forgather.ml.checkpoint.foreign.schedules import fitting_schedule
from forgather.ml.checkpoint.foreign.training_state import ForeignState, Progress, attempt, read_training_state
from forgather.ml.checkpoint.foreign.weights import load_foreign_weights
from forgather.ml.checkpoint.state.optimizer_state import OptimizerState
from forgather.ml.checkpoint.weights.adapters import AdapterState
from forgather.ml.checkpoint.weights.index import create_sharing_metadata, get_all_fqns
from forgather.ml.checkpoint.weights.safetensors_io import SharingMetadataT
from forgather.ml.distributed import Peers

logger = logging.getLogger(__name__)

T = TypeVar("T")

MODEL, OPTIMIZER, SCHEDULER, TRAINER, DATASET = "model", "optimizer", "scheduler", "trainer", "dataset"
_REASONS = {
    "rng": "random state starts from this run's seed",
    "ema": "the average starts from the imported weights",
}


@runtime_checkable
class ImportsProgress(Protocol):
    """Stateful of the component "trainer" that can resume from the progress of another program."""

    def import_progress(self, global_step: int, epoch: float) -> None:
        """Resume after `global_step` steps and `epoch` (fractional) epochs, at the first batch of the current epoch."""


def foreign_owner(path: str, peers: Peers) -> Owner | None:
    """Return the program that wrote a directory, or None for Forgather's and unknown directories. Collective."""
    # Every rank checks its own view of the file system. Ranks that disagree would reach different collectives and hang.
    owners = on_every_rank(peers, lambda: recognise(path), f"looking at {path}", CheckpointLoadError)
    if len(set(owners)) > 1:
        raise CheckpointLoadError.misfit(
            f"Ranks see different content at {path}. All ranks must see the same directory, or copies of it."
        )
    return owners[0]


def require_loadable(path: str) -> None:
    """Raise `CheckpointError` unless a path is a complete Forgather checkpoint or a directory that can be imported."""
    if recognise(path) is None:
        store.open_checkpoint(path)


def refuse_others(output_dir: str) -> None:
    """Raise `CheckpointLoadError` if the output directory has checkpoints of other programs."""
    others = store.checkpoints_of_others(*(checkpoints_root(output_dir, layout) for layout in LAYOUTS))
    if others:
        path, owner = others[-1]
        raise CheckpointLoadError(
            f"The output directory {output_dir!r} has no Forgather checkpoint to resume from, but "
            f"{path} is {owner.value}. Import it with resume_from_checkpoint={path!r}, choose another output_dir, "
            "or start afresh beside it with resume_from_checkpoint=False. It is never replaced or deleted."
        )


def import_checkpoint(
    path: str,
    owner: Owner,
    components: Sequence[StateComponent],
    model_parts: Sequence[nn.Module],
    peers: Peers,
    *,
    model: nn.Module | None = None,
    strict: bool = True,
    skip: Collection[str] = (),
) -> ImportReport:
    """Import all components that can be imported, log one message with the rest, and return both. Collective.

    `model` is the full model, possibly on the meta device; `model_parts` are the stages of this rank. Components in
    `skip` keep their state. State that does not fit on one rank is skipped on all ranks. Weights that do not fit raise
    `CheckpointLoadError` on all ranks.
    """
    job = _Import(path, owner, components, model_parts, peers, model)
    try:
        report = job.run(strict, skip)
    except CheckpointError as error:
        if path in str(error):
            raise
        # Keep the flags: the manager reads them to decide whether an older checkpoint could help.
        named = type(error)(f"{error}\nThe directory is {path}, {owner.value}.")
        named.is_misfit, named.contact_lost = error.is_misfit, error.contact_lost
        raise named from error
    if peers.rank == 0:
        logger.log(logging.WARNING if report.left_out else logging.INFO, "%s", report.message)
    return report


class _Import:
    """One import, with the same phases on every rank.

    First all ranks read and check the state files, and agree on the components to import. Then they load the weights.
    Last, components load their state, the schedule after the optimizer. All ranks finish a phase before the next begins.
    """

    def __init__(
        self,
        path: str,
        owner: Owner,
        components: Sequence[StateComponent],
        model_parts: Sequence[nn.Module],
        peers: Peers,
        model: nn.Module | None,
    ) -> None:
        self._path = path
        self._owner = owner
        self._components = components
        self._parts = model_parts
        self._whole = [model] if model is not None else list(model_parts)
        self._peers = peers
        self._states: dict[str, Any] = {}

    def run(self, strict: bool, skip: Collection[str]) -> ImportReport:
        skipped = select_components(self._components, skip, "skip_checkpoint_components") if skip else []
        wanted = {one.key: one for one in self._components if one not in skipped}
        # A pipeline rank has only the names of some stages. The weights are checked against the names of all ranks.
        names = self._everywhere(
            lambda: [name for part in self._parts for name in get_all_fqns(part)], "naming tensors"
        )
        all_names = list(dict.fromkeys(name for part in names for name in part))
        sharing = self._sharing()
        left_out, others = self._read(wanted, sharing)
        # The conditions below are equal on all ranks, so that all reach the same collectives.
        has_weights = MODEL in wanted and bool(all_names)
        if has_weights:
            self._everywhere(
                lambda: load_foreign_weights(self._path, self._owner, self._parts, all_names, sharing, strict),
                f"loading weights from {self._path}",
            )
        num_tensors = self._import_adapters(wanted) if not has_weights else len(all_names)
        taken = [key for key in (OPTIMIZER, SCHEDULER, TRAINER) if key in wanted and key not in left_out]
        for key in taken:
            self._everywhere(lambda one=wanted[key]: self._apply(one), f"importing {key!r}")  # type: ignore[misc]
        asked = {one.key: "it is listed in skip_checkpoint_components" for one in skipped}
        return ImportReport(
            path=self._path,
            owner=self._owner,
            taken=(*([f"{MODEL} ({num_tensors} tensors)"] if num_tensors else []), *map(self._described, taken)),
            left_out={**asked, **left_out, **others},
        )

    def _import_adapters(self, wanted: dict[str, StateComponent]) -> int:
        """Load the adapters of a `PeftModel` and return the number of tensors, 0 for other models."""
        stateful = wanted[MODEL].stateful if MODEL in wanted else None
        if not isinstance(stateful, AdapterState):
            return 0
        load = stateful.load_adapter_directory
        return self._everywhere(lambda: load(self._path), f"loading adapters from {self._path}")[0]

    def _everywhere(self, work: Callable[[], T], during: str) -> list[T]:
        return on_every_rank(self._peers, work, during, CheckpointLoadError)

    def _sharing(self) -> SharingMetadataT:
        return [group for module in self._whole for group in create_sharing_metadata(module)]

    def _read(
        self, wanted: dict[str, StateComponent], sharing: SharingMetadataT
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Read and check the state on every rank; return skipped components and further content, each with reasons."""

        def read() -> tuple[dict[str, str], dict[str, str], Progress | LeftOut]:
            found = read_training_state(self._path, self._owner, self._peers.rank, self._peers.size)
            usable = {key: self._usable(one, found, sharing) for key, one in wanted.items() if key != MODEL}
            self._states = {key: state for key, state in usable.items() if not isinstance(state, LeftOut)}
            reasons = {key: state.reason for key, state in usable.items() if isinstance(state, LeftOut)}
            return reasons, found.others, found.progress

        told = self._everywhere(read, f"reading the state in {self._path}")
        # A component that any rank skips is skipped everywhere. The reason of the lowest rank wins.
        left_out = {key: reason for reasons, _, _ in reversed(told) for key, reason in reasons.items()}
        if MODEL not in wanted:
            # Weights never become a LeftOut in `read`: they load, or they fail the import.
            left_out[MODEL] = "it is not among the components that are loaded"
        _, others, progress = told[0]
        others = {**others, DATASET: _position(progress)} if DATASET in left_out else others
        return {key: others.get(key, reason) for key, reason in left_out.items()}, others

    def _usable(self, component: StateComponent, found: ForeignState, sharing: SharingMetadataT) -> Any | LeftOut:
        """Return the checked state for a component, or the reason why it gets none."""
        if component.key == OPTIMIZER:
            return _attempt_with(
                found.optimizer, lambda state: self._moments(component.stateful, state, found, sharing)
            )
        if component.key == SCHEDULER:
            return _attempt_with(found.scheduler, lambda state: fitting_schedule(state, component.stateful))
        if component.key == TRAINER:
            return _attempt_with(found.progress, lambda progress: _importable(progress, component.stateful))
        return LeftOut(_REASONS.get(component.key, "it starts fresh: the directory has no state for it"))

    def _moments(self, stateful: Any, state: Any, found: ForeignState, sharing: SharingMetadataT) -> dict[str, Any]:
        if not isinstance(stateful, OptimizerState):
            raise CheckpointLoadError(f"{type(stateful).__name__} does not identify its parameters by name")
        groups = stateful.state_dict()["param_groups"]
        present = [list(group["params"]) for group in groups]
        # Indices of a file per rank count only the parameters of that rank.
        modules = self._parts if found.is_per_rank else self._whole
        shapes = {name: tuple(one.shape) for module in modules for name, one in module.named_parameters()}
        named = moments_by_name(state, possible_orders(self._owner, modules, present), shapes)
        require_same_kind(named["param_groups"], groups)
        # The other program has a tied parameter under one name only, and a stage may have it under another name.
        stateful.add_tied_names(named, sharing)
        if missing := stateful.missing_names(named):
            raise CheckpointLoadError(f"it has no parameter {missing[0]!r}")
        stateful.check_state_dict(named)
        return named

    def _apply(self, component: StateComponent) -> None:
        state, stateful = self._states[component.key], component.state_holder
        if component.key == TRAINER and hasattr(stateful, "import_progress"):
            # A step from the name of the directory comes without an epoch.
            stateful.import_progress(state.global_step, state.epoch or 0.0)
        else:
            stateful.load_state_dict(state)

    def _described(self, key: str) -> str:
        return f"step {self._states[key].global_step}" if key == TRAINER else key


def _attempt_with(found: Any | LeftOut, use: Callable[[Any], Any]) -> Any | LeftOut:
    return found if isinstance(found, LeftOut) else attempt(lambda: use(found))


def _importable(progress: Progress, stateful: object) -> Progress:
    if not isinstance(stateful, ImportsProgress):
        raise CheckpointLoadError(
            f"the checkpoint is at step {progress.global_step}, but {type(stateful).__name__} has no "
            "import_progress(global_step, epoch), so steps count from its current state"
        )
    return progress


def _position(progress: Progress | LeftOut) -> str:
    """Return a description of the position in the data: known only at the end of an epoch."""
    if isinstance(progress, LeftOut) or progress.epoch is None:
        return "the position in the data is unknown: the data starts at the beginning"
    if progress.epoch.is_integer():
        return f"{progress.epoch:g} epochs were complete: the next one starts at its beginning, in this run's own order"
    return f"the position within the epoch ({progress.epoch:g} epochs were trained) is unknown: the epoch starts again"
