"""Phases and progress: work that may take minutes has no limit of a batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from forgather._watch.board import COUNT, PHASE
from forgather.ml.distributed.watch import EVALUATION, EVALUATION_START, LOADING
from forgather.ml.distributed.watch.sentry import current_board
from forgather.ml.trainer import Trainer, TrainingArguments
from tests.support.watch_job import Model


class Phases(dict[str, set[int]]):
    """Phases of this rank, by the place where they were read."""

    def read_in(self, place: str) -> None:
        watched = current_board()
        assert watched is not None
        self.setdefault(place, set()).add(watched[0].cells[watched[1]][PHASE])


class Samples:
    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._phases.read_in("dataset")
        return {"input_ids": torch.arange(6), "labels": torch.arange(6) + index}


class Observed(Trainer[Any]):
    phases: Phases

    def _prediction_step(self, *given: Any) -> Any:
        self.phases.read_in("batch")
        return super()._prediction_step(*given)


def test_samples_and_metrics_of_an_evaluation_have_other_limits_than_a_batch(tmp_path: Path) -> None:
    phases = Phases()

    def compute_metrics(_: object) -> dict[str, float]:
        phases.read_in("metrics")
        return {"score": 1.0}

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, per_device_eval_batch_size=2)
    trainer = Observed(args=args, model=Model(), eval_dataset=Samples(phases), compute_metrics=compute_metrics)
    trainer.phases = phases
    trainer.evaluate()
    assert phases == {"dataset": {LOADING}, "batch": {EVALUATION_START, EVALUATION}, "metrics": {EVALUATION_START}}


class Stream(IterableDataset[dict[str, Any]]):
    """Stream that records the number of notes before each of its samples."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(100):
            watched = current_board()
            assert watched is not None
            self.counts.append(watched[0].cells[watched[1]][COUNT])
            yield {"input_ids": torch.arange(6), "labels": torch.arange(6) + index % 8}


def test_resume_that_reads_a_stream_again_makes_progress_with_every_batch(tmp_path: Path) -> None:
    for max_steps in (3, 4):
        stream = Stream()
        settings = {"max_steps": max_steps, "per_device_train_batch_size": 2, "save_steps": 3}
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **settings)
        Trainer(args=args, model=Model(), train_dataset=stream, default_callbacks=False).train()
    first_of_batches = stream.counts[0:8:2]
    assert len(set(first_of_batches)) == 4, stream.counts
