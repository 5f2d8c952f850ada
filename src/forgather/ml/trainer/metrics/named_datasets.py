"""Several evaluation datasets by name: a dict of datasets, as `eval_dataset` or passed to `evaluate`.

Each is evaluated under its own prefix, such as `eval_<name>_loss`. The evaluator and the set-up of a run call it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from forgather.ml.trainer.trainer_types import BaseDataset


def datasets_by_name(dataset: BaseDataset | None) -> Mapping[str, Any] | None:
    """Return the dict of datasets; None for a single dataset, or for a dict of columns, which is no dataset."""
    if not isinstance(dataset, dict) or not dataset or all(map(_is_column, dataset.values())):
        return None
    return dataset


def first_dataset(dataset: BaseDataset | None) -> BaseDataset | None:
    """Return the dataset, or the first one of a dict."""
    named = datasets_by_name(dataset)
    return dataset if named is None else next(iter(named.values()))


def _is_column(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        # A list of dicts is a dataset of samples.
        return not (value and isinstance(value[0], Mapping))
    return isinstance(value, (Tensor, np.ndarray))
