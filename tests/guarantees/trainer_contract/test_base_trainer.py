"""BaseTrainer: a subclass with three methods gets exact checkpoints, events and callbacks."""

import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.trainer.base_trainer import BaseTrainer
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer, DDPTrainingArguments
from forgather.ml.trainer.trainer import Trainer, TrainingArguments
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainOutput
from tests.guarantees.trainer_contract.small_trainer import (
    NUM_STEPS,
    SAMPLES,
    DropoutModel,
    SmallArguments,
    SmallTrainer,
    same_weights,
    small_trainer,
)
from tests.support.ranks import outcomes_on_ranks, run_on_ranks
from tests.support.tiny_models import Recorder, TokenModel, quiet_trainer, saved_steps, token_samples

ONCE = ("on_init_end", "on_train_begin", "on_train_end")


@dataclass(kw_only=True)
class OwnArguments(TrainingArguments):
    temperature: float = 1.0


@dataclass(kw_only=True)
class OwnDDPArguments(DDPTrainingArguments):
    temperature: float = 1.0


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Uninterrupted run."""
    trainer = small_trainer(tmp_path_factory.mktemp("straight"), Recorder())
    torch.manual_seed(1)
    trainer.train()
    return trainer


def die(args: Any, state: Any, control: Any, **_: Any) -> None:
    if state.global_step == 5:
        os.kill(os.getpid(), signal.SIGKILL)


def run_small(output_dir: str, dies: bool) -> dict[str, Any]:
    trainer = small_trainer(Path(output_dir), Recorder(on_step_end=die) if dies else Recorder())
    torch.manual_seed(1)
    step = trainer.train().global_step
    return {"step": step, "weights": trainer.model.state_dict(), "history": trainer.state.log_history}


# --- the class


def test_three_methods_are_abstract() -> None:
    assert BaseTrainer.__abstractmethods__ == {"_prepare", "_train_loop", "_eval_loop"}


@pytest.mark.parametrize(
    ("base", "arguments"),
    [(BaseTrainer, SmallArguments), (Trainer, OwnArguments), (DDPTrainer, OwnDDPArguments), (DDPTrainer, OwnArguments)],
)
def test_dict_of_arguments_becomes_the_type_parameter(base: Any, arguments: Any, tmp_path: Path) -> None:
    methods = (
        {name: vars(SmallTrainer)[name] for name in BaseTrainer.__abstractmethods__} if base is BaseTrainer else {}
    )
    parametrised = base[arguments]
    own = type("Own", (base,), {"__orig_bases__": (parametrised,), **methods})
    trainer = own(args={"output_dir": str(tmp_path), "use_cpu": True}, model=nn.Linear(1, 1), default_callbacks=False)
    assert type(trainer.args) is arguments
    assert trainer.args.output_dir == str(tmp_path)


class Tempered(Trainer[OwnArguments]):
    pass


class TemperedFurther(Tempered):
    pass


def test_subclass_inherits_the_type_parameter(tmp_path: Path) -> None:
    args = {"output_dir": str(tmp_path), "temperature": 0.5, "use_cpu": True}
    trainer = TemperedFurther(args=args, model=nn.Linear(1, 1), default_callbacks=False)
    assert isinstance(trainer.args, OwnArguments) and trainer.args.temperature == 0.5
    with pytest.raises(ValueError, match="Did you mean 'temperature'"):
        TemperedFurther(args={"temprature": 1.0}, model=nn.Linear(1, 1))


def test_trainer_has_its_own_copy_of_the_arguments(tmp_path: Path) -> None:
    args = SmallArguments(output_dir=str(tmp_path), max_steps=3)
    trainer = SmallTrainer(args, nn.Linear(1, 1), default_callbacks=False)
    trainer.args.max_steps = 7
    assert args.max_steps == 3


def test_default_callbacks_are_a_classmethod(tmp_path: Path) -> None:
    class Quiet(SmallTrainer):
        @classmethod
        def default_callbacks(cls) -> list[Any]:
            return [Recorder()]

    trainer = Quiet({"output_dir": str(tmp_path)}, nn.Linear(1, 1))
    assert [type(one) for one in trainer.callbacks] == [Recorder]
    assert isinstance(SmallTrainer.default_callbacks(), list)


class WarmUp(LambdaLR, TrainerCallback):
    """Schedule that is also a callback."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps: list[int] = []
        super().__init__(optimizer, lambda step: 1.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)


def test_schedule_that_is_a_callback_is_registered(tmp_path: Path) -> None:
    model = TokenModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = WarmUp(optimizer)
    options = {"optimizer": optimizer, "lr_scheduler": schedule, "optimizer_cls_and_kwargs": None}
    trainer = quiet_trainer(tmp_path, model, token_samples(3), trainer_options=options)
    assert schedule in trainer.callbacks
    trainer.train()
    assert schedule.steps == [1, 2, 3]
    assert schedule in small_trainer(tmp_path / "base", lr_scheduler=schedule).callbacks


# --- events


def test_each_event_of_a_run_fires_once(straight: Any) -> None:
    recorder = straight.callbacks[0]
    counts = Counter(recorder.names)
    assert [counts[name] for name in ONCE] == [1, 1, 1]
    assert recorder.steps("on_save") == [3, 6]
    assert recorder.names.index("on_init_end") < recorder.names.index("on_train_begin") < recorder.names.index("on_log")
    assert recorder.names[-1] == "on_train_end"


class Announcing(SmallTrainer):
    """Trainer that dispatches every event itself."""

    def _prepare(self, train_dataset: Any, eval_dataset: Any) -> None:
        super()._prepare(train_dataset, eval_dataset)
        self.state = self.state or self._make_own_state()
        self._dispatch_event("on_init_end")

    def _make_own_state(self) -> Any:
        from forgather.ml.trainer.trainer_types import TrainerState

        names = ("logging_steps", "eval_steps", "max_steps", "num_train_epochs")
        settings = {name: getattr(self.args, name) for name in names}
        return TrainerState(train_batch_size=2, max_eval_steps=-1, **settings)

    def _train_loop(self) -> TrainOutput:
        self._dispatch_event("on_train_begin")
        output = super()._train_loop()
        self._dispatch_event("on_train_end")
        return output

    def _eval_loop(self) -> dict[str, float]:
        metrics = super()._eval_loop()
        self._dispatch_event("on_evaluate", metrics=metrics)
        return metrics

    def save_checkpoint(self, checkpoint_path: str | None = None) -> str:
        path = str(self.checkpoint_manager.save_checkpoint(checkpoint_path))
        self._dispatch_event("on_save", checkpoint_path=path)
        return path


def test_event_dispatched_by_an_override_fires_once(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = small_trainer(tmp_path, recorder, trainer_class=Announcing, eval_dataset=SAMPLES)
    trainer.train()
    trainer.evaluate()
    trainer.evaluate()
    counts = Counter(recorder.names)
    assert [counts[name] for name in (*ONCE, "on_evaluate", "on_save")] == [1, 1, 1, 2, 2]


def test_second_run_fires_its_events_again(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = small_trainer(tmp_path, recorder, max_steps=3)
    trainer.train()
    trainer.args.max_steps = 4
    assert trainer.train().global_step == 4
    counts = Counter(recorder.names)
    assert [counts[name] for name in ONCE] == [2, 2, 2]
    assert recorder.steps("on_step_end") == [1, 2, 3, 4]


def test_callbacks_can_stop_training_and_read_its_objects(tmp_path: Path) -> None:
    def stop(args: Any, state: Any, control: Any, **rest: Any) -> None:
        assert rest["trainer"].model is rest["model"] and rest["optimizer"] is rest["trainer"].optimizer
        control.should_training_stop = state.global_step == 2

    trainer = small_trainer(tmp_path, Recorder(on_step_end=stop))
    assert trainer.train().global_step == 2
    assert trainer._stop_requested_by == ("Recorder", "on_step_end", "should_training_stop")


# --- preparation by the base class


def test_base_class_creates_state_and_checkpoint_manager(straight: Any) -> None:
    assert straight.state.global_step == NUM_STEPS
    assert straight.state.max_steps == NUM_STEPS
    assert saved_steps(Path(straight.args.output_dir)) == [3, 6]
    assert [record["step"] for record in straight.state.log_history] == list(range(1, NUM_STEPS + 1))


def test_killed_run_resumes_exactly(tmp_path: Path, straight: Any) -> None:
    (killed,) = outcomes_on_ranks(run_small, 1, str(tmp_path), True)
    assert killed.error_type == "RankDied"
    assert saved_steps(tmp_path) == [3]
    (resumed,) = run_on_ranks(run_small, 1, str(tmp_path), False)
    assert resumed["step"] == NUM_STEPS
    assert resumed["history"] == straight.state.log_history
    expected = straight.model.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in resumed["weights"].items())


def test_output_directory_is_unlocked_after_training(tmp_path: Path) -> None:
    small_trainer(tmp_path, max_steps=1).train()
    run_on_ranks(run_small, 1, str(tmp_path), False)


def test_load_checkpoint_prepares_and_train_continues(tmp_path: Path, straight: Any) -> None:
    first = Path(straight.args.output_dir) / "checkpoints" / "checkpoint-3"
    recorder = Recorder()
    trainer = small_trainer(tmp_path, recorder)
    assert trainer.load_checkpoint(checkpoint_path=str(first)) == str(first)
    assert trainer.state.global_step == 3
    assert trainer.train().global_step == NUM_STEPS
    assert recorder.steps("on_step_end") == list(range(4, NUM_STEPS + 1))
    assert same_weights(trainer.model, straight.model)


def test_load_checkpoint_loads_the_newest_by_default(tmp_path: Path) -> None:
    small_trainer(tmp_path, max_steps=6).train()
    trainer = small_trainer(tmp_path)
    loaded = trainer.load_checkpoint()
    assert loaded is not None and loaded.endswith("checkpoint-6")
    assert trainer.state.global_step == 6


def test_save_checkpoint_accepts_a_path_and_returns_it(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = small_trainer(tmp_path / "run", recorder)
    path = str(tmp_path / "elsewhere")
    assert trainer.save_checkpoint(checkpoint_path=path) == path
    assert recorder.steps("on_save") == [0]
    other = small_trainer(tmp_path / "other")
    other.load_checkpoint(path)
    assert other.state.global_step == 0 and same_weights(other.model, trainer.model)


def test_train_accepts_resume_from_checkpoint(tmp_path: Path) -> None:
    small_trainer(tmp_path, max_steps=6).train()
    afresh = Recorder()
    small_trainer(tmp_path, afresh, max_steps=1).train(resume_from_checkpoint=False)
    assert afresh.steps("on_step_end") == [1]
    with pytest.raises(TypeError, match="resume_from_checkpoint"):
        small_trainer(tmp_path).train(resume=True)


def test_checkpoint_loaded_by_prepare_is_not_replaced(tmp_path: Path) -> None:
    small_trainer(tmp_path, max_steps=6).train()
    first = str(tmp_path / "checkpoints" / "checkpoint-3")

    class Loading(SmallTrainer):
        def _prepare(self, train_dataset: Any, eval_dataset: Any) -> None:
            super()._prepare(train_dataset, eval_dataset)
            self.load_checkpoint(first)

    recorder = Recorder()
    small_trainer(tmp_path, recorder, trainer_class=Loading, max_steps=5).train()
    assert recorder.steps("on_step_end") == [4, 5]


# --- evaluation


def test_evaluate_prepares_an_unprepared_trainer(tmp_path: Path) -> None:
    prepared: list[Any] = []

    class Noting(SmallTrainer):
        def _prepare(self, train_dataset: Any, eval_dataset: Any) -> None:
            prepared.append((train_dataset, eval_dataset))
            super()._prepare(train_dataset, eval_dataset)

    recorder, model = Recorder(), DropoutModel()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = small_trainer(tmp_path, recorder, trainer_class=Noting, model=model)
    metrics = trainer.evaluate(SAMPLES[:4])
    assert set(metrics) == {"eval_loss"}
    assert len(prepared) == 1 and prepared[0][0] is None and prepared[0][1] is not None
    assert recorder.names == ["on_init_end", "on_evaluate"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_evaluate_keeps_the_weights_of_a_prepared_trainer(straight: Any) -> None:
    before = {name: tensor.clone() for name, tensor in straight.model.state_dict().items()}
    small = straight.evaluate(SAMPLES[:2])["eval_loss"]
    large = straight.evaluate(SAMPLES[:8])["eval_loss"]
    assert small != large
    assert straight.evaluate(SAMPLES[:2])["eval_loss"] == small
    assert all(torch.equal(before[name], tensor) for name, tensor in straight.model.state_dict().items())


# --- the other methods


def test_model_is_unwrapped_from_compile_and_ddp(tmp_path: Path) -> None:
    run_on_ranks(unwrap_everything, 1, str(tmp_path))


def unwrap_everything(output_dir: str) -> None:
    model = DropoutModel()
    for wrapped in (
        torch.compile(model),
        DistributedDataParallel(model),
        torch.compile(DistributedDataParallel(model)),
        DistributedDataParallel(torch.compile(model)),
    ):
        trainer = small_trainer(Path(output_dir))
        trainer.model = wrapped
        assert trainer.unwrapped_model() is model


def test_callbacks_are_added_and_removed(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    trainer = small_trainer(tmp_path, first, max_steps=1)
    trainer.add_callback(second)
    assert trainer.callbacks == [first, second]
    assert trainer.pop_callback(first) is first
    trainer.remove_callback(second)
    assert trainer.callbacks == []
    trainer.train()


def test_save_model_exports_the_model(tmp_path: Path, straight: Any) -> None:
    straight.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").exists()
    fresh = small_trainer(tmp_path / "run")
    fresh.save_model()
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_train_loop_may_do_nothing(tmp_path: Path) -> None:
    class Nothing(SmallTrainer):
        def _train_loop(self) -> TrainOutput:
            return TrainOutput(0, {})

    assert small_trainer(tmp_path, trainer_class=Nothing).train() == TrainOutput(0, {})


def test_on_init_end_fires_once_for_earlier_preparation(tmp_path: Path, straight: Any) -> None:
    recorder = Recorder()
    trainer = small_trainer(tmp_path, recorder, max_steps=4, eval_dataset=SAMPLES)
    trainer.evaluate()
    trainer.load_checkpoint(str(Path(straight.args.output_dir) / "checkpoints" / "checkpoint-3"))
    trainer.train()
    assert recorder.names.count("on_init_end") == 1
    assert recorder.steps("on_step_end") == [4]


def test_passed_evaluation_set_is_used_only_once(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, eval_dataset=SAMPLES[:2], max_steps=1)
    trainer.train()
    optimizer, own = trainer.optimizer, trainer.evaluate()
    assert trainer.evaluate(SAMPLES[2:9]) != own
    assert trainer.evaluate() == own
    assert trainer.optimizer is optimizer and trainer.train_dataloader is not None
