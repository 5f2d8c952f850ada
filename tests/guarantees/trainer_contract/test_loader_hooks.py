"""Hooks that set loaders: any iterable of dicts trains and resumes exactly."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from forgather.ml.trainer.trainer import Trainer
from tests.guarantees.trainer_contract.prepared import SAMPLES, batches, build, train
from tests.support.data_parallel import Result, assert_same_training, run


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(build(tmp_path_factory.mktemp("expected"), num_train_epochs=2))


class Stateful:
    """Loader with its own position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < 6:
            self.position += 1
            yield batches()[self.position - 1]
        self.position = 0

    def __len__(self) -> int:
        return 6

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Plain:
    """Iterable without length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(batches())


LOADERS = {
    "list": batches,
    "iterable": Plain,
    "stateful": Stateful,
    "torch": lambda: DataLoader(SAMPLES, batch_size=2),  # type: ignore[arg-type]
}


def init_loaders(make: Any) -> Any:
    class Own(Trainer):
        def _init_dataloaders(self, train_dataset: Any, eval_dataset: Any) -> None:
            if train_dataset is not None:
                self.train_dataloader = make()
            self.eval_dataloader = make()

    return Own


def get_loader(make: Any) -> Any:
    class Own(Trainer):
        def _get_dataloader(self, dataset: Any, batch_size: int) -> Any:
            return make()

    return Own


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("by", [init_loaders, get_loader])
def test_any_iterable_of_dicts_is_accepted_as_loader(name: str, by: Any, tmp_path: Path, expected: Result) -> None:
    own, limit = by(LOADERS[name]), {"max_steps": 6} if name == "iterable" else {}
    trainer, result = train(tmp_path, own, **limit)
    assert_same_training(result, expected)
    assert bool(trainer.train_dataloader)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("by", [init_loaders, get_loader])
def test_custom_loader_resumes_exactly(name: str, by: Any, tmp_path: Path, expected: Result) -> None:
    own, saving = by(LOADERS[name]), {"save_strategy": "steps", "save_steps": 2}
    build(tmp_path, own, max_steps=2, **saving).train()
    resumed = run(build(tmp_path, own, max_steps=6, **saving))
    assert resumed.losses == expected.losses[2:]
    assert all(torch.equal(expected.weights[key], value) for key, value in resumed.weights.items())


def test_stateful_loader_does_not_replay_batches(tmp_path: Path) -> None:
    read: list[int] = []

    class Reading(Stateful):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                read.append(self.position)
                yield batch

    saving = {"save_strategy": "steps", "save_steps": 2}
    build(tmp_path, init_loaders(Stateful), max_steps=2, **saving).train()
    build(tmp_path, init_loaders(Reading), max_steps=3, **saving).train()
    assert read == [5, 6]


def test_evaluation_loader_of_the_hook_is_used(tmp_path: Path) -> None:
    read: list[int] = []

    class Noted:
        def __iter__(self) -> Iterator[Any]:
            for batch in batches()[:2]:
                read.append(len(batch["labels"]))
                yield batch

    class Own(Trainer):
        def _init_dataloaders(self, train_dataset: Any, eval_dataset: Any) -> None:
            super()._init_dataloaders(train_dataset, None)
            self.eval_dataloader = Noted()

    options = {"eval_dataset": SAMPLES}
    trainer = build(tmp_path, Own, trainer_options=options, eval_strategy="steps", eval_steps=2, max_steps=2)
    trainer.train()
    assert read == [2, 2]
    trainer.evaluate()
    assert read == [2, 2] * 2
    trainer.evaluate(SAMPLES[:4])
    assert read == [2, 2] * 2
