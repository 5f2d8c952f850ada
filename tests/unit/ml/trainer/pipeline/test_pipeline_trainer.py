"""Pipeline trainer: precisions, custom losses, callbacks, recipes, gradient norms and buffers."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgather.ml.checkpoint.errors import ReplicationError
from forgather.ml.trainer.callbacks import EarlyStopping
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer, create_automatic_splitter
from forgather.ml.trainer.pipeline.tied_weights import norm_of_group
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import TrainerCallback
from tests.support.data_parallel import Result, assert_same_training, run
from tests.support.pipelines import llama, tied_gpt2, trainer_of, whole_result
from tests.support.ranks import run_on_ranks
from tests.support.sampling import sampled
from tests.support.tiny_models import IGNORED, VOCAB_SIZE, token_samples

WIDTH = 16
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "max_steps": 3,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "learning_rate": 0.05,
}
small_llama = functools.partial(llama, 4)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB_SIZE, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.table(input_ids)
        return hidden


class Layer(nn.Module):
    """Layer with bfloat16 output under autocast, unlike layers with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.linear(torch.tanh(hidden))
        return result


class ByProtocol(nn.Module):
    """Custom model that follows the splitter protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.input_encoder = Encoder()
        self.layer_stack = nn.ModuleList(Layer() for _ in range(4))
        self.output_decoder = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.input_encoder(input_ids)
        for layer in self.layer_stack:
            hidden = layer(hidden)
        logits: Tensor = self.output_decoder(hidden)
        return logits


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a loss that counts the first position, which shows only when the loss is resolved on a batch."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.float().mean((1, 2)) - labels).square().mean()


def made(
    trainer_class: type[Trainer], output_dir: str, model_init: Any, train: Any, *callbacks: Any, **settings: Any
) -> Trainer:
    names = ("compute_loss_func", "eval_dataset", "model_splitter")
    options = {name: settings.pop(name) for name in names if name in settings}
    return trainer_of(
        trainer_class,
        Path(output_dir),
        model_init,
        train,
        *callbacks,
        trainer_options=options,
        **{**SETTINGS, **settings},
    )


def trained(output_dir: str, *args: Any, **settings: Any) -> Result:
    """Train a pipeline on ranks, or several if `pp_size` is given, and return the result."""
    trainer_class = HybridTrainer if "pp_size" in settings else PipelineTrainer
    return whole_result(made(trainer_class, output_dir, *args, **settings))


def job(output_dir: str, name: str) -> Any:
    """Run one of the cases below on ranks."""
    data = token_samples(16)
    if name.startswith("bf16"):
        settings = {"compute_loss_func": plain_loss} if name == "bf16 with a loss of one's own" else {}
        return trained(output_dir, ByProtocol, data, mixed_precision="bf16", **settings)
    if name == "twice":
        trainer = made(PipelineTrainer, output_dir, ByProtocol, data, compute_loss_func=plain_loss, eval_dataset=data)
        losses = [trainer.evaluate()["eval_loss"] for _ in range(2)]
        return losses, whole_result(trainer)
    if name == "first":
        return trained(output_dir, ByProtocol, data, EvaluatesFirst(), compute_loss_func=plain_loss, eval_dataset=data)
    if name == "idle pipeline":
        trainer = made(
            HybridTrainer,
            output_dir,
            ByProtocol,
            data,
            pp_size=2,
            n_microbatches=2,
            compute_loss_func=plain_loss,
            eval_dataset=data[:4],
        )
        return trainer.evaluate()["eval_loss"]
    if name == "regression":
        return trained(output_dir, ByProtocol, regression(), pp_size=2, compute_loss_func=squared_error)
    if name == "accuracy":
        reader = EarlyStopping(metric="predicted", greater_is_better=True)
        trainer = made(PipelineTrainer, output_dir, small_llama, data, reader, AddsMetric(), eval_dataset=data)
        return {**trainer.evaluate(), "read": reader.state_dict()["best"]}
    if name == "samples":
        trainer = made(HybridTrainer, output_dir, small_llama, data, pp_size=2)
        assert isinstance(trainer, HybridTrainer)
        return trainer.pipeline_generate(torch.ones(2, 3, dtype=torch.int64), 8, do_sample=True).tolist()
    if name == "traced":
        settings = {"model_splitter": create_automatic_splitter(), "eval_dataset": data[:6], "eval_strategy": "steps"}
        return trained(
            output_dir, ByProtocol, token_samples(18), eval_steps=1, per_device_eval_batch_size=3, **settings
        )
    if name == "frozen":
        return trained(output_dir, frozen_half, data, max_steps=6, save_strategy="steps", save_steps=3, momentum=0.9)
    recipes: dict[str, dict[str, Any]] = {
        "checkpointing": {"gradient_checkpointing": True, "schedule": "1f1b"},
        "checkpointing, zero bubble": {"gradient_checkpointing": True, "schedule": "zbv"},
        "compiled": {"torch_compile": True, "torch_compile_backend": "eager", "schedule": "1f1b"},
    }
    return trained(output_dir, small_llama, data, **recipes[name])


def regression() -> list[dict[str, Tensor]]:
    """Return samples with labels that have no ignored value; their number leaves one pipeline without a last batch."""
    return [
        {"input_ids": sample["input_ids"], "labels": torch.tensor(float(number))}
        for number, sample in enumerate(token_samples(12))
    ]


def frozen_half() -> nn.Module:
    model: Any = small_llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)
    return model  # type: ignore[no-any-return]


class EvaluatesFirst(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, trainer: Any, **kwargs: Any) -> None:
        trainer.evaluate()


class AddsMetric(TrainerCallback):
    """Callback that computes a metric on the rank with the logits."""

    def __init__(self) -> None:
        self.num_predicted = 0

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, logits: Tensor | None, labels: Tensor | None, **kwargs: Any
    ) -> None:
        if logits is not None and labels is not None:
            assert logits.shape[:2] == labels.shape
            self.num_predicted += logits.argmax(-1).numel()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, Any], trainer: Any, **kwargs: Any
    ) -> None:
        if trainer.pipeline.has_last:
            metrics["eval_predicted"] = self.num_predicted


def alone(tmp_path: Path, *args: Any, **settings: Any) -> Result:
    return run(made(Trainer, str(tmp_path / "alone"), *args, **settings))


@pytest.mark.parametrize("name", ["bf16", "bf16 with a loss of one's own"])
def test_bfloat16_passes_between_stages_unchanged(tmp_path: Path, name: str) -> None:
    settings = {"compute_loss_func": plain_loss} if "own" in name else {}
    expected = alone(tmp_path, ByProtocol, token_samples(16), mixed_precision="bf16", **settings)
    for result in run_on_ranks(job, 2, str(tmp_path), name):
        assert_same_training(expected, result, 2e-2)
        assert max(abs(a - b) for a, b in zip(expected.losses, result.losses, strict=True)) < 2e-3


def test_evaluations_before_training_leave_no_trace(tmp_path: Path) -> None:
    data = token_samples(16)
    expected = alone(tmp_path, ByProtocol, data, compute_loss_func=plain_loss)
    reference = made(Trainer, str(tmp_path / "one"), ByProtocol, data, compute_loss_func=plain_loss, eval_dataset=data)
    loss = reference.evaluate()["eval_loss"]
    for losses, result in run_on_ranks(job, 2, str(tmp_path / "twice"), "twice"):
        assert losses == pytest.approx([loss, loss], rel=1e-6)
        assert_same_training(expected, result)
    for result in run_on_ranks(job, 2, str(tmp_path / "first"), "first"):
        assert_same_training(expected, result)


def test_pipeline_without_a_batch_does_not_block_an_evaluation(tmp_path: Path) -> None:
    data = token_samples(16)
    reference = made(
        Trainer, str(tmp_path / "one"), ByProtocol, data, compute_loss_func=plain_loss, eval_dataset=data[:4]
    )
    expected = reference.evaluate()["eval_loss"]
    for loss in run_on_ranks(job, 4, str(tmp_path), "idle pipeline"):
        assert loss == pytest.approx(expected, rel=1e-6)


def test_empty_batches_have_no_weight_for_any_labels(tmp_path: Path) -> None:
    expected = alone(tmp_path, ByProtocol, regression(), compute_loss_func=squared_error, per_device_train_batch_size=8)
    for result in run_on_ranks(job, 4, str(tmp_path), "regression"):
        assert_same_training(expected, result)


def test_metrics_computed_from_logits_reach_all_ranks(tmp_path: Path) -> None:
    first, second = run_on_ranks(job, 2, str(tmp_path), "accuracy")
    assert first["eval_predicted"] == second["eval_predicted"] == 16 * 6
    assert first["read"] == second["read"] == 16 * 6, "callbacks should read all metrics on every rank"
    assert first["eval_loss"] == second["eval_loss"]


def test_all_pipelines_generate_the_same_sample(tmp_path: Path) -> None:
    results = run_on_ranks(job, 4, str(tmp_path), "samples")
    assert all(result == results[0] for result in results) and len(results[0][0]) == 11


def test_traced_model_trains_and_evaluates_like_a_single_device(tmp_path: Path) -> None:
    expected = alone(tmp_path, ByProtocol, token_samples(18))
    for result in run_on_ranks(job, 2, str(tmp_path), "traced"):
        assert_same_training(expected, result)


@pytest.mark.parametrize(
    "name", sampled(["checkpointing", "checkpointing, zero bubble", "compiled"], ["checkpointing"])
)
def test_recipes_do_not_change_the_results(tmp_path: Path, name: str) -> None:
    expected = alone(tmp_path, small_llama, token_samples(16))
    for result in run_on_ranks(job, 2, str(tmp_path), name):
        assert_same_training(expected, result, 2e-6)


def test_rank_may_have_no_trainable_parameters(tmp_path: Path) -> None:
    """The first rank holds only the frozen embedding and first layers."""
    expected = alone(tmp_path, frozen_half, token_samples(16), max_steps=6, momentum=0.9)
    results = run_on_ranks(job, 2, str(tmp_path), "frozen")
    for result in results:
        assert_same_training(expected, result)
    # The checkpoint from the middle of the run resumes on a single device.
    checkpoint = str(tmp_path / "checkpoints/checkpoint-3")
    resumed = alone(
        tmp_path / "resumed",
        frozen_half,
        token_samples(16),
        max_steps=6,
        momentum=0.9,
        resume_from_checkpoint=checkpoint,
    )
    assert resumed.losses == pytest.approx(expected.losses[3:], rel=1e-6)


def norms(output_dir: str) -> list[list[float]]:
    """Return the gradient norms of one step on ranks, by the fast method and by the method for devices."""
    trainer = made(
        PipelineTrainer, output_dir, functools.partial(tied_gpt2, 4), token_samples(16), NotesNorms(), max_steps=1
    )
    trainer.train()
    return [callback.norms for callback in trainer.callbacks if isinstance(callback, NotesNorms)]


class NotesNorms(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, trainer: Any, **kwargs: Any) -> None:
        kinds = (1.0, 2.0, 3.0, math.inf)
        own = [trainer.optimization.norm(kind) for kind in kinds]
        self.norms = [float(norm) for norm in own]
        if isinstance(trainer, PipelineTrainer):
            both = list(zip(own, kinds, strict=True))
            self.norms = [float(trainer._all_reduce_norm(norm, kind)) for norm, kind in both]
            self.norms += [float(norm_of_group(norm, kind, trainer.pp_group)) for norm, kind in both]


def test_norms_of_every_type_equal_a_single_device(tmp_path: Path) -> None:
    callback = NotesNorms()
    model = functools.partial(tied_gpt2, 4)
    made(Trainer, str(tmp_path / "one"), model, token_samples(16), callback, max_steps=1).train()
    for found in run_on_ranks(norms, 2, str(tmp_path / "two")):
        # A float32 sum of many powers is itself no more accurate.
        assert found[0] == pytest.approx(callback.norms * 2, rel=1e-5)


def logged_norms(output_dir: str, **settings: Any) -> list[float]:
    """Return the logged norms of all steps, for a run that does not need the norm at each step."""
    trainer_class = HybridTrainer if "pp_size" in settings else PipelineTrainer
    trainer = made(trainer_class, output_dir, functools.partial(tied_gpt2, 4), token_samples(24), **settings)
    trainer.train()
    return [record["grad_norm"] for record in trainer.state.log_history if "grad_norm" in record]


def logged_norms_of_pipelines(output_dir: str) -> list[float]:
    return logged_norms(output_dir, pp_size=2, per_device_train_batch_size=2, n_microbatches=2)


def test_norms_combined_for_the_log_equal_a_single_device(tmp_path: Path) -> None:
    one = made(Trainer, str(tmp_path / "one"), functools.partial(tied_gpt2, 4), token_samples(24))
    one.train()
    expected = [record["grad_norm"] for record in one.state.log_history if "grad_norm" in record]
    assert len(expected) == 3
    for found in run_on_ranks(logged_norms, 2, str(tmp_path / "two")):
        assert found == pytest.approx(expected, rel=2e-6)
    for found in run_on_ranks(logged_norms_of_pipelines, 4, str(tmp_path / "four")):
        assert found == pytest.approx(expected, rel=2e-6)


class WithBuffers(Layer):
    """Layer with a buffer that follows the data, and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(()))
        self.register_buffer("constant", torch.ones(2))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.running = 0.9 * self.running + 0.1 * hidden.detach().mean()
        return super().forward(hidden)


def with_buffers() -> nn.Module:
    model = ByProtocol()
    model.layer_stack = nn.ModuleList(WithBuffers() for _ in range(4))
    return model


def buffers_of_pipelines(output_dir: str) -> tuple[dict[str, Tensor], str]:
    """Return the buffers after a save, and the error of a save after rank 3 changed a constant buffer."""
    trainer = made(HybridTrainer, output_dir, with_buffers, token_samples(24), pp_size=2)
    trainer.train()
    trainer.save_checkpoint()
    buffers = dict(trainer.unwrapped_model().named_buffers())
    held = {name: buffer.clone() for name, buffer in buffers.items()}
    if torch.distributed.get_rank() == 3:
        next(buffer for name, buffer in buffers.items() if name.endswith("constant")).add_(1.0)
    with pytest.raises(ReplicationError) as raised:
        trainer.save_checkpoint()
    return held, str(raised.value)


def test_buffers_changed_by_training_are_synchronised_and_differing_constants_named(tmp_path: Path) -> None:
    results = run_on_ranks(buffers_of_pipelines, 4, str(tmp_path))
    for first, second in ((0, 2), (1, 3)):
        assert results[first][0].keys() == results[second][0].keys() != set()
        for name, buffer in results[first][0].items():
            assert torch.equal(buffer, results[second][0][name]), name
    assert any(float(buffer) != 0.0 for name, buffer in results[0][0].items() if name.endswith("running"))
    for _, message in results:
        assert "Replication validation failed" in message and "constant" in message and "rank" in message
