"""DDPTrainer beyond the step: uneven evaluation, replica validation, requests of callbacks, rejected settings."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from forgather.ml.checkpoint.components import SharingPattern
from forgather.ml.checkpoint.coordinator import ReplicationError
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.distributed import DistributedError, StaticDistributedEnvironment
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer, DDPTrainingArguments
from tests.support.data_parallel import ddp_trainer, environment
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, Stream, TokenModel, quiet_trainer, saved_steps, token_samples, weights


@contextmanager
def kept_records(level: int) -> Iterator[list[str]]:
    """Collect the messages that this rank logs."""
    records: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger, handler = logging.getLogger("forgather"), Keeping(level)
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


# --- evaluation over uneven shards

SHARDS = (0, 1, 7, 12)
EVAL_BATCH = 3


def shard_of(rank: int) -> list[dict[str, Tensor]]:
    samples = token_samples(EVAL_BATCH * sum(SHARDS) - 1, seed=5)
    start = EVAL_BATCH * sum(SHARDS[:rank])
    return samples[start : start + EVAL_BATCH * SHARDS[rank]]


def make_shard(kind: str, samples: list[Any]) -> Any:
    return {
        "list": lambda: samples,
        "stream": lambda: Stream(samples),
        "loader": lambda: DataLoader(samples, EVAL_BATCH),
    }[  # type: ignore[arg-type]
        kind
    ]()


def _evaluate_shards(output_dir: Path, kind: str) -> tuple[dict[str, Any], int]:
    rank = environment().rank
    seen = Recorder()
    trainer = ddp_trainer(
        output_dir,
        TokenModel(),
        None,
        seen,
        dispatch_eval_batches=False,
        data_is_sharded=True,
        per_device_eval_batch_size=EVAL_BATCH,
    )
    metrics = trainer.evaluate(make_shard(kind, shard_of(rank)))
    return metrics, seen.names.count("on_prediction_step")


@pytest.mark.parametrize("kind", ["list", "stream", "loader"])
def test_uneven_shards_are_evaluated_completely(kind: str, tmp_path: Path) -> None:
    results = run_on_ranks(_evaluate_shards, 4, tmp_path, kind)
    samples = [sample for rank in range(4) for sample in shard_of(rank)]
    expected = quiet_trainer(tmp_path, TokenModel(), None, per_device_eval_batch_size=8).evaluate(samples)
    assert [num_batches for _, num_batches in results] == list(SHARDS)
    for metrics, _ in results:
        assert metrics["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
        assert metrics["eval_tokens"] == expected["eval_tokens"]


def _evaluate_nothing(output_dir: Path, dispatches: bool) -> str:
    trainer = ddp_trainer(output_dir, TokenModel(), None, dispatch_eval_batches=dispatches, max_eval_steps=7)
    with pytest.raises(RuntimeError, match="across all 2 ranks") as failure:
        trainer.evaluate(Stream([]))
    return str(failure.value)


@pytest.mark.parametrize("dispatches", [False, True])
def test_empty_evaluation_is_explained_on_every_rank(dispatches: bool, tmp_path: Path) -> None:
    first, second = run_on_ranks(_evaluate_nothing, 2, tmp_path, dispatches)
    assert first == second
    settings = dict(line.rsplit(maxsplit=1) for line in first.splitlines() if line.startswith("  "))
    found = {name.strip(): value for name, value in settings.items()}
    expected = {
        "dispatch_batches": "True",
        "dispatch_eval_batches": str(dispatches),
        "dispatch_eval_batches (effective)": str(dispatches),
        "dataloader_drop_last": "False",
        "per_device_eval_batch_size": "1",
        "max_eval_steps": "7",
        "world_size": "2",
    }
    assert expected.items() <= found.items()


# --- replicas


class WithBuffers(TokenModel):
    """Model with a buffer that training changes, and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2) * self.scale
        return self.head(hidden)


def _tamper(what: str, trainer: DDPTrainer) -> None:
    model = trainer.unwrapped_model()
    tensor = {
        "parameter": lambda: model.head.weight,
        "moment": lambda: trainer.optimizer.state[model.embedding.weight]["momentum_buffer"],
        "buffer": lambda: model.scale,
    }[what]()
    with torch.no_grad():
        tensor.view(-1)[3] += 1e-6 if what != "parameter" else 1e-3


def _save_tampered(output_dir: Path, what: str, culprit: int) -> str:
    def tamper(state: Any, trainer: Any, **_: Any) -> None:
        if state.global_step == 2 and environment().rank == culprit:
            _tamper(what, trainer)

    trainer = ddp_trainer(
        output_dir,
        WithBuffers(),
        token_samples(16),
        Recorder(on_step_end=tamper),
        save_strategy="steps",
        save_steps=2,
        per_device_train_batch_size=2,
        momentum=0.9,
        max_steps=4,
    )
    with pytest.raises(ReplicationError) as failure:
        trainer.train()
    return str(failure.value)


@pytest.mark.parametrize(("what", "name"), [("parameter", "head.weight"), ("buffer", "scale")])
def test_changed_replica_is_named_at_the_next_save(what: str, name: str, tmp_path: Path) -> None:
    for message in run_on_ranks(_save_tampered, 3, tmp_path, what, 1):
        assert "Replication validation failed" in message
        assert f"{name}: rank 1 differs" in message
    assert saved_steps(tmp_path) == []


def _save_tampered_moment(output_dir: Path) -> list[str]:
    with kept_records(logging.ERROR) as records:
        message = _save_tampered(output_dir, "moment", 0)
    assert "embedding.weight" in message, "a wrong moment shows in its parameter at the next save"
    return [record for record in records if "Replication" in record]


def test_changed_moment_is_reported_and_marked_in_the_manifest(tmp_path: Path) -> None:
    """The optimizer is an optional component, so the save continues."""
    reports = run_on_ranks(_save_tampered_moment, 3, tmp_path)
    assert any("embedding.weight.momentum_buffer: rank 0 differs" in report for report in reports[0])
    manifest = read_manifest(str(tmp_path / "checkpoints" / "checkpoint-2"))
    assert manifest.components["optimizer"].metadata["replication"] == "diverged"


def _train_with_buffers(output_dir: Path) -> tuple[dict[str, Tensor], list[tuple[str, SharingPattern, bool]]]:
    trainer = ddp_trainer(
        output_dir,
        WithBuffers(),
        token_samples(18),
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=2,
        max_steps=3,
        trainer_options={"eval_dataset": token_samples(5)},
    )
    trainer.train()
    # DDP broadcasts the buffers that the first forward pass changed, and no others.
    assert [id(one) for one in trainer.model.modules_buffers] == [
        id(one) for one in trainer.unwrapped_model().norm.buffers()
    ]
    components = [(one.key, one.sharing_pattern, one.validate_replication) for one in trainer.get_state_components()]
    assert list(trainer.get_process_groups()) == ["ddp_group"]
    return weights(trainer.unwrapped_model()), components


class WithConstant(TokenModel):
    """Model with a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids) * self.scale)


class BroadcastsAll(DDPTrainer):
    """Trainer that broadcasts all buffers in each forward pass."""

    def _around_micro_batch(self) -> Any:
        return nullcontext()


def _broadcasts(output_dir: Path, trainer_class: type[DDPTrainer]) -> tuple[bool, list[float], dict[str, Tensor]]:
    losses = []
    will_sync = []
    for model in (WithConstant(), WithBuffers()):
        trainer = quiet_trainer(
            output_dir,
            model,
            token_samples(18),
            trainer_class=trainer_class,
            trainer_options={"distributed_env": environment()},
            max_steps=3,
            logging_strategy="steps",
            logging_steps=1,
            save_strategy="no",
        )
        assert isinstance(trainer, DDPTrainer)
        trainer.train()
        will_sync.append(trainer.model.will_sync_module_buffers())
        losses += [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert will_sync[1]
    return will_sync[0], losses, weights(trainer.unwrapped_model())


def test_constant_buffers_are_not_broadcast_and_results_stay_the_same(tmp_path: Path) -> None:
    for (less, *results), (all_, *expected) in zip(
        run_on_ranks(_broadcasts, 2, tmp_path / "less", DDPTrainer),
        run_on_ranks(_broadcasts, 2, tmp_path / "all", BroadcastsAll),
        strict=True,
    ):
        assert (less, all_) == (False, True)
        torch.testing.assert_close(results, expected, rtol=0.0, atol=0.0)


def test_buffers_changed_by_training_are_no_divergence(tmp_path: Path) -> None:
    (first, components), (second, _) = run_on_ranks(_train_with_buffers, 2, tmp_path)
    assert saved_steps(tmp_path) == [2, 3]
    assert first["norm.running_mean"].any()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert components == [
        ("model", SharingPattern.REPLICATED, True),
        ("optimizer", SharingPattern.REPLICATED, True),
        ("scheduler", SharingPattern.REPLICATED, False),
        ("trainer", SharingPattern.REPLICATED, False),
        ("dataset", SharingPattern.GLOBAL, False),
        ("rng", SharingPattern.PER_RANK, False),
    ]


# --- requests of callbacks


def _train_with_requests(output_dir: Path) -> tuple[int, list[int], list[int]]:
    rank = environment().rank

    def ask(state: Any, control: Any, **_: Any) -> None:
        control.should_save |= rank == 1 and state.global_step == 2
        control.should_evaluate |= rank == 0 and state.global_step == 3
        control.should_training_stop |= rank == 1 and state.global_step == 5

    recorder = Recorder(on_step_end=ask)
    # Callbacks on a single rank are common.
    callbacks = [recorder] if rank < 2 else []
    trainer = ddp_trainer(
        output_dir,
        TokenModel(),
        token_samples(60),
        *callbacks,
        max_steps=9,
        trainer_options={"eval_dataset": token_samples(5)},
    )
    trainer.train()
    return trainer.state.global_step, recorder.steps("on_save"), recorder.steps("on_evaluate")


def test_request_of_a_callback_on_one_rank_applies_to_all(tmp_path: Path) -> None:
    (first, *done), (second, *_), (third, *_) = run_on_ranks(_train_with_requests, 3, tmp_path)
    assert first == second == third == 5
    assert done == [[2], [3]]


def _stop_where_one_loss_is_not_a_number(output_dir: Path) -> int:
    from forgather.ml.trainer.callbacks import DivergenceDetector

    def spoil(logits: Tensor, labels: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += logits.requires_grad
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return loss * float("nan") if environment().rank == 1 and num_calls > 6 else loss

    num_calls = 0
    trainer = ddp_trainer(
        output_dir,
        TokenModel(),
        token_samples(40)[:2] * 20,
        DivergenceDetector(),
        nonfinite_grad="ignore",
        max_steps=15,
        logging_strategy="steps",
        logging_steps=4,
        trainer_options={"compute_loss_func": spoil},
    )
    trainer.train()
    return int(trainer.state.global_step)


def test_ranks_stop_together_if_one_diverges(tmp_path: Path) -> None:
    first, second = run_on_ranks(_stop_where_one_loss_is_not_a_number, 2, tmp_path)
    assert first == second < 15


# --- what comes before, between and after steps


def _evaluate_before_the_first_step(output_dir: Path) -> int:
    """Evaluate one batch, so that only one rank runs the model before the first step."""

    def evaluate(trainer: Any, **_: Any) -> None:
        trainer.evaluate(token_samples(1))

    trainer = ddp_trainer(output_dir, WithBuffers(), token_samples(12), Recorder(on_train_begin=evaluate), max_steps=3)
    return trainer.train().global_step


def test_evaluation_before_the_first_step_keeps_ranks_in_step(tmp_path: Path) -> None:
    assert run_on_ranks(_evaluate_before_the_first_step, 2, tmp_path) == [3, 3]


class OwnLoss(TokenModel):
    """Model loss with a parameter that the logits do not depend on, and a buffer that is registered late."""

    loss_type = "Own"

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(8, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(8), persistent=False)
        hidden = self.embedding(input_ids) * self.mask
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss + self.auxiliary(hidden).square().mean(), "logits": logits}


def _train_on_a_remainder(output_dir: Path) -> dict[str, Tensor]:
    samples = [one for one in token_samples(24) if (one["labels"] >= 0).any()][:6]
    trainer = ddp_trainer(output_dir, OwnLoss(), samples, per_device_train_batch_size=2)
    trainer.train()
    return weights(trainer.unwrapped_model())


def test_remainder_step_reaches_parameters_used_only_by_the_model_loss(tmp_path: Path) -> None:
    first, second = run_on_ranks(_train_on_a_remainder, 2, tmp_path)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]) and tensor.isfinite().all(), name


def _choose_the_best(output_dir: Path) -> tuple[str, dict[str, Tensor]]:
    rank = environment().rank

    def add_accuracy(metrics: dict[str, Any], state: Any, **_: Any) -> None:
        metrics["eval_accuracy"] = float(state.global_step if rank == 0 else -state.global_step)

    trainer = ddp_trainer(
        output_dir,
        TokenModel(),
        token_samples(40),
        Recorder(on_evaluate=add_accuracy),
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        best_model_metric="eval_accuracy",
        best_model_greater_is_better=True,
        trainer_options={"eval_dataset": token_samples(5)},
    )
    trainer.train()
    return Path(trainer.state.best_model_checkpoint).name, weights(trainer.unwrapped_model())


def test_ranks_choose_the_same_best_model_despite_different_metrics(tmp_path: Path) -> None:
    (first, model), (second, other) = run_on_ranks(_choose_the_best, 2, tmp_path)
    assert first == second == "checkpoint-6"
    assert all(torch.equal(tensor, other[name]) for name, tensor in model.items())


class Breaking:
    """Dataset with one unreadable sample."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 9:
            raise ValueError("this sample is broken")
        return token_samples(20)[index]


def _survive(output_dir: Path) -> list[float]:
    trainer = ddp_trainer(output_dir, TokenModel(), Breaking(), trainer_options={"eval_dataset": token_samples(5)})
    with pytest.raises(
        DistributedError,
        match=r"rank 0 failed while loading a batch: DataError: Sample 9 .*ValueError: this sample is broken",
    ):
        trainer.train()
    return [trainer.evaluate()["eval_loss"] for _ in range(2)]


def test_trainer_evaluates_after_a_caught_error(tmp_path: Path) -> None:
    first, second = run_on_ranks(_survive, 2, tmp_path)
    assert first == second and first[0] == first[1]


# --- what else


def _seeds(output_dir: Path) -> int:
    trainer = ddp_trainer(output_dir, TokenModel(), token_samples(8), seed=-1, max_steps=1)
    trainer.train()
    return int(trainer.seed)


def test_ranks_agree_on_a_random_seed(tmp_path: Path) -> None:
    first, second = run_on_ranks(_seeds, 2, tmp_path)
    assert first == second


def _train_evaluate_train(output_dir: Path) -> list[float]:
    trainer = ddp_trainer(output_dir, TokenModel(), token_samples(24), max_steps=3, trainer_options={})
    alone = trainer.evaluate(token_samples(7))["eval_loss"]
    trainer.train()
    first = trainer.evaluate(token_samples(7))["eval_loss"]
    trainer.train()
    return [alone, first, trainer.evaluate(token_samples(7))["eval_loss"]]


def test_trainer_can_be_reused(tmp_path: Path) -> None:
    first, second = run_on_ranks(_train_evaluate_train, 2, tmp_path)
    assert first == second and len(set(first)) == 3


def _same_stream(output_dir: Path, dispatches: bool) -> list[str]:
    with kept_records(logging.WARNING) as records:
        ddp_trainer(
            output_dir, TokenModel(), Stream(token_samples(8)), dispatch_batches=dispatches, max_steps=2
        ).train()
    return [record for record in records if "same first batch" in record]


def test_stream_with_equal_samples_on_two_ranks_causes_a_warning(tmp_path: Path) -> None:
    for warnings in run_on_ranks(_same_stream, 2, tmp_path / "sharded", False):
        assert len(warnings) == 1 and "split_dataset_by_node" in warnings[0]
    assert run_on_ranks(_same_stream, 2, tmp_path / "dispatched", True) == [[], []]


def test_single_rank_equals_the_plain_trainer(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, TokenModel(), token_samples(6), trainer_class=DDPTrainer)
    plain = quiet_trainer(tmp_path, TokenModel(), token_samples(6))
    trainer.train()
    plain.train()
    assert trainer.get_process_groups() == {}
    patterns = {one.sharing_pattern for one in trainer.get_state_components()[:-1]}
    assert patterns == {SharingPattern.GLOBAL, SharingPattern.REPLICATED}
    for name, tensor in weights(plain.unwrapped_model()).items():
        assert torch.equal(tensor, weights(trainer.unwrapped_model())[name])


def test_several_ranks_need_an_initialised_process_group(tmp_path: Path) -> None:
    env = StaticDistributedEnvironment(world_size=2, local_world_size=2)
    trainer = quiet_trainer(
        tmp_path, TokenModel(), token_samples(4), trainer_class=DDPTrainer, trainer_options={"distributed_env": env}
    )
    with pytest.raises(RuntimeError, match=r"2 ranks.*not initialised.*torchrun"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0"),
        ({"post_local_sgd": {"period": 0}}, "post_local_sgd.period=0"),
        ({"ddp": {"bucket_cap": 3}}, "ddp has no argument 'bucket_cap'. Did you mean 'bucket_cap_mb'"),
        ({"ddp": {"static_graph": "perhaps"}}, "static_graph='perhaps'"),
        (
            {"ddp": {"static_graph": True}, "gradient_accumulation_steps": 2},
            "static_graph=True cannot be combined with gradient_accumulation_steps=2",
        ),
        ({"dispatch_batch": True}, "Did you mean 'dispatch_batches'"),
        (
            {"post_local_sgd": {"enabled": True}, "mixed_precision": "fp16"},
            "post_local_sgd.enabled=True cannot be combined with mixed_precision='fp16'",
        ),
        ({"fuse_optim_with_backward": True}, "fuse_optim_with_backward=True cannot be combined with DDP"),
    ],
)
def test_impossible_settings_are_rejected(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        quiet_trainer(tmp_path, TokenModel(), token_samples(4), trainer_class=DDPTrainer, **settings)


def test_arguments_have_the_documented_defaults() -> None:
    args = DDPTrainingArguments()
    assert (args.dispatch_batches, args.dispatch_eval_batches) == (True, None)
    assert vars(args.ddp) == {
        "broadcast_buffers": True,
        "init_sync": True,
        "bucket_cap_mb": None,
        "find_unused_parameters": False,
        "gradient_as_bucket_view": True,
        "static_graph": False,
        "skip_all_reduce_unused_params": False,
        "shard_optimizer": False,
    }
    assert vars(args.post_local_sgd) == {
        "enabled": False,
        "start_step": 500,
        "period": 4,
        "post_local_gradient_allreduce": False,
    }
