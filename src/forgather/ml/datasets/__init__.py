"""Synchronisation of dataset length estimates between DataLoader workers and the main process.

A public helper: trainers do not call it.
"""

from collections.abc import Iterator
from typing import Any


def sync_dataset_state_from_dataloader(loader: object) -> None:
    """Update the length estimate of the loader's dataset from the copies in its workers.

    A dataset that estimates its length while it is read supports this with two methods:

    - `state_dict()`, which runs in the workers and returns their state;
    - `sync_length_estimate(state)`, which is called here once per worker, in the order of the workers. It must take
      over the estimate only: the state also contains the worker's position, and the copy of this process is not read.

    Other datasets are not touched. Neither are datasets of loaders that do not keep the state of their workers
    (torchdata's `StatefulDataLoader` does), nor of loaders that were not iterated yet.
    """
    sync = getattr(getattr(loader, "dataset", None), "sync_length_estimate", None)
    if sync is None:
        return
    for state in _worker_dataset_states(loader):
        sync(state)


def _worker_dataset_states(loader: object) -> Iterator[Any]:
    # Ask the existing iterator: `loader.state_dict()` would start workers if none are running.
    state_dict = getattr(getattr(loader, "_iterator", None), "state_dict", None)
    if state_dict is None or not getattr(loader, "num_workers", 0):
        return
    workers = state_dict()["_snapshot"].get("_worker_snapshots", {})
    for worker in sorted(workers.values(), key=lambda worker: int(worker["worker_id"])):
        # If a dataset is its own iterator, torchdata reports its state as the iterator's state.
        state = worker["dataset_state"] or (worker["fetcher_state"] or {}).get("dataset_iter_state")
        if state is not None:
            yield state
