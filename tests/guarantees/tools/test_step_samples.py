"""The samples of a step are known from seed and position alone, and can be left out, on every trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.trainer import Trainer
from forgather.tools.samples import StepOrder, samples_of_step
from tests.guarantees.elastic.test_global_batches import (
    Noting,
    NotingDDP,
    Run,
    numbered_samples,
    run,
)
from tests.support.data_parallel import environment
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, Stream, TokenModel, quiet_trainer, token_samples

SETTINGS: dict[str, dict[str, Any]] = {
    "accumulated": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
    "global": {"per_device_train_batch_size": 3, "global_batch_size": 8},
    "dropped": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "dataloader_drop_last": True},
}


def traced(output_dir: Path, trainer_class: type[Noting], settings: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Train 7 steps, over the end of epochs; return the samples per micro-batch as trained and as computed."""
    ranks = trainer_class is not Noting
    trainer = quiet_trainer(
        output_dir,
        TokenModel(),
        numbered_samples(),
        trainer_class=trainer_class,
        trainer_options={"distributed_env": environment()} if ranks else {},
        max_steps=7,
        shuffle=True,
        **settings,
    )
    trainer.train()
    assert isinstance(trainer, Noting)
    computed = [samples_of_step(trainer, step) for step in range(1, 8)]
    rank = trainer.team.rank
    own = [[(one.step - 1, one.micro_batch, one.index) for one in samples if one.rank == rank] for samples in computed]
    return trainer.samples, own


def as_micro_batches(own: list[Any]) -> list[tuple[int, list[int]]]:
    batches: dict[tuple[int, int], list[int]] = {}
    for samples in own:
        for step, micro_batch, index in samples:
            batches.setdefault((step, micro_batch), []).append(index)
    return [(step, indices) for (step, _), indices in sorted(batches.items())]


@pytest.mark.parametrize("settings", SETTINGS)
def test_computed_samples_are_those_that_one_device_trains_on(tmp_path: Path, settings: str) -> None:
    trained, own = traced(tmp_path, Noting, SETTINGS[settings])
    assert as_micro_batches(own) == trained


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dispatches", [True, False])
def test_computed_samples_are_those_that_each_rank_trains_on(tmp_path: Path, settings: str, dispatches: bool) -> None:
    more = {**SETTINGS[settings], "dispatch_batches": dispatches}
    for trained, own in run_on_ranks(traced, 2, tmp_path, NotingDDP, more):
        # A rank without samples in the last round of an epoch trains on a placeholder.
        assert as_micro_batches(own) == [batch for batch in trained if batch[1]]


def test_order_in_groups_of_length_is_known(tmp_path: Path) -> None:
    trained, own = traced(tmp_path, Noting, {**SETTINGS["accumulated"], "train_sampling_strategy": "group_by_length"})
    assert as_micro_batches(own) == trained


def test_samples_of_a_stream_are_refused() -> None:
    args = TrainingArguments(seed=1)
    with pytest.raises(ValueError, match=r"cannot be known.*stream.*Stream"):
        StepOrder.of(args, Stream(token_samples(4)))


def test_an_unknown_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed=-1 draws a new seed"):
        StepOrder.of(TrainingArguments(), token_samples(4))


# --- samples and steps that are left out


def train(output_dir: Path, samples: list[Any], **settings: Any) -> tuple[Trainer, Recorder]:
    recorder = Recorder()
    options = {"max_steps": 6, "per_device_train_batch_size": 4, "logging_strategy": "steps", "logging_steps": 1}
    trainer = quiet_trainer(
        output_dir, TokenModel(), samples, recorder, momentum=0.9, shuffle=True, **{**options, **settings}
    )
    trainer.train()
    return trainer, recorder


def test_a_skipped_sample_leaves_no_trace_and_other_batches_stay(tmp_path: Path) -> None:
    samples = token_samples(24)
    order = StepOrder.of(TrainingArguments(seed=0, per_device_train_batch_size=4), samples)
    skipped = [order.samples(2)[1].index, order.samples(4)[3].index]
    poisoned = list(samples)
    for index in skipped:
        ids = torch.full_like(samples[index]["input_ids"], 31)
        poisoned[index] = {"input_ids": ids, "labels": ids}
    (first, logs), (second, _) = (
        train(tmp_path / name, data, skip_samples=skipped) for name, data in (("a", samples), ("b", poisoned))
    )
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name])
    _, whole = train(tmp_path / "c", samples)
    # The steps before the first skipped sample are the same in every bit, and the step itself is not.
    losses, expected = ([record["loss"] for _, record in one.logs] for one in (logs, whole))
    assert losses[0] == expected[0] and losses[1] != expected[1]


SKIPPING_CASES = ["ddp 2, sharded", "ddp 3, dispatched", "fsdp2 2", "accelerate 2", "pipeline 2", "hybrid 2 x 2"]


def skips() -> dict[str, Any]:
    """Return one sample, a micro-batch of every division, all samples of the short step of an epoch, and one step."""
    order = StepOrder.of(TrainingArguments(seed=0, per_device_train_batch_size=8), numbered_samples())
    skipped = [order.samples(1)[2].index, *(one.index for one in order.samples(2)[:4])]
    return {"skip_samples": skipped + [one.index for one in order.samples(3)], "skip_steps": [5]}


@pytest.fixture(scope="module")
def skipping_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run on one device, in micro-batches, with the samples and steps of `skips` left out."""
    return run(tmp_path_factory.mktemp("skipping"), "one device in micro-batches of 3", **skips())


@pytest.mark.parametrize("name", SKIPPING_CASES)
def test_skipped_samples_and_steps_are_the_same_maths_on_any_ranks(
    tmp_path: Path, name: str, skipping_run: Run
) -> None:
    found = run(tmp_path, name, **skips())
    assert found.samples == skipping_run.samples and found.samples.keys() == {0, 1, 3, 5, 6}
    left_out = set(skips()["skip_samples"])
    assert left_out.isdisjoint(number for numbers in found.samples.values() for number in numbers)
    assert sorted(found.losses) == sorted(skipping_run.losses)
    for step, loss in found.losses.items():
        assert loss == pytest.approx(skipping_run.losses[step], rel=1e-6)
    for key, tensor in found.weights.items():
        torch.testing.assert_close(tensor, skipping_run.weights[key], rtol=1e-6, atol=1e-7)


def test_a_passed_over_step_makes_no_update_and_later_steps_keep_their_samples(tmp_path: Path) -> None:
    weights: dict[int, Any] = {}

    def keep(state: Any, model: Any, **_: Any) -> None:
        weights[state.global_step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    recorder = Recorder(on_step_end=keep)
    trainer = quiet_trainer(
        tmp_path,
        TokenModel(),
        numbered_samples(),
        recorder,
        trainer_class=Noting,
        max_steps=4,
        shuffle=True,
        per_device_train_batch_size=4,
        skip_steps=[3],
        lr_scheduler_type="linear",
        logging_strategy="steps",
        logging_steps=1,
    )
    trainer.train()
    assert all(torch.equal(weights[2][name], tensor) for name, tensor in weights[3].items())
    assert not all(torch.equal(weights[3][name], tensor) for name, tensor in weights[4].items())
    assert isinstance(trainer, Noting)
    order = StepOrder.of(trainer.args, numbered_samples())
    assert trainer.samples == [(step - 1, [one.index for one in order.samples(step)]) for step in (1, 2, 4)]
    assert all(one.is_skipped for one in order.samples(3))
    # The learning rate of step 4 is the one that it has without the gap.
    assert [step for step, _ in recorder.logs] == [1, 2, 4]
    assert recorder.logs[-1][1]["learning_rate"] == 0.0


def test_a_resumed_run_keeps_what_its_checkpoint_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    skips = {"skip_samples": [1, 5, 20], "skip_steps": [4]}
    straight, _ = train(tmp_path / "straight", token_samples(24), **settings, **skips)
    train(tmp_path / "resumed", token_samples(24), **settings, **skips, max_steps=3)
    with caplog.at_level("INFO"):
        resumed, _ = train(tmp_path / "resumed", token_samples(24), **settings, resume_from_checkpoint=True)
    assert "still leaves out skip_samples=[1, 5, 20]" in caplog.text
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_samples": [24]}, r"sample 24, but the training dataset has 24 samples"),
        ({"skip_samples": list(range(24))}, r"all 24 samples"),
        ({"skip_samples": [-1]}, r"skip_samples=\[-1\].*0 or more"),
        ({"skip_steps": [0]}, r"skip_steps=\[0\].*1 or more"),
        ({"skip_steps": ["3"]}, r"'3' is not a whole number"),
    ],
)
def test_numbers_that_name_nothing_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(tmp_path, token_samples(24), **settings)


def test_samples_of_a_stream_cannot_be_skipped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"skip_samples needs a map-style dataset.*Stream"):
        train(tmp_path, Stream(token_samples(24)), skip_samples=[1])  # type: ignore[arg-type]


class OwnLoading(Trainer):
    def _get_dataloader(self, dataset: Any, batch_size: int) -> Any:
        return super()._get_dataloader(dataset, batch_size)


def test_a_hook_that_builds_the_loader_must_leave_samples_out_itself(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path, TokenModel(), token_samples(8), trainer_class=OwnLoading, max_steps=1, skip_samples=[1]
    )
    with pytest.raises(ValueError, match=r"skip_samples.*OwnLoading._get_dataloader"):
        trainer.train()
