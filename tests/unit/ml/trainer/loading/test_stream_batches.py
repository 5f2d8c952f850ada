"""Stream batches: torchdata is not needed, and positions saved by torchdata can be resumed."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from forgather.ml.trainer.loading.data_errors import DataError
from forgather.ml.trainer.loading.data_order import seeded_stream, stable_seed
from tests.support.loading import WORKER_IDS, WORKERS, StatefulStream, Stream, as_list, run, stored, train_loader
from tests.support.sampling import sampled

SEED = 11


class Counting(Iterator[int]):
    """Iterator with a state, over a dataset without a state."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.position = numbers, 0

    def __next__(self) -> int:
        if self.position == len(self.numbers):
            raise StopIteration
        self.position += 1
        return self.numbers[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class StreamOfCounting(Stream):
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        offset, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return Counting(range(1000 * self.epoch + offset, 1000 * self.epoch + self.num_samples, step))


def of_torchdata(dataset: Any, options: dict[str, Any]) -> StatefulDataLoader[Any]:
    """Build the torchdata loader that earlier versions used for streams."""
    stream = seeded_stream(dataset, seed=SEED, batch_size=3, forward_epoch=True, in_workers=bool(options))
    loader = StatefulDataLoader(stream, batch_size=3, collate_fn=as_list, **options)
    if loader.generator is not None:
        loader.generator.manual_seed(stable_seed(SEED, 0))
    return loader


@pytest.mark.parametrize("options", WORKERS, ids=WORKER_IDS)
@pytest.mark.parametrize("dataset", sampled([StatefulStream, StreamOfCounting], [StatefulStream]))
def test_positions_saved_by_torchdata_are_resumed(dataset: Any, options: dict[str, Any]) -> None:
    # Noise is drawn only in workers, where generators are seeded for each batch.
    def data() -> Any:
        return dataset(13, noisy=bool(options))

    reader = train_loader(data(), seed=SEED, **options)
    expected = list(run(reader))
    num_batches = len(expected) // 3
    reader.close()
    for position in (1, 2, num_batches):
        loader = of_torchdata(data(), options)
        batches = iter(loader)
        assert list(itertools.islice(batches, position)) == [batch for _, batch in expected[:position]]
        ours = train_loader(data(), seed=SEED, **options)
        list(itertools.islice(run(ours), position))
        state = stored({**ours.state_dict(), "loader": loader.state_dict()})
        ours.close()
        if options:
            batches._shutdown_workers()  # type: ignore[attr-defined]
        resumed = train_loader(data(), seed=SEED, **options)
        resumed.load_state_dict(state)
        assert list(run(resumed)) == expected[position:]
        resumed.close()


class FailingOnce(StatefulStream):
    """Stream that fails before its first sample while `fails` is set."""

    fails = False

    def __iter__(self) -> Iterator[Any]:
        if self.fails:
            raise OSError("the disk is gone")
        yield from super().__iter__()


def test_failure_at_the_start_of_workers_does_not_move_the_position() -> None:
    loader = train_loader(FailingOnce(20), num_workers=2)
    expected = [batch for _, batch in run(loader, num_epochs=1)]
    loader.close()
    dataset = FailingOnce(20)
    loader = train_loader(dataset, num_workers=2)
    before = [batch for _, batch in itertools.islice(run(loader), 3)]
    loader.close()
    dataset.fails = True
    with pytest.raises(DataError, match="OSError: the disk is gone"):
        next(iter(loader))
    dataset.fails = False
    assert before + list(loader) == expected
    loader.close()


WITHOUT_TORCHDATA = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchdata":
            raise ModuleNotFoundError("No module named 'torchdata'", name="torchdata")

sys.meta_path.insert(0, Refusing())

import torch
from torch.utils.data import DataLoader, IterableDataset
import forgather
from forgather.ml.trainer import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, inputs, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layer(inputs), labels)}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples)


samples = [{"inputs": torch.full((2,), float(number)), "labels": torch.zeros(2)} for number in range(8)]
for name, data, workers in (
    ("dataset", samples, 0), ("loader", DataLoader(samples, batch_size=2), 0), ("stream", Stream(), 1)
):
    arguments = TrainingArguments(
        output_dir=f"{sys.argv[1]}/{name}", max_steps=4, save_strategy="steps", save_steps=2,
        per_device_train_batch_size=2, dataloader_num_workers=workers,
    )
    for last in (2, 4):
        arguments.max_steps = last
        trainer = Trainer(model=Model(), args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=last == 4)
        assert trainer.state.global_step == last, (name, trainer.state.global_step)
assert "torchdata" not in sys.modules
print("trained without torchdata")
"""


def test_training_needs_no_torchdata(tmp_path: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCHDATA, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "trained without torchdata" in done.stdout, done.stdout + done.stderr


def test_worker_without_samples_does_not_end_the_others() -> None:
    loader = train_loader(Stream(1), num_workers=2)
    assert list(loader) == [[0]]
    loader.close()
