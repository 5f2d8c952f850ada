"""What datasets and the loaders that read them tell each other."""

from collections.abc import Iterator
from typing import Any


def sync_dataset_state_from_dataloader(loader: object) -> None:
    """Let the dataset of this process learn what its copies in the loader's workers found out about its length.

    A dataset that estimates its length while it is read takes part by two methods:

    - `state_dict()`, which runs in the workers and holds what it knows;
    - `sync_length_estimate(state)`, which is called here with such a state, once for each worker in their order. It takes
      over the estimate only: the state also says where the worker is, and this copy is not read.

    Nothing happens for other datasets, for loaders that do not keep their workers' state (torchdata's
    `StatefulDataLoader` does), and before the loader was iterated.
    """
    sync = getattr(getattr(loader, "dataset", None), "sync_length_estimate", None)
    if sync is None:
        return
    for state in _worker_dataset_states(loader):
        sync(state)


def _worker_dataset_states(loader: object) -> Iterator[Any]:
    # Of the loader itself, `state_dict` would start workers to have something to ask.
    state_dict = getattr(getattr(loader, "_iterator", None), "state_dict", None)
    if state_dict is None or not getattr(loader, "num_workers", 0):
        return
    workers = state_dict()["_snapshot"].get("_worker_snapshots", {})
    for worker in sorted(workers.values(), key=lambda worker: int(worker["worker_id"])):
        # A dataset that is its own iterator is reported as the iterator.
        state = worker["dataset_state"] or (worker["fetcher_state"] or {}).get("dataset_iter_state")
        if state is not None:
            yield state
