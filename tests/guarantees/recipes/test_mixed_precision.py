"""Mixed precision: low-precision compute, bit-exact resume, and fp16 overflow steps that all ranks skip."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import ddp_trainer, run
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import IGNORED, Recorder, TokenModel, quiet_trainer, tiny_llama, token_samples, weights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SPIKE = 31
"""Token that makes float16 gradients overflow."""
FIRST_SCALE = 2.0**16
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "lr_scheduler_type": "linear",
    "trainer_options": {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01})},
}


def samples(num_samples: int = 32) -> list[dict[str, Tensor]]:
    found = token_samples(num_samples)
    for sample in found:
        sample["input_ids"] %= SPIKE
        sample["labels"][sample["labels"] == SPIKE] = 0
    return found


def with_spike(batch: int, num_samples: int = 32, batch_size: int = 4) -> list[dict[str, Tensor]]:
    """Return `samples` with one batch that overflows."""
    found = samples(num_samples)
    found[batch * batch_size]["labels"][-1] = SPIKE
    return found


def spiking_loss(logits: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)
    return loss * torch.where((labels == SPIKE).any(), 1e6, 1.0)


def llama_trainer(output_dir: Path, data: Any, *callbacks: Any, **settings: Any) -> Trainer:
    options = {**SETTINGS["trainer_options"], **settings.pop("trainer_options", {})}
    return quiet_trainer(
        output_dir, tiny_llama(), data, *callbacks, **{**SETTINGS, **settings, "trainer_options": options}
    )


def spiking_trainer(output_dir: Path, data: Any, *callbacks: Any, **settings: Any) -> Trainer:
    options = {"compute_loss_func": spiking_loss}
    return llama_trainer(output_dir, data, *callbacks, trainer_options=options, mixed_precision="fp16", **settings)


def noted_dtypes(model: nn.Module) -> dict[str, set[torch.dtype]]:
    """Return a dict that hooks fill with the output dtypes of each module type."""
    found: dict[str, set[torch.dtype]] = {}
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            seen = found.setdefault(type(module).__name__, set())
            module.register_forward_hook(lambda _, __, output, seen=seen: seen.add(output.dtype))
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_matmuls_run_in_low_precision_and_weights_stay_float32(precision: str, tmp_path: Path) -> None:
    plain = run(llama_trainer(tmp_path / "plain", samples()))
    trainer = llama_trainer(tmp_path / precision, samples(), mixed_precision=precision)
    dtypes = noted_dtypes(trainer.unwrapped_model())
    result = run(trainer)
    assert dtypes == {"Linear": {DTYPES[precision]}, "Embedding": {torch.float32}}
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert {tensor.dtype for tensor in (*result.weights.values(), *moments)} == {torch.float32}
    assert len(result.losses) == 8 and result.losses != plain.losses
    assert result.losses == pytest.approx(plain.losses, rel=1e-2)
    assert "skipped_steps" not in trainer.state.log_history[-1]


def test_gradients_are_unscaled_before_clipping(tmp_path: Path) -> None:
    # Unlike Adam, SGD depends on the size of gradients.
    options = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.5})}
    settings = {"max_grad_norm": 0.1, "trainer_options": options}
    plain = run(llama_trainer(tmp_path / "plain", samples(), **settings))
    scaled = run(llama_trainer(tmp_path / "fp16", samples(), mixed_precision="fp16", **settings))
    assert min(plain.norms) > 0.1, "every step is clipped"
    assert scaled.norms == pytest.approx(plain.norms, rel=0.02)
    for name, tensor in plain.weights.items():
        assert (scaled.weights[name] - tensor).norm() < 1e-2 * tensor.norm(), name


def test_evaluation_computes_in_the_same_precision(tmp_path: Path) -> None:
    trainer = llama_trainer(tmp_path, None, mixed_precision="bf16")
    dtypes = noted_dtypes(trainer.unwrapped_model())
    expected = llama_trainer(tmp_path, None).evaluate(samples(8))["eval_loss"]
    assert trainer.evaluate(samples(8))["eval_loss"] == pytest.approx(expected, rel=1e-2)
    assert dtypes["Linear"] == {torch.bfloat16}


class End(NamedTuple):
    """Results of a run that must be equal bit for bit."""

    weights: dict[str, Tensor]
    moments: dict[int, dict[str, Tensor]]
    groups: list[dict[str, Any]]
    loss_scale: dict[str, Any]
    losses: list[float]


def end_of(trainer: Trainer) -> End:
    result = run(trainer)
    optimizer = trainer.optimizer.state_dict()
    return End(
        result.weights, optimizer["state"], optimizer["param_groups"], trainer.amp_context.state_dict(), result.losses
    )


def assert_identical(one: End, other: End) -> None:
    torch.testing.assert_close((one.weights, one.moments), (other.weights, other.moments), rtol=0.0, atol=0.0)
    assert one.groups == other.groups and one.loss_scale == other.loss_scale
    assert one.losses[-len(other.losses) :] == other.losses


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resume_is_bit_exact(precision: str, tmp_path: Path) -> None:
    straight = end_of(llama_trainer(tmp_path / "straight", samples(), mixed_precision=precision, max_steps=8))
    saving: dict[str, Any] = {"mixed_precision": precision, "max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    llama_trainer(tmp_path / "run", samples(), StopsAt(4), **saving).train()
    resumed = end_of(llama_trainer(tmp_path / "run", samples(), **saving))
    assert len(resumed.losses) == 4
    assert_identical(straight, resumed)
    assert resumed.loss_scale.get("_growth_tracker") == (8 if precision == "fp16" else None)


class StopsAt:
    """Callback that ends a run early, without a change of its schedule."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self._step


class NotesWeights:
    """Callback that records the weights and the learning rate after every step."""

    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
        self.after.append(weights(model))
        self.rates.append(optimizer.param_groups[0]["lr"])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_overflow_step_is_skipped_and_the_lower_scale_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notes, recorder = NotesWeights(), Recorder()
    with caplog.at_level(logging.INFO, "forgather.ml.trainer.amp"):
        trainer = spiking_trainer(tmp_path, with_spike(batch=2), notes, recorder)
        trainer.train()
    unchanged = [same(one, other) for one, other in zip(notes.after, notes.after[1:], strict=False)]
    assert unchanged == [False, True, False, False, False, False, False], "only the third step is skipped"
    assert caplog.messages == ["loss scale dropped from 65536 to 32768"]
    records = [record for _, record in recorder.logs]
    assert [record.get("skipped_steps") for record in records] == [None, None, 1, None, None, None, None, None]
    assert records[2]["grad_norm"] is None and all(record["grad_norm"] for record in records if record != records[2])
    moments = trainer.optimizer.state[next(iter(trainer.unwrapped_model().parameters()))]
    assert int(moments["step"]) == 7, "the optimizer did not count the skipped step"
    assert trainer.state.global_step == 8


def test_schedule_does_not_advance_in_a_skipped_step(tmp_path: Path) -> None:
    with_overflow, without = NotesWeights(), NotesWeights()
    spiking_trainer(tmp_path / "one", with_spike(batch=2), with_overflow).train()
    spiking_trainer(tmp_path / "two", samples(), without).train()
    assert with_overflow.rates == [*without.rates[:2], *without.rates[1:-1]] and without.rates[-1] == 0.0


def test_lowered_loss_scale_survives_a_resume(tmp_path: Path) -> None:
    data = with_spike(batch=2)
    straight = end_of(spiking_trainer(tmp_path / "straight", data, max_steps=8))
    saving: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    first = spiking_trainer(tmp_path / "run", data, StopsAt(4), **saving)
    first.train()
    assert first.amp_context.state_dict()["scale"] == FIRST_SCALE / 2
    resumed = end_of(spiking_trainer(tmp_path / "run", data, **saving))
    assert resumed.loss_scale["scale"] == FIRST_SCALE / 2
    assert_identical(straight, resumed)


class RankEnd(NamedTuple):
    """Results of a rank."""

    after: list[dict[str, Tensor]]
    scale: float
    losses: list[float]
    """Losses of the batches of this rank, before the reduction over ranks."""


def job_with_overflow(output_dir: str) -> RankEnd:
    """Train on ranks with an overflow in a batch of rank 1 only."""
    notes = NotesWeights()
    losses: list[float] = []

    def noting_loss(logits: Tensor, labels: Tensor) -> Tensor:
        loss = spiking_loss(logits, labels)
        if loss.requires_grad:
            losses.append(loss.item())
        return loss

    trainer = ddp_trainer(
        Path(output_dir),
        TokenModel(),
        with_spike(batch=3, batch_size=2, num_samples=16),
        notes,
        mixed_precision="fp16",
        per_device_train_batch_size=2,
        trainer_options={"compute_loss_func": noting_loss},
    )
    trainer.train()
    return RankEnd(notes.after, trainer.amp_context.state_dict()["scale"], losses)


def test_all_ranks_skip_the_step_if_one_overflows(tmp_path: Path) -> None:
    first, second = run_on_ranks(job_with_overflow, 2, str(tmp_path))
    assert max(first.losses) < 100 and max(second.losses) > 1e5, "the spike is on one rank only"
    assert first.scale == second.scale == FIRST_SCALE / 2
    assert len(first.after) == 4
    for one, other in zip(first.after, second.after, strict=True):
        assert same(one, other)
    unchanged = [same(one, other) for one, other in zip(first.after, first.after[1:], strict=False)]
    assert unchanged == [True, False, False]


def test_float16_weights_with_a_loss_scale_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"mixed_precision='fp16' cannot be combined with weights in float16 \(model\."
    ):
        quiet_trainer(tmp_path, tiny_llama().half(), token_samples(2), mixed_precision="fp16", max_steps=1).train()
