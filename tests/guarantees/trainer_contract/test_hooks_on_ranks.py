"""Hooks on two ranks: overrides without super() train like one device, and their ranks stay equal."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.checkpoint.components import StateComponent
from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import TrainerState
from tests.guarantees.trainer_contract.step_hooks import (
    STEP_HOOKS,
    ByRange,
    MaskingCollator,
    OwnBatches,
    Printed,
    UntilSync,
    causal_mean,
    with_hooks,
)
from tests.support.data_parallel import Result, assert_same_training, environment, run
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import TokenModel, quiet_trainer, saved_steps, token_samples

SAMPLES = token_samples(19)
# Five batches of four samples and windows of two: the last batch and the last window of an epoch are short.
SETTINGS: dict[str, Any] = {
    "momentum": 0.9,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "max_grad_norm": 1.0,
}


class Wrapping:
    """Override that wraps the model in DDP."""

    def _wrap(self: Any) -> None:
        self.model = DistributedDataParallel(self.model)


class OwnRanks:
    def _init_distributed(self: Any) -> None:
        self.num_processes, self.is_world_process_zero = dist.get_world_size(), dist.get_rank() == 0


class OwnModel:
    def _prepare_model(self: Any) -> None:
        self.model = TokenModel().to(self.args.device)


class OwnDevice:
    def _init_device(self: Any) -> None:
        self.args.device = "cpu"


class OwnOptimizer:
    def _init_optimizer(self: Any) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: 1.0)


class OwnLoss:
    def _wrap_loss_fn(self: Any) -> None:
        self.loss_fn = causal_mean


class OwnState:
    def _init_state(self: Any) -> TrainerState:
        names = ("logging_steps", "eval_steps", "num_train_epochs", "max_eval_steps")
        settings = {name: getattr(self.args, name) for name in names}
        return TrainerState(train_batch_size=2, max_steps=self.max_steps, **settings)


class OwnLoaders:
    """Override with the batches of this rank as a list."""

    settings: dict[str, Any] = {"dispatch_batches": False}  # noqa: RUF012

    def _init_dataloaders(self: Any, train_dataset: Any, eval_dataset: Any) -> None:
        self.train_dataloader = batches_of_rank()


class OwnLoader:
    settings: dict[str, Any] = {"dispatch_batches": False}  # noqa: RUF012

    def _get_dataloader(self: Any, dataset: Any, batch_size: int) -> Any:
        return batches_of_rank()


def batches_of_rank() -> list[Any]:
    """Return the batches of this rank as the sampler distributes them: every second sample of a global batch."""
    rank, dealt = dist.get_rank(), []
    for start in range(0, len(SAMPLES), 4):
        own = SAMPLES[start : start + 4][rank::2]
        dealt.append({name: torch.stack([one[name] for one in own]) for name in own[0]})
    return dealt


class Averaging:
    """Override with explicit reductions for logs."""

    def _distributed_loss(self: Any, loss: Any) -> Any:
        return self._distributed_tokens(loss) / dist.get_world_size()

    def _distributed_tokens(self: Any, tokens: Any) -> Any:
        total = tokens.clone()
        dist.all_reduce(total)
        return total

    def _distributed_peak_mem(self: Any, local_peak: int) -> list[int]:
        return [local_peak] * dist.get_world_size()


PREPARATION = (OwnRanks, OwnModel, OwnDevice, OwnOptimizer, OwnLoss, OwnState, OwnLoaders, OwnLoader, Wrapping)
CASES: dict[str, tuple[type, ...]] = {
    **{one.__name__: (one,) for one in (*STEP_HOOKS, *PREPARATION, Averaging) if one is not ByRange},
    "together": (UntilSync, Printed, OwnModel, OwnOptimizer, OwnDevice, OwnState),
    "wrapped_printed": (Wrapping, Printed),
}
BASES: dict[str, Any] = {"ddp": DDPTrainer, "plain": Trainer}


def train(output_dir: str, base: str, hooks: str, **settings: Any) -> Result:
    wrapping = () if base == "ddp" or Wrapping in CASES[hooks] else (Wrapping,)
    own = with_hooks(BASES[base], *CASES[hooks], *wrapping)
    if base == "ddp":
        settings = {**getattr(own, "settings", {}), **settings}
    return run(build(output_dir, own, **settings))


def build(output_dir: str, trainer_class: Any, **settings: Any) -> Any:
    options = {"distributed_env": environment(), **settings.pop("trainer_options", {})}
    own = {**SETTINGS, "per_device_train_batch_size": 2, **settings}
    return quiet_trainer(
        Path(output_dir), TokenModel(), SAMPLES, trainer_class=trainer_class, trainer_options=options, **own
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Result of one device with the batches of both ranks."""
    settings = {**SETTINGS, "per_device_train_batch_size": 4}
    return run(quiet_trainer(tmp_path_factory.mktemp("expected"), TokenModel(), SAMPLES, **settings))


def require_equal(results: list[Result], expected: Result | None = None) -> None:
    first, *others = results
    for other in others:
        assert all(torch.equal(first.weights[name], value) for name, value in other.weights.items())
        assert other.losses == first.losses
    if expected is not None:
        assert_same_training(first, expected, tolerance=2e-6)


@pytest.mark.parametrize("hooks", CASES)
def test_override_on_ddp_trains_like_one_device(hooks: str, tmp_path: Path, expected: Result) -> None:
    require_equal(run_on_ranks(train, 2, str(tmp_path), "ddp", hooks), expected)


@pytest.mark.parametrize("hooks", ["Wrapping", "wrapped_printed", "UntilSync", "Rescaled", "OwnLoaders", "OwnRanks"])
def test_trainer_that_wraps_its_model_trains_like_one_device(hooks: str, tmp_path: Path, expected: Result) -> None:
    require_equal(run_on_ranks(train, 2, str(tmp_path), "plain", hooks), expected)


class Whole:
    """Override with all batches as a list, which rank 0 dispatches."""

    def _get_dataloader(self: Any, dataset: Any, batch_size: int) -> Any:
        pairs = [SAMPLES[start : start + batch_size] for start in range(0, 16, batch_size)]
        return [{name: torch.stack([one[name] for one in own]) for name in own[0]} for own in pairs]


def train_on_whole(output_dir: str) -> Result:
    return run(build(output_dir, with_hooks(DDPTrainer, Whole)))


def test_loader_of_all_batches_is_dispatched(tmp_path: Path) -> None:
    settings = {**SETTINGS, "per_device_train_batch_size": 4}
    expected = run(quiet_trainer(tmp_path / "one", TokenModel(), SAMPLES[:16], **settings))
    require_equal(run_on_ranks(train_on_whole, 2, str(tmp_path / "ranks")), expected)


class NormModel(TokenModel):
    """Model with buffers that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, input_ids: Any) -> Any:
        hidden = self.embedding(input_ids)
        return self.head(self.norm(hidden.flatten(0, 1)).view_as(hidden))


def save_buffers(output_dir: str) -> dict[str, Any]:
    settings = {**SETTINGS, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    own = with_hooks(DDPTrainer, Printed)
    options = {"distributed_env": environment()}
    trainer = quiet_trainer(
        Path(output_dir), NormModel(), SAMPLES, trainer_class=own, trainer_options=options, **settings
    )
    return run(trainer).weights


def test_changed_buffers_are_synchronised_around_an_override(tmp_path: Path) -> None:
    first, second = run_on_ranks(save_buffers, 2, str(tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert saved_steps(tmp_path) == [1, 2]


def train_twice(output_dir: str, base: str) -> list[Result]:
    hooks = (Printed, OwnOptimizer) if base == "ddp" else (Wrapping, Printed, OwnOptimizer)
    saving = {"save_strategy": "steps", "save_steps": 2}
    own = with_hooks(BASES[base], *hooks)
    return [run(build(output_dir, own, max_steps=steps, **saving)) for steps in (2, 6)]


@pytest.mark.parametrize("base", BASES)
def test_hooks_on_ranks_resume_exactly(base: str, tmp_path: Path, expected: Result) -> None:
    results = run_on_ranks(train_twice, 2, str(tmp_path), base)
    require_equal([one for _, one in results])
    assert len(results[0][0].losses) == 2 and len(results[0][1].losses) == 4
    torch.testing.assert_close(results[0][0].losses + results[0][1].losses, expected.losses, rtol=2e-6, atol=0)


def prepare_batches(output_dir: str) -> tuple[list[int], Result]:
    own = with_hooks(DDPTrainer, OwnBatches)
    return own.prepared, run(build(output_dir, own))


def test_batch_is_prepared_once_on_each_rank(tmp_path: Path) -> None:
    settings = {**SETTINGS, "per_device_train_batch_size": 4}
    options = {"data_collator": MaskingCollator()}
    masked = run(quiet_trainer(tmp_path / "one", TokenModel(), SAMPLES, trainer_options=options, **settings))
    results = run_on_ranks(prepare_batches, 2, str(tmp_path / "ranks"))
    require_equal([result for _, result in results], masked)
    assert [len(prepared) for prepared, _ in results] == [10, 10]


def train_by_range(output_dir: str) -> Result:
    return run(build(output_dir, with_hooks(DDPTrainer, ByRange)))


def test_step_with_a_fixed_range_ends_epochs_on_all_ranks(tmp_path: Path) -> None:
    results = run_on_ranks(train_by_range, 2, str(tmp_path))
    require_equal(results)
    assert [result.metrics["step"] for result in results] == [4, 4]


def never_synchronise(output_dir: str) -> str:
    def never(self: Any) -> bool:
        return False

    own = type("Never", (DDPTrainer,), {"_should_sync_gradients": never})
    with pytest.raises(RuntimeError, match=r"_should_sync_gradients\(\) is False") as error:
        build(output_dir, own).train()
    return str(error.value)


def test_unsynchronised_gradients_are_an_error(tmp_path: Path) -> None:
    assert len(set(run_on_ranks(never_synchronise, 2, str(tmp_path)))) == 1


def evaluate_own(output_dir: str) -> dict[str, Any]:
    class Own(DDPTrainer):
        """Trainer that reduces its own predictions; in an evaluation, `_distributed_loss` is the identity."""

        def _prediction_step(self, input_dict: dict[str, Any], labels: Any) -> dict[str, Any]:
            logits = self.model(**input_dict)
            loss = self._distributed_loss(self.loss_fn(logits, labels))
            torch.testing.assert_close(torch.nan_to_num(causal_mean(logits, labels)), loss)
            return {"loss": loss, "logits": logits, "labels": labels}

    data = {"eval_dataset": SAMPLES}
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "per_device_eval_batch_size": 2}
    trainer = build(output_dir, Own, trainer_options=data, **settings)
    trainer.train()
    plain = build(output_dir + "/plain", DDPTrainer, trainer_options=data, **settings)
    plain.train()
    in_training = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
    return {
        "own": trainer.evaluate()["eval_loss"],
        "default": plain.evaluate()["eval_loss"],
        "in_training": in_training,
    }


def test_custom_prediction_step_is_reduced_once(tmp_path: Path) -> None:
    first, second = run_on_ranks(evaluate_own, 2, str(tmp_path))
    assert first == second
    assert first["own"] == pytest.approx(first["default"], rel=1e-6)
    assert first["in_training"] == [first["own"]]


def evaluate_apart(output_dir: str) -> list[Any]:
    class Apart(DDPTrainer):
        def _dispatch_eval_batches(self) -> bool:
            return False

    found: list[Any] = []
    for trainer_class in (DDPTrainer, Apart):
        trainer = build(output_dir, trainer_class, trainer_options={"eval_dataset": SAMPLES})
        metrics = trainer.evaluate()
        found.append((type(trainer.eval_dataloader).__name__, metrics["eval_loss"], metrics["eval_tokens"]))
    return found


def test_hook_decides_which_rank_reads_evaluation_batches(tmp_path: Path) -> None:
    for dispatched, apart in run_on_ranks(evaluate_apart, 2, str(tmp_path)):
        assert dispatched[0] != apart[0]
        assert dispatched[1:] == pytest.approx(apart[1:])


def own_manager(output_dir: str) -> bool:
    class Own(DDPTrainer):
        def _init_checkpoint_manager(self) -> CheckpointManager:
            config = CheckpointConfig(output_dir=output_dir + "/elsewhere", save_total_limit=None)
            return CheckpointManager(config, self.dist, self, self.unwrapped_model())

    trainer = build(output_dir, Own, save_strategy="steps", save_steps=1, max_steps=2)
    trainer.train()
    return isinstance(trainer.checkpoint_manager, CheckpointManager)


def test_checkpoint_manager_of_the_hook_is_used(tmp_path: Path) -> None:
    assert run_on_ranks(own_manager, 2, str(tmp_path)) == [True, True]
    assert saved_steps(tmp_path / "elsewhere") == [1, 2]


class Listening(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def leave_out(output_dir: str) -> list[str]:
    class LeavingOut(DDPTrainer):
        def get_state_components(self) -> list[StateComponent]:
            return [one for one in super().get_state_components() if one.key != "post_local_sgd"]

    listening = Listening()
    logging.getLogger("forgather").addHandler(listening)
    try:
        local = {"enabled": True, "start_step": 1, "period": 2}
        build(output_dir, LeavingOut, max_steps=2, save_strategy="steps", save_steps=1, post_local_sgd=local).train()
    finally:
        logging.getLogger("forgather").removeHandler(listening)
    return [message for message in listening.messages if "omits the component" in message]


def test_omitted_post_local_sgd_component_warns(tmp_path: Path) -> None:
    for messages in run_on_ranks(leave_out, 2, str(tmp_path)):
        assert len(messages) == 1 and "post_local_sgd" in messages[0] and "is not restored" in messages[0]


def train_apart(output_dir: str) -> str:
    with pytest.raises(ValueError, match="trains on one device") as error:
        build(output_dir, Trainer).train()
    return str(error.value)


def test_unsynchronised_ranks_are_rejected(tmp_path: Path) -> None:
    run_on_ranks(train_apart, 2, str(tmp_path))
