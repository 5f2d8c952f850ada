"""Preparation hooks on one device: the trainer uses everything that an override sets or returns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager
from forgather.ml.loss import RescaleLoss
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import TrainerState
from tests.guarantees.trainer_contract.prepared import batches, build, train
from tests.guarantees.trainer_contract.step_hooks import causal_mean
from tests.support.data_parallel import Result, assert_same_training, run
from tests.support.tiny_models import Recorder, TokenModel, saved_steps, weights

HOOKS = (
    "_init_distributed",
    "_init_device",
    "_resolve_checkpoint",
    "_init_dataloaders",
    "_get_dataloader",
    "_update_training_steps",
    "_prepare_model",
    "_wrap_loss_fn",
    "_maybe_get_fused_loss_fn",
    "_compile_model",
    "_init_optimizer",
    "_wrap",
    "_init_state",
    "_compute_flops_per_token",
    "_init_checkpoint_manager",
    "_setup_periodic_functions",
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(build(tmp_path_factory.mktemp("expected"), num_train_epochs=2))


def test_hooks_are_called_in_the_order_of_the_contract(tmp_path: Path, expected: Result) -> None:
    called: list[str] = []

    def noting(name: str) -> Any:
        def hook(self: Any, *args: Any) -> Any:
            called.append(name)
            return getattr(Trainer, name)(self, *args)

        return hook

    noted = type("Noting", (Trainer,), {name: noting(name) for name in HOOKS})
    _, result = train(tmp_path, noted, torch_compile=True, torch_compile_backend="eager")
    assert_same_training(result, expected)
    assert called == list(HOOKS)


# --- ranks and device


def test_unset_ranks_default_to_one(tmp_path: Path, expected: Result) -> None:
    class Alone(Trainer):
        def _init_distributed(self) -> None:
            pass

        def _init_device(self) -> None:
            self.args.device = "cpu"

    trainer, result = train(tmp_path, Alone)
    assert (trainer.num_processes, trainer.is_local_process_zero, trainer.is_world_process_zero) == (1, True, True)
    assert trainer.state.is_world_process_zero
    assert_same_training(result, expected)


def test_resume_from_checkpoint_is_a_path_or_false_after_its_hook(tmp_path: Path) -> None:
    found: list[Any] = []

    class Noting(Trainer):
        def _resolve_checkpoint(self) -> None:
            super()._resolve_checkpoint()
            found.append(self.args.resume_from_checkpoint)

        def _init_dataloaders(self, train_dataset: Any, eval_dataset: Any) -> None:
            super()._init_dataloaders(train_dataset, eval_dataset)
            found.append(self.args.resume_from_checkpoint)

    saving = {"save_strategy": "steps", "save_steps": 2}
    build(tmp_path, Noting, max_steps=2, **saving).train()
    build(tmp_path, Noting, max_steps=3, **saving).train()
    path = str(tmp_path / "checkpoints" / "checkpoint-2")
    assert found == [False, False, path, path]


def test_resolve_checkpoint_override_selects_the_checkpoint(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    build(tmp_path, max_steps=3, save_total_limit=5, **saving).train()

    class FromFirst(Trainer):
        def _resolve_checkpoint(self) -> None:
            self.args.resume_from_checkpoint = str(tmp_path / "checkpoints" / "checkpoint-1")

    class Afresh(Trainer):
        def _resolve_checkpoint(self) -> None:
            self.args.resume_from_checkpoint = False

    for trainer_class, steps in ((FromFirst, [2, 3]), (Afresh, [1, 2, 3])):
        recorder = Recorder()
        trainer = build(tmp_path, trainer_class, max_steps=3)
        trainer.add_callback(recorder)
        trainer.train()
        assert recorder.steps("on_step_end") == steps


# --- model


def test_model_of_the_hook_is_trained(tmp_path: Path, expected: Result) -> None:
    class Own(Trainer):
        def _prepare_model(self) -> None:
            self.model = TokenModel()

    trainer, result = train(tmp_path, Own)
    assert_same_training(result, expected)
    assert isinstance(trainer.loss_fn, RescaleLoss)


def test_compile_hook_may_compile_in_place_or_replace_the_model(tmp_path: Path, expected: Result) -> None:
    class InPlace(Trainer):
        def _compile_model(self) -> None:
            self.model.compile(backend="eager")

    class Replacing(Trainer):
        def _compile_model(self) -> None:
            self.model = torch.compile(self.model, backend="eager")

    for trainer_class in (InPlace, Replacing):
        trainer, result = train(tmp_path / trainer_class.__name__, trainer_class, torch_compile=True)
        assert_same_training(result, expected)
        assert isinstance(trainer.unwrapped_model(), TokenModel)


def test_model_is_compiled_only_on_request(tmp_path: Path) -> None:
    class Refusing(Trainer):
        def _compile_model(self) -> None:
            raise AssertionError("torch_compile=False")

    train(tmp_path, Refusing)


# --- loss


def test_loss_of_the_hook_is_used(tmp_path: Path, expected: Result) -> None:
    class Own(Trainer):
        def _wrap_loss_fn(self) -> None:
            self.loss_fn = RescaleLoss(lambda logits, labels: torch.nan_to_num(causal_mean(logits, labels)), 0.5)

    trainer, result = train(tmp_path / "own", Own)
    assert isinstance(trainer.loss_fn, RescaleLoss) and trainer.loss_fn.scale_factor == 0.5
    means = [causal_mean(TokenModel()(one["input_ids"]), one["labels"]) for one in batches()[:2]]
    assert result.losses[0] == pytest.approx(0.5 * torch.nan_to_num(torch.stack(means)).sum().item())


def doubled(logits: Tensor, labels: Tensor) -> Tensor:
    return 2 * causal_mean(logits, labels)


class LossInHook(Trainer):
    def _wrap_loss_fn(self) -> None:
        self.loss_fn = doubled
        super()._wrap_loss_fn()


class LossAlone(Trainer):
    def _wrap_loss_fn(self) -> None:
        self.loss_fn = doubled


class LossInConstructor(Trainer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.loss_fn = doubled


class LossWithModel(Trainer):
    def _prepare_model(self) -> None:
        super()._prepare_model()
        self.loss_fn = doubled


@pytest.mark.parametrize("trainer_class", [LossInHook, LossAlone, LossInConstructor, LossWithModel])
def test_loss_set_by_a_subclass_is_token_weighted(trainer_class: Any, tmp_path: Path, expected: Result) -> None:
    trainer = build(tmp_path, trainer_class, num_train_epochs=1, trainer_options={"model_init": TokenModel})
    for _ in range(2):
        result = run(trainer)
        assert isinstance(trainer.loss_fn, RescaleLoss)
        assert result.losses[0] == pytest.approx(2 * expected.losses[0])


def test_optimizer_set_by_a_subclass_is_used(tmp_path: Path, expected: Result) -> None:
    class InConstructor(Trainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "optimizer_cls_and_kwargs": None})
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.lr_scheduler = LambdaLR(self.optimizer, lambda step: 1.0)

    trainer = build(tmp_path, InConstructor, num_train_epochs=2, lr_scheduler_type="linear")
    optimizer = trainer.optimizer
    assert_same_training(run(trainer), expected)
    assert trainer.optimizer is optimizer


def test_fused_loss_of_the_hook_is_used(tmp_path: Path, expected: Result) -> None:
    modules: list[Any] = []

    class Own(Trainer):
        def _maybe_get_fused_loss_fn(self, module: nn.Module, default_loss_fn: Any) -> Any:
            modules.append((module, default_loss_fn))
            return causal_mean

    trainer, result = train(tmp_path, Own)
    assert modules == [(trainer.unwrapped_model(), None)]
    assert_same_training(result, expected)


# --- optimizer


class OwnOptimizer(Trainer):
    def _init_optimizer(self) -> None:
        assert self.max_steps == 6
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: 1.0)


def test_optimizer_of_the_hook_is_used_and_resumed(tmp_path: Path, expected: Result) -> None:
    def stop(args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2

    saving = {"save_strategy": "steps", "save_steps": 2}
    first = build(tmp_path, OwnOptimizer, num_train_epochs=2, **saving)
    first.add_callback(Recorder(on_step_end=stop))
    first.train()
    assert saved_steps(tmp_path) == [2]
    trainer, resumed = train(tmp_path, OwnOptimizer, **saving)
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert resumed.losses == expected.losses[2:]
    assert all(torch.equal(expected.weights[key], value) for key, value in resumed.weights.items())


def test_optimizer_without_schedule_works(tmp_path: Path, expected: Result) -> None:
    class WithoutSchedule(Trainer):
        def _init_optimizer(self) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    _, result = train(tmp_path, WithoutSchedule)
    assert_same_training(result, expected)


# --- wrapping


class Wrapper(nn.Module):
    """Wrapper that counts forward passes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.num_calls = 0

    def forward(self, **inputs: Any) -> Any:
        self.num_calls += 1
        return self.module(**inputs)


class Wrapping(Trainer):
    def _wrap(self) -> None:
        self.model = Wrapper(self.model)

    def unwrapped_model(self) -> nn.Module:
        model = super().unwrapped_model()
        return model.module if isinstance(model, Wrapper) else model


def test_model_wrapped_by_the_hook_runs_the_forward_pass(tmp_path: Path, expected: Result) -> None:
    trainer, result = train(tmp_path, Wrapping, save_strategy="steps", save_steps=6)
    assert_same_training(result, expected)
    assert trainer.model.num_calls >= 12
    resumed = build(tmp_path)
    resumed.load_checkpoint()
    assert weights(resumed.model).keys() == weights(TokenModel()).keys()
    assert all(torch.equal(result.weights[key], value) for key, value in weights(resumed.model).items())


class NewOptimizer(Trainer):
    def _wrap(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: 1.0)


def test_optimizer_created_by_wrap_is_used_and_resumed(tmp_path: Path, expected: Result) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 5.0}
    build(tmp_path, NewOptimizer, max_steps=2, **saving).train()
    resumed = run(build(tmp_path, NewOptimizer, max_steps=6, **saving))
    assert resumed.losses == expected.losses[2:]
    assert resumed.norms == expected.norms[2:]
    assert all(torch.equal(expected.weights[key], value) for key, value in resumed.weights.items())


def test_loaders_replaced_by_wrap_are_used(tmp_path: Path, expected: Result) -> None:
    class NewLoaders(Trainer):
        def _wrap(self) -> None:
            self.train_dataloader = batches()
            self.eval_dataloader = batches()[:1]

    _, result = train(tmp_path, NewLoaders)
    assert_same_training(result, expected)


def test_parameters_replaced_by_wrap_are_an_error(tmp_path: Path) -> None:
    class Replacing(Trainer):
        def _wrap(self) -> None:
            self.model = TokenModel()

    with pytest.raises(ValueError, match=r"2 parameters of the optimizer are not in self\.model"):
        build(tmp_path, Replacing).train()


# --- state and manager


@pytest.mark.parametrize("adds", [True, False])
def test_state_of_the_hook_is_used(adds: bool, tmp_path: Path, expected: Result) -> None:
    made: list[Any] = []

    class Own(Trainer):
        def _init_state(self) -> Any:
            names = ("logging_steps", "eval_steps", "num_train_epochs", "max_eval_steps")
            settings = {name: getattr(self.args, name) for name in names}
            state = super()._init_state() if adds else TrainerState(train_batch_size=2, max_steps=6, **settings)
            made.append(state)
            return state

    trainer, result = train(tmp_path, Own)
    assert trainer.state is made[0] and trainer.state.global_step == 6
    assert_same_training(result, expected)


def test_checkpoint_manager_of_the_hook_is_used(tmp_path: Path) -> None:
    made: list[CheckpointManager] = []

    class Own(Trainer):
        def _init_checkpoint_manager(self) -> CheckpointManager:
            config = CheckpointConfig(output_dir=str(tmp_path / "elsewhere"), save_total_limit=None)
            made.append(CheckpointManager(config, self.dist, self, self.unwrapped_model()))
            return made[-1]

    trainer = build(tmp_path / "run", Own, save_strategy="steps", save_steps=1)
    trainer.train()
    assert trainer.checkpoint_manager is made[0]
    assert saved_steps(tmp_path / "elsewhere") == [1, 2, 3]
    assert saved_steps(tmp_path / "run") == []
