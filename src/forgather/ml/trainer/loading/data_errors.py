"""Errors of datasets and collators that name the sample, the DataLoader worker and the remedy.

Each `DataError` has the error of the dataset or the collator as its cause. The loaders and their workers call this module.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import get_worker_info

from forgather.ml.trainer.loading.data_types import CollateFn, MapDataset

_NUM_SHOWN = 8


class DataError(ValueError):
    """Failure of a dataset or a collator; the message names the sample and the worker, `__cause__` is the error."""

    def __init__(self, message: str) -> None:
        # A DataLoader re-raises an error of a worker with a formatted traceback as the only argument. Put the message
        # first.
        if message.startswith(f"Caught {type(self).__name__} in "):
            marker = f"{type(self).__module__}.{type(self).__qualname__}: "
            details, _, own = message.rpartition(marker)
            message = f"{own.strip()}\n\n{details.strip()}" if details else message
        super().__init__(message)


class ReadSamples(list[Any]):
    """Samples of one batch, with their indices in the dataset for error messages."""

    def __init__(self, samples: list[Any], indices: Sequence[int], dataset: object) -> None:
        super().__init__(samples)
        self.indices = indices
        self.dataset = dataset


class ExplainingCollator:
    """Collator wrapper that adds the samples to the message if the collator raises."""

    def __init__(self, collate_fn: CollateFn, is_own: bool) -> None:
        self.collate_fn = collate_fn
        self._is_own = is_own

    def __call__(self, samples: list[Any]) -> object:
        try:
            if self._is_own:
                return self.collate_fn(samples)
            # The user's collator gets a plain list: it may test the exact type.
            return self.collate_fn(list(samples) if isinstance(samples, ReadSamples) else samples)
        except Exception as error:
            if not self._is_own:
                # Name the user's collator, not the wrapper that removes columns.
                inner = getattr(self.collate_fn, "wrapped", self.collate_fn)
                raise DataError(_collator_message(inner, samples, error)) from error
            if get_worker_info() is None:
                raise
            # The default collator already explains the error. As a DataError its message comes before the traceback of
            # the worker.
            raise DataError(str(error)) from error


def read_samples(dataset: MapDataset, indices: list[int]) -> object:
    """Return the samples with these indices; raise DataError with the index of the sample that failed."""
    fetch_many = getattr(dataset, "__getitems__", None)
    if fetch_many is not None:
        try:
            fetched = fetch_many(indices)
        except Exception as error:
            # Read the samples one by one to find the faulty sample.
            for index in indices:
                _read_one(dataset, index)
            raise DataError(_sample_message(dataset, indices, error)) from error
        return ReadSamples(fetched, indices, dataset) if isinstance(fetched, list) else fetched
    samples: list[object] = []
    try:
        for index in indices:
            samples.append(dataset[index])
    except Exception as error:
        raise DataError(_sample_message(dataset, [indices[len(samples)]], error)) from error
    return ReadSamples(samples, indices, dataset)


def stream_error(iterator: object, number: int, error: Exception) -> DataError:
    """Return the error for a stream that raised instead of yielding this sample, counted from 0."""
    # Python turns a StopIteration inside a generator into a RuntimeError with the StopIteration as its cause.
    if isinstance(error.__cause__, StopIteration):
        remedy = _stop_iteration("the dataset's __iter__")
        raised = "StopIteration"
    else:
        remedy = "Iterate over the dataset outside of training to reproduce it. Repair the sample, or skip it in the dataset."
        raised = _described(error)
    return DataError(
        f"Reading sample {number} of a stream ({_stream_name(iterator)}; counted from 0{_worker()}) raised {raised}. {remedy}"
    )


def place_of(samples: Sequence[object], position: int) -> str:
    """Return a description of one sample of a batch, with its index in the dataset if that is known."""
    if isinstance(samples, ReadSamples):
        return f"sample {samples.indices[position]} of the dataset ({_name_of(samples.dataset)})"
    return f"sample {position} of a batch of {len(samples)}"


def _read_one(dataset: MapDataset, index: int) -> None:
    try:
        dataset[index]
    except Exception as error:
        raise DataError(_sample_message(dataset, [index], error)) from error


def _sample_message(dataset: MapDataset, indices: list[int], error: Exception) -> str:
    name = _name_of(dataset)
    which = f"Sample {indices[0]}" if len(indices) == 1 else f"One of the samples {_listed(indices)}"
    happened = f"{which} of the dataset {name} ({_length(dataset)}{_worker()}) raised {_described(error)}."
    if isinstance(error, StopIteration):
        return f"{happened} {_stop_iteration('its __getitem__')}"
    if isinstance(error, IndexError):
        happened += " The index is below its __len__: check that __len__ is not larger than the number of samples."
    return (
        f"{happened} Read it with dataset[{indices[0]}] to reproduce the error. Repair the sample, or skip it, such as with "
        "torch.utils.data.Subset."
    )


def _collator_message(collate_fn: object, samples: object, error: Exception) -> str:
    size = f"{len(samples)} samples" if isinstance(samples, Sequence) else f"a {type(samples).__name__}"
    numbers, shown = "", "..."
    if isinstance(samples, ReadSamples):
        numbers = f", numbers {_listed(samples.indices)} of the dataset ({_name_of(samples.dataset)})"
        shown = str(list(samples.indices[:_NUM_SHOWN]))
    call = f"data_collator([dataset[i] for i in {shown}])"
    return (
        f"The data_collator ({_name_of(collate_fn)}) raised {_described(error)} for a batch of {size}{numbers}{_worker()}. "
        f"It got {_kinds(samples)}. Call {call} to reproduce the error. Change the collator or the samples, so that they fit "
        "each other."
    )


def _kinds(samples: object) -> str:
    """Return a short description of the types of the samples."""
    # The most common cause is a collator that expects another type of sample.
    if not isinstance(samples, Sequence) or not samples:
        return f"a {type(samples).__name__}"
    kinds = list(dict.fromkeys(_kind(sample) for sample in samples))
    missing = [place_of(samples, place) for place, sample in enumerate(samples) if sample is None]
    text = "samples that are " + " or ".join(kinds[:3])
    return f"{text} ({', '.join(missing[:_NUM_SHOWN])})" if missing else text


def _kind(sample: object) -> str:
    if sample is None:
        return "None"
    if isinstance(sample, Mapping):
        return f"a {type(sample).__name__} with the keys {list(sample)[:_NUM_SHOWN]}"
    return f"a {type(sample).__name__}"


def _described(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}".rstrip(".") if text else type(error).__name__


def _stop_iteration(where: str) -> str:
    return (
        f"It comes from a next(...) without a default in {where}, and would have ended the epoch silently. Pass a default to "
        "next(), or catch StopIteration there."
    )


def _worker() -> str:
    worker = get_worker_info()
    return "" if worker is None else f", in DataLoader worker {worker.id} of {worker.num_workers}"


def _listed(indices: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in indices[:_NUM_SHOWN])
    return shown + (", ..." if len(indices) > _NUM_SHOWN else "")


def _length(dataset: MapDataset) -> str:
    return f"{len(dataset)} samples"


def _stream_name(iterator: object) -> str:
    # The qualified name of a generator names its function, such as Lines.__iter__.
    return str(getattr(iterator, "__qualname__", None) or type(iterator).__qualname__)


def _name_of(item: object) -> str:
    return str(getattr(item, "__qualname__", None) or type(item).__qualname__)
