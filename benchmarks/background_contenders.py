"""Background saves that the checkpoint benchmark compares: Forgather with async_save, and torch's DCP async_save.

Each measurement runs in a fresh process, which trains all the time. A step multiplies matrices on all cores and changes
weights and moments, so the content of a save is wrong if it is not the state at the moment of the save.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from contenders import OURS, Training
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager
from forgather.ml.distributed import StaticDistributedEnvironment

_NUM_SAVES = 3
_SECONDS_OF_TRAINING = 4.0
# A first save comes minutes after the start of training. This is enough to prepare for it.
_SECONDS_BEFORE_FIRST = 20.0


@dataclass(frozen=True)
class BackgroundMeasurement:
    """One background save: seconds that training was blocked, seconds until the end, share of the rate of steps."""

    blocked: float
    total: float
    rate: float


class _Steps:
    """Training steps that use all cores and change the state."""

    def __init__(self, training: Training) -> None:
        self._tensors = training.tensors()
        self._left, self._right = torch.rand(512, 1024), torch.rand(1024, 1024)
        self._number = 0

    def run(self) -> None:
        for _ in range(4):
            torch.mm(torch.mm(self._left, self._right), self._right)
        self._tensors[self._number % len(self._tensors)].mul_(1.001)
        self._number += 1

    def rate(self, goes_on: Callable[[], bool]) -> float:
        """Run steps as long as `goes_on()`, and return steps per second."""
        start, count = time.perf_counter(), 0
        while goes_on():
            self.run()
            count += 1
        return count / (time.perf_counter() - start)

    def rate_for(self, seconds: float) -> float:
        end = time.perf_counter() + seconds
        return self.rate(lambda: time.perf_counter() < end)


class _Provider:
    def __init__(self, training: Training) -> None:
        self._training = training

    def get_state_components(self) -> list[StateComponent]:
        return [
            StateComponent("model", self._training.model, SharingPattern.GLOBAL),
            StateComponent("optimizer", self._training.optimizer, SharingPattern.GLOBAL),
        ]


# A contender yields a function that starts the save of a step and returns whether the save is still in flight.
_Start = Callable[[int], Callable[[], bool]]


@contextlib.contextmanager
def _ours(training: Training, directory: Path) -> Iterator[_Start]:
    config = CheckpointConfig(output_dir=str(directory), save_total_limit=1)
    environment = StaticDistributedEnvironment()
    manager = CheckpointManager(config, environment, _Provider(training), training.model, async_save=True)
    manager.prepare_background_saves()

    def start(step: int) -> Callable[[], bool]:
        manager.save_checkpoint(checkpoint_id=step)
        return lambda: manager.num_saves[0] > manager.num_saves[1]

    yield start
    manager.close()


@contextlib.contextmanager
def _dcp(training: Training, directory: Path) -> Iterator[_Start]:
    # The stager keeps its copy between saves, as ours does. Pinned memory needs an accelerator.
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
    )
    stager = DefaultStager(options)

    def start(step: int) -> Callable[[], bool]:
        model_state, optimizer_state = get_state_dict(training.model, training.optimizer)
        path = directory / f"step-{step}"
        writer = dcp.FileSystemWriter(path, sync_files=True)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        response: Any = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
        future: Future[Any] = getattr(response, "upload_completion", response)
        return lambda: not future.done()

    yield start
    stager.close()


BACKGROUND = {f"{OURS}, async_save": _ours, "DCP async_save": _dcp}


def measure_background(name: str, num_bytes: int, directory: Path) -> list[BackgroundMeasurement]:
    """Measure the background saves of one process, each between stretches of plain training."""
    training = Training.running(num_bytes)
    steps, found = _Steps(training), []
    directory.mkdir()
    steps.rate_for(1.0)
    with BACKGROUND[name](training, directory) as start:
        steps.rate_for(_SECONDS_BEFORE_FIRST)
        plain = steps.rate_for(_SECONDS_OF_TRAINING)
        for number in range(1, _NUM_SAVES + 1):
            begin = time.perf_counter()
            in_flight = start(number)
            blocked = time.perf_counter() - begin
            rate = steps.rate(in_flight)
            total = time.perf_counter() - begin
            after = steps.rate_for(_SECONDS_OF_TRAINING)
            found.append(BackgroundMeasurement(blocked, total, rate / ((plain + after) / 2)))
            plain = after
    shutil.rmtree(directory)
    return found
