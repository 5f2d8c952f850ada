"""Declared state: state components of a trainer, its own state_dict, and arguments that omit components."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.errors import CheckpointSaveError
from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.guarantees.trainer_contract.small_trainer import (
    NUM_STEPS,
    DropoutModel,
    SmallTrainer,
    same_weights,
    small_trainer,
)
from tests.support.tiny_models import TokenModel, quiet_trainer, token_samples, weights

KEYS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng")
GLOBAL = SharingPattern.GLOBAL


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = small_trainer(tmp_path_factory.mktemp("straight"))
    torch.manual_seed(1)
    trainer.train()
    return trainer


def interrupted(output_dir: Path, trainer_class: type, **settings: Any) -> Any:
    """Train up to step 3, then resume with another trainer from a different random state."""
    first = small_trainer(output_dir, trainer_class=trainer_class, max_steps=3, **settings)
    torch.manual_seed(1)
    first.train()
    resumed = small_trainer(output_dir, trainer_class=trainer_class, **settings)
    assert resumed.train().global_step == NUM_STEPS
    return resumed


# --- right after construction


@pytest.mark.parametrize("trainer_class", [SmallTrainer, Trainer, DDPTrainer])
def test_components_are_listed_right_after_construction(trainer_class: Any, tmp_path: Path) -> None:
    build = small_trainer if trainer_class is SmallTrainer else quiet_trainer
    given = () if trainer_class is SmallTrainer else (TokenModel(), token_samples(2))
    trainer = build(tmp_path, *given, trainer_class=trainer_class)
    components = {one.key: one for one in trainer.get_state_components()}
    assert tuple(components) == KEYS
    assert components["model"].required and components["model"].stateful is trainer.model
    assert components["trainer"].stateful is trainer
    assert components["rng"].sharing_pattern is SharingPattern.PER_RANK
    if trainer_class is not DDPTrainer:
        assert {components[key].sharing_pattern for key in KEYS[:-1]} == {GLOBAL}
    for key in ("optimizer", "scheduler", "dataset"):
        for use in (lambda one: one.state_dict(), lambda one: one.load_state_dict({})):
            with pytest.raises(RuntimeError, match=f"'{key}' is not built yet"):
                use(components[key].stateful)


def test_unbuilt_model_is_a_placeholder(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, None, token_samples(2), trainer_options={"model_init": TokenModel})
    (model,) = (one for one in trainer.get_state_components() if one.key == "model")
    with pytest.raises(RuntimeError, match="'model' is not built yet"):
        model.stateful.state_dict()


def test_missing_objects_are_not_declared(straight: Any) -> None:
    class WithoutSchedule(SmallTrainer):
        def _prepare(self, train_dataset: Any, eval_dataset: Any) -> None:
            super()._prepare(train_dataset, eval_dataset)
            self.lr_scheduler, self.train_dataloader = None, [1]

    trainer = small_trainer(Path(straight.args.output_dir), trainer_class=WithoutSchedule)
    trainer.load_checkpoint()
    assert [one.key for one in trainer.get_state_components()] == ["model", "optimizer", "trainer", "rng"]


# --- arguments


@pytest.mark.parametrize("key", ["optimizer", "scheduler", "dataset", "rng"])
def test_argument_omits_a_component(key: str, tmp_path: Path) -> None:
    setting = {f"save_{key}_state": False}
    small = small_trainer(tmp_path / "small", max_steps=1, **setting)
    small.train()
    trainer = quiet_trainer(tmp_path, TokenModel(), token_samples(2), max_steps=1, **setting)
    trainer.train()
    for one in (small, trainer):
        assert [component.key for component in one.get_state_components()] == [name for name in KEYS if name != key]
        path = Path(one.save_checkpoint())
        assert not list(path.glob(f"{key}_state*"))


def test_resume_without_the_optimizer_resets_it(tmp_path: Path, straight: Any) -> None:
    resumed = interrupted(tmp_path, SmallTrainer, save_optimizer_state=False)
    assert not same_weights(resumed.model, straight.model)


# --- state_dict of the trainer


class Counting(SmallTrainer):
    """Trainer with an additional number in the component "trainer"."""

    num_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_seen": self.num_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.num_seen = state_dict["num_seen"]

    def _loss(self, batch: Any) -> torch.Tensor:
        self.num_seen += 1
        return super()._loss(batch)


class CountingTrainer(Trainer):
    num_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_seen": self.num_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.num_seen = state_dict["num_seen"]

    def _count_batch_tokens(self, input_dict: dict[str, Any], labels: Any) -> int:
        self.num_seen += 1
        return 1


def test_added_state_dict_key_is_restored(tmp_path: Path, straight: Any) -> None:
    resumed = interrupted(tmp_path, Counting)
    assert resumed.num_seen == NUM_STEPS
    assert same_weights(resumed.model, straight.model)


def test_added_state_dict_key_is_restored_in_trainer(tmp_path: Path) -> None:
    def train(max_steps: int) -> Any:
        settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "trainer_class": CountingTrainer}
        trainer = quiet_trainer(tmp_path, TokenModel(), token_samples(8), max_steps=max_steps, **settings)
        trainer.train()
        return trainer

    assert train(2).num_seen == 2
    assert train(5).num_seen == 5


@pytest.mark.parametrize("base", [SmallTrainer, Trainer])
def test_state_dict_without_super_is_an_error_at_save(base: Any, tmp_path: Path) -> None:
    own = type("Forgetting", (base,), {"state_dict": lambda self: {"mine": 1}})
    if base is SmallTrainer:
        trainer = small_trainer(tmp_path, trainer_class=own)
    else:
        trainer = quiet_trainer(tmp_path, TokenModel(), token_samples(2), trainer_class=own)
    with pytest.raises(CheckpointSaveError, match=r"Forgetting\.state_dict\(\) lacks the keys .*super\(\)\.state_dict"):
        trainer.save_checkpoint()
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_trainer_state_has_state_dict_and_load_state_dict(straight: Any) -> None:
    state = straight.state.state_dict()
    assert state["global_step"] == NUM_STEPS
    other = small_trainer(Path(straight.args.output_dir), max_steps=99)
    other.save_checkpoint(str(Path(straight.args.output_dir) / "of_step_0"))
    other.state.load_state_dict(state)
    assert other.state.global_step == NUM_STEPS and other.state.max_steps == 99


# --- hand-written declarations


class Drawing:
    """Component that draws random numbers while it loads its state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.rand(3)


class ByHand(SmallTrainer):
    """Trainer with hand-written components: random state has another key and precedes a component that draws."""

    def get_state_components(self) -> list[StateComponent]:
        return [
            StateComponent("generators", RNGState(), SharingPattern.PER_RANK),
            StateComponent("model", self.model, GLOBAL),
            StateComponent("drawing", Drawing(), GLOBAL),
            StateComponent("optimizer", self.optimizer, GLOBAL),
            StateComponent("scheduler", self.lr_scheduler, GLOBAL),
            StateComponent("position", self.train_dataloader, GLOBAL),
            StateComponent("nothing", None, GLOBAL, required=False),
            StateComponent("trainer", self, GLOBAL),
        ]


class InParts(SmallTrainer):
    """Trainer with a list of modules as model."""

    def get_state_components(self) -> list[StateComponent]:
        others = [one for one in super().get_state_components() if one.key != "model"]
        embedding, _, head = self.model.layers
        return [StateComponent("model", [Named("embedding", embedding), Named("head", head)], GLOBAL), *others]


class Named(nn.Module):
    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)


def test_hand_written_components_resume_exactly(tmp_path: Path, straight: Any) -> None:
    resumed = interrupted(tmp_path, ByHand)
    assert resumed.state.log_history == straight.state.log_history
    assert same_weights(resumed.model, straight.model)


def test_raw_optimizer_is_stored_by_parameter_name(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, trainer_class=ByHand, max_steps=3)
    trainer.train()
    stored = (tmp_path / "checkpoints" / "checkpoint-3" / "optimizer_state.pt").read_bytes()
    assert b"layers.2.weight" in stored


def test_list_of_modules_is_accepted_as_model(tmp_path: Path, straight: Any) -> None:
    resumed = interrupted(tmp_path, InParts)
    assert same_weights(resumed.model, straight.model)


def test_required_component_without_object_is_an_error(tmp_path: Path) -> None:
    class Lacking(SmallTrainer):
        def get_state_components(self) -> list[StateComponent]:
            return [*super().get_state_components(), StateComponent("lacking", None, GLOBAL)]

    with pytest.raises((CheckpointSaveError, ValueError), match="lacking"):
        small_trainer(tmp_path, trainer_class=Lacking).save_checkpoint()


def test_get_state_components_is_called_at_every_save_and_load(tmp_path: Path) -> None:
    asked: list[int] = []

    class Asked(SmallTrainer):
        def get_state_components(self) -> list[StateComponent]:
            asked.append(self.state.global_step)
            return super().get_state_components()

    small_trainer(tmp_path, trainer_class=Asked, max_steps=6).train()
    assert {3, 6} <= set(asked)
    asked.clear()
    small_trainer(tmp_path, trainer_class=Asked, max_steps=7).train()
    assert asked != []


@pytest.mark.parametrize(("key", "lost"), [("trainer", "global_step"), ("ema", "average")])
def test_omitted_component_warns_once(key: str, lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class LeavingOut(Trainer):
        def get_state_components(self) -> list[StateComponent]:
            return [one for one in super().get_state_components() if one.key != key]

    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "ema_decay": 0.9}
    trainer = quiet_trainer(tmp_path, TokenModel(), token_samples(3), trainer_class=LeavingOut, **settings)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (message,) = (record.getMessage() for record in caplog.records if "get_state_components" in record.getMessage())
    assert key in message and lost in message


def test_component_omitted_by_settings_does_not_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        quiet_trainer(tmp_path, TokenModel(), token_samples(1), save_strategy="steps").train()
        small_trainer(tmp_path / "small", trainer_class=ByHand, max_steps=1).train()
    assert not [record for record in caplog.records if "get_state_components" in record.getMessage()]


# --- the older interface


class Older(SmallTrainer):
    """Trainer with the deprecated dictionaries only."""

    extra: Any = None

    def get_statefuls_for_save(self) -> dict[str, Any]:
        return {"extra": self.extra}

    def get_statefuls_for_load(self) -> dict[str, Any]:
        return {"extra": self.extra}


class Remembering:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_deprecated_statefuls_dictionaries_still_work(tmp_path: Path, straight: Any) -> None:
    def make(value: int, max_steps: int) -> Any:
        trainer = small_trainer(tmp_path, trainer_class=Older, max_steps=max_steps)
        trainer.extra = Remembering(value)
        return trainer

    first = make(5, 3)
    torch.manual_seed(1)
    with pytest.warns(DeprecationWarning, match="get_statefuls_for_save"):
        first.train()
    resumed = make(0, NUM_STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        resumed.train()
    assert resumed.extra.value == 5
    assert same_weights(resumed.model, straight.model)


def test_model_component_has_the_names_of_the_unwrapped_model(straight: Any) -> None:
    (model,) = (one.stateful for one in straight.get_state_components() if one.key == "model")
    assert weights(model).keys() == weights(straight.unwrapped_model()).keys()


# --- hand-written declarations on Trainer


class TrainerByHand(Trainer):
    """Trainer with random state under another key, before all other components."""

    def get_state_components(self) -> list[StateComponent]:
        return [
            StateComponent("generators", RNGState(), SharingPattern.PER_RANK),
            StateComponent("drawing", Drawing(), GLOBAL),
            StateComponent("model", self.model, GLOBAL),
            StateComponent("optimizer", self.optimizer, GLOBAL),
            StateComponent("scheduler", self.lr_scheduler, GLOBAL),
            StateComponent("dataset", self.train_dataloader, GLOBAL, required=False),
            StateComponent("trainer", self, GLOBAL),
        ]


def test_hand_written_components_resume_exactly_in_trainer(tmp_path: Path) -> None:
    def run(name: str, max_steps: int, trainer_class: Any) -> Any:
        settings: dict[str, Any] = {"momentum": 0.9, "shuffle": True, "save_strategy": "steps", "save_steps": 3}
        samples = token_samples(10)
        trainer = quiet_trainer(
            tmp_path / name, DropoutModel(), samples, trainer_class=trainer_class, max_steps=max_steps, **settings
        )
        trainer.train()
        return trainer

    straight = run("straight", 12, Trainer)
    run("by_hand", 3, TrainerByHand)
    assert same_weights(run("by_hand", 12, TrainerByHand).model, straight.model)


def test_grad_scaler_state_is_in_the_trainer_component(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, TokenModel(), token_samples(2), mixed_precision="fp16", max_steps=1)
    trainer.train()
    trainer.amp_context.load_state_dict({**trainer.amp_context.state_dict(), "scale": 8.0})
    path = trainer.save_checkpoint()
    other = quiet_trainer(tmp_path / "other", TokenModel(), token_samples(2), mixed_precision="fp16")
    other.load_checkpoint(path)
    assert other.amp_context.state_dict()["scale"] == 8.0
