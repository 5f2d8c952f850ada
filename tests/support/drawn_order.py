"""Data order of runs that began before the order had a version: drawn by `torch.randperm`."""

from typing import Any

import torch

from forgather.ml.trainer.loading.data_order import stable_seed


def drawn_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """Return the samples of an epoch in the order of older runs, without the library's code for it."""
    generator = torch.Generator().manual_seed(stable_seed(seed, epoch))
    return torch.randperm(num_samples, generator=generator).tolist()


def without_version(position: Any) -> dict[str, Any]:
    """Return a position as older runs saved it."""
    return {key: value for key, value in position.items() if key != "order_version"}


class DrawnOrder:
    """A callback that starts a run at a position without a version, as if an older version had begun it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any, **_: Any) -> None:
        if state.global_step == 0:
            train_dataloader.load_state_dict(without_version(train_dataloader.state_dict()))
