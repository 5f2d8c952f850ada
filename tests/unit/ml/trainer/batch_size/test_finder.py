"""Batch size after out-of-memory errors: the step is repeated exactly, on all ranks, and the found size is kept."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.trainer.batch_size.splitting import parts_of
from forgather.ml.trainer.fsdp2.fsdp2_trainer import FSDP2Trainer
from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import ddp_trainer
from tests.support.ranks import run_on_ranks
from tests.support.sampling import sampled
from tests.support.tiny_models import Recorder, TokenModel, quiet_trainer, token_samples, weights


class LimitedModel(TokenModel):
    """Model that asks the allocator for more memory than any machine has, if a batch has too many rows.

    It has dropout and a batch norm, so that random state and buffers matter.
    """

    def __init__(self, most_rows: int, kind: str = "host", passes: str = "forward") -> None:
        super().__init__()
        self.most_rows, self.kind, self.passes = most_rows, kind, passes
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.embedding(input_ids))
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        hidden = self.dropout(hidden)
        if self.training and self.passes == "forward":
            self.allocate(len(input_ids))
        elif self.training and hidden.requires_grad:
            hidden.register_hook(lambda _: self.allocate(len(input_ids)))
        logits: Tensor = self.head(hidden)
        return logits

    def allocate(self, num_rows: int) -> None:
        if num_rows <= self.most_rows:
            return
        if self.kind == "device":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        torch.empty(2**58, dtype=torch.uint8)


class StepsOnly(TokenModel):
    """Model without random numbers and buffers, so that runs with different batch sizes are comparable."""

    most_rows = 10**6

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.training and len(input_ids) > self.most_rows:
            torch.empty(2**58, dtype=torch.uint8)
        return super().forward(input_ids)


def trained(folder: Path, model: nn.Module, size: int, num_passes: int = 1, **settings: Any) -> Trainer:
    recorder = Recorder()
    settings = {"max_steps": 5, "shuffle": True, "momentum": 0.9, **settings}
    made = quiet_trainer(
        folder,
        model,
        token_samples(26),
        recorder,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=num_passes,
        **settings,
    )
    made.train()
    made.recorder = recorder  # type: ignore[attr-defined]
    return made


def limited(most_rows: int, seed: int = 0) -> StepsOnly:
    model = StepsOnly(seed)
    model.most_rows = most_rows
    return model


@pytest.mark.parametrize(("size", "most_rows"), sampled([(8, 4), (8, 2), (8, 1), (5, 2), (7, 3)], [(8, 4), (7, 3)]))
def test_run_equals_run_with_smaller_batches(size: int, most_rows: int, tmp_path: Path) -> None:
    found = trained(tmp_path / "found", limited(most_rows), size, 2, auto_find_batch_size=True)
    expected = trained(tmp_path / "expected", StepsOnly(), size, 2)
    assert found.loop.found_batch_size is not None and found.loop.found_batch_size <= most_rows
    assert found.state.global_step == expected.state.global_step == 5
    losses = [one.recorder.details("on_train_metrics", "loss") for one in (found, expected)]  # type: ignore[attr-defined]
    torch.testing.assert_close(torch.stack(losses[0]), torch.stack(losses[1]), rtol=1e-5, atol=1e-6)
    for name, value in weights(expected.model).items():
        torch.testing.assert_close(weights(found.model)[name], value, rtol=1e-5, atol=1e-6)
    assert found.state.num_input_tokens_seen == expected.state.num_input_tokens_seen


@pytest.mark.parametrize(
    ("kind", "passes"),
    sampled(
        [(kind, passes) for kind in ("host", "device") for passes in ("forward", "backward")],
        [("host", "forward"), ("device", "backward")],
    ),
)
def test_repeated_step_has_the_same_random_numbers_and_buffers(kind: str, passes: str, tmp_path: Path) -> None:
    """A run that begins with the found size draws the same numbers, so both are equal bit for bit."""
    found = trained(tmp_path / "found", LimitedModel(2, kind, passes=passes), 8, auto_find_batch_size=True, max_steps=3)
    known = LimitedModel(2)
    start = quiet_trainer(
        tmp_path / "known",
        known,
        token_samples(26),
        max_steps=3,
        shuffle=True,
        momentum=0.9,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
    )
    start.train()
    assert found.loop.found_batch_size == 2
    for name, value in weights(known).items():
        assert torch.equal(weights(found.model)[name], value), name


def test_log_names_the_sizes_and_no_event_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    found = trained(tmp_path, limited(3), 8, auto_find_batch_size=True)
    text = caplog.text
    assert "Step 1 ran out of memory with 8 samples per forward pass. It is repeated with at most 4" in text
    assert "with 4 samples per forward pass. It is repeated with at most 2" in text
    assert found.recorder.steps("on_step_begin") == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]
    assert found.state.train_batch_size == 2


def test_found_size_is_in_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"auto_find_batch_size": True, "save_strategy": "steps", "save_steps": 2}
    straight = trained(tmp_path / "straight", limited(2), 8, **settings)
    trained(tmp_path / "stopped", limited(2), 8, **{**settings, "max_steps": 2})
    caplog.clear()
    resumed = trained(tmp_path / "stopped", limited(2), 8, **settings)
    assert "ran out of memory" not in caplog.text and resumed.loop.found_batch_size == 2
    for name, value in weights(straight.model).items():
        assert torch.equal(weights(resumed.model)[name], value), name


def test_one_sample_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"found no batch size that fits.*one sample per forward pass.*shorter sequences"
    ):
        trained(tmp_path, limited(0), 4, auto_find_batch_size=True)


def test_other_errors_are_not_repeated(tmp_path: Path) -> None:
    class Broken(TokenModel):
        num_calls = 0

        def forward(self, input_ids: Tensor) -> Tensor:
            if self.training and torch.is_grad_enabled():
                Broken.num_calls += 1
                raise RuntimeError("a mistake")
            return super().forward(input_ids)

    with pytest.raises(RuntimeError, match="a mistake"):
        trained(tmp_path, Broken(), 4, auto_find_batch_size=True)
    assert Broken.num_calls == 1


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"fuse_optim_with_backward": True}, {}, "parameters are updated during the backward pass"),
        ({"token_weighted_loss": False}, {}, "token_weighted_loss=False"),
        ({}, {"trainer_class": FSDP2Trainer}, "FSDP2Trainer: its passes gather parameters"),
    ],
)
def test_combinations_that_cannot_work_are_refused(
    settings: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        quiet_trainer(tmp_path, TokenModel(), token_samples(4), auto_find_batch_size=True, **settings, **options)


def test_parts_have_every_row_once() -> None:
    batch = {"input_ids": torch.arange(10).view(5, 2), "names": list("abcde"), "scale": torch.tensor(2.0)}
    parts = parts_of(batch, 2)
    assert [part["input_ids"].tolist() for part in parts] == [[[0, 1]], [[2, 3], [4, 5]], [[6, 7], [8, 9]]]
    assert [part["names"] for part in parts] == [["a"], ["b", "c"], ["d", "e"]]
    assert all(float(part["scale"]) == 2 for part in parts)
    assert parts_of(batch, 5) == [batch]
    (empty,) = parts_of(EmptyBatch(batch), 2)
    assert isinstance(empty, EmptyBatch) and len(empty["input_ids"]) == 2
    with pytest.raises(ValueError, match="'lengths' has 2 rows, but other values of the batch have 5"):
        parts_of({**batch, "lengths": torch.tensor([3, 2])}, 2)


def ranks_train(folder: str, most_rows: list[int], finds: bool, dispatches: bool) -> tuple[int | None, dict[str, Any]]:
    rank = torch.distributed.get_rank()
    trainer = ddp_trainer(
        Path(folder),
        # As with DDP, all ranks begin with the weights of rank 0.
        limited(most_rows[rank], seed=rank),
        token_samples(26),
        max_steps=4,
        shuffle=True,
        momentum=0.9,
        per_device_train_batch_size=4,
        auto_find_batch_size=finds,
        dispatch_batches=dispatches,
    )
    trainer.train()
    return trainer.loop.found_batch_size, weights(trainer.unwrapped_model())


@pytest.mark.parametrize("dispatches", [True, False], ids=["dispatched", "sharded"])
def test_one_rank_without_memory_makes_all_repeat(dispatches: bool, tmp_path: Path) -> None:
    plenty = 10**6
    expected = run_on_ranks(ranks_train, 2, str(tmp_path / "ddp"), [plenty, plenty], False, dispatches)
    found = run_on_ranks(ranks_train, 2, str(tmp_path / "found"), [plenty, 1], True, dispatches)
    assert [size for size, _ in expected] == [None, None] and [size for size, _ in found] == [1, 1]
    for name, value in expected[0][1].items():
        torch.testing.assert_close(found[0][1][name], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(found[0][1][name], found[1][1][name])
