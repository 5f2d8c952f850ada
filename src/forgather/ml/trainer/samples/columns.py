"""Unused columns (`remove_unused_columns`): keeps the columns of a dataset that the model's forward accepts.

A `datasets.Dataset` loses its other columns by its own method. Samples of other datasets lose them before collation, in
the process that collates. The trainer calls `UsedColumns` for each loader it builds.
"""

import inspect
import logging
from collections.abc import Iterable, Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import get_worker_info

from forgather.ml.checkpoint.state.rng import undisturbed_random_numbers
from forgather.ml.distributed.environment import get_rank
from forgather.ml.trainer.loading.builders import kind_of
from forgather.ml.trainer.loading.collation import collate_samples
from forgather.ml.trainer.loading.data_errors import ReadSamples
from forgather.ml.trainer.loading.data_types import CollateFn
from forgather.ml.utils import unwrap_model

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

_LABEL_COLUMNS = ("label", "label_ids", "labels")
"""Columns that collators turn into labels."""


class UsedColumns:
    """Columns that the model of a trainer uses; without `remove_unused_columns` all of them."""

    def __init__(self, trainer: "Trainer[Any]") -> None:
        self._trainer = trainer
        self._names: frozenset[str] | None = None

    def of(self, dataset: Any) -> Any:
        """Return the dataset with the used columns, if it can remove columns itself; otherwise the dataset."""
        names = self.names
        if names is None or not _can_remove_columns(dataset):
            return dataset
        unused = [name for name in dataset.column_names if name not in names]
        _require_rest(dataset.column_names, unused, names)
        if unused and get_rank() == 0:
            _log(unused, f"a {type(dataset).__name__}")
        return dataset.remove_columns(unused)

    def collator(self) -> CollateFn | None:
        """Return the trainer's collator, which gets samples with the used columns."""
        given: CollateFn | None = self._trainer.data_collator
        return given if self.names is None else UsedColumnsCollator(given, self.names)

    @property
    def names(self) -> frozenset[str] | None:
        """Names of the used columns; None if all columns are kept."""
        trainer = self._trainer
        if not trainer.args.remove_unused_columns:
            return None
        if self._names is None:
            with trainer.team.agreement("finding the columns that the model uses"):
                own = used_names(_model_of(trainer), getattr(trainer.args, "label_names", None) or ())
            self._names = own or frozenset()
        return self._names or None


class UsedColumnsCollator:
    """Collator that removes unused columns from samples that are mappings; other samples stay as they are."""

    def __init__(self, collate_fn: CollateFn | None, names: frozenset[str]) -> None:
        self.wrapped = collate_samples if collate_fn is None else collate_fn
        self.is_own = collate_fn is None
        self._names = names
        self._has_logged = False

    def __call__(self, samples: list[Any]) -> Any:
        kept = [self._kept(sample) for sample in samples]
        if isinstance(samples, ReadSamples):
            # The default collator names the index of a faulty sample.
            kept = ReadSamples(kept, samples.indices, samples.dataset)
        return self.wrapped(kept)

    def _kept(self, sample: Any) -> Any:
        if not isinstance(sample, Mapping):
            return sample
        unused = [name for name in sample if name not in self._names]
        if not unused:
            return sample
        if not self._has_logged:
            self._has_logged = True
            _require_rest(sample, unused, self._names)
            worker = get_worker_info()
            if get_rank() == 0 and (worker is None or worker.id == 0):
                _log(unused, "the samples")
        return {name: value for name, value in sample.items() if name in self._names}


def used_names(model: nn.Module, label_names: Iterable[str]) -> frozenset[str] | None:
    """Return the arguments of the model's forward and the label columns; None if forward accepts any name."""
    inner: Any = unwrap_model(model)
    # A PEFT model passes its arguments on to the base model.
    forward = inner.get_base_model().forward if hasattr(inner, "get_base_model") else inner.forward
    named = [
        name
        for name, one in inspect.signature(forward).parameters.items()
        if one.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    ]
    return frozenset((*named, *label_names, *_LABEL_COLUMNS)) if named else None


def _model_of(trainer: "Trainer[Any]") -> nn.Module:
    """Return the trainer's model, or one without memory from `model_init`, since loaders are built before the model."""
    if trainer.model is not None:
        model: nn.Module = trainer.model
        return model
    assert trainer.model_init is not None, "the constructor requires one of the two"
    with undisturbed_random_numbers():
        try:
            with torch.device("meta"):
                return trainer.model_init()
        except Exception as error:  # noqa: BLE001 - some models cannot be built without memory
            logger.debug("The model could not be built on the meta device: %s", error)
            return trainer.model_init()


def _can_remove_columns(dataset: Any) -> bool:
    """Return whether a dataset is a `datasets.Dataset` without a transform, which may need the unused columns."""
    # A stream keeps its columns until collation, because its saved position must not depend on them.
    is_own = any(base.__module__.partition(".")[0] == "datasets" for base in type(dataset).__mro__)
    if not is_own or not hasattr(dataset, "remove_columns") or kind_of(dataset) != "map":
        return False
    return (getattr(dataset, "format", None) or {}).get("type") != "custom"


def _require_rest(columns: Iterable[str], unused: list[str], names: frozenset[str]) -> None:
    columns = list(columns)
    if columns and len(unused) == len(columns):
        raise ValueError(
            f"remove_unused_columns=True would remove all columns, {columns}: the model's forward accepts "
            f"{sorted(names - set(_LABEL_COLUMNS))}. Rename the columns, or set remove_unused_columns=False and let the "
            "data_collator build the model's arguments from them."
        )


def _log(unused: list[str], owner: str) -> None:
    logger.info("Columns of %s that the model's forward does not accept are removed: %s.", owner, ", ".join(unused))
