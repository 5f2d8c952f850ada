"""Custom trainer with its own component and step: about forty lines, and an exact resume."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.trainer import Trainer
from tests.support.tiny_models import Recorder, TokenModel, quiet_trainer, token_samples, weights


class WeightAverage:
    """Moving average of model weights."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter, 1 - self.decay)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            own = parameter.clone()
            parameter.copy_(self.values[name])
            self.values[name] = own

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


class AveragingTrainer(Trainer):
    """Trainer that evaluates averaged weights and stores the average in its checkpoints."""

    def _wrap(self) -> None:
        super()._wrap()
        self.average = WeightAverage(self.unwrapped_model(), decay=0.5)

    def _train_step(self, data_iterator: Iterator[Any]) -> tuple[Tensor, Tensor | None, int | Tensor]:
        result = super()._train_step(data_iterator)
        self.average.update(self.unwrapped_model())
        return result

    def _eval_loop(self) -> dict[str, Any]:
        self.average.swap(self.unwrapped_model())
        try:
            return super()._eval_loop()
        finally:
            self.average.swap(self.unwrapped_model())

    def get_state_components(self) -> list[StateComponent]:
        return [*super().get_state_components(), StateComponent("average", self.average, SharingPattern.GLOBAL)]


def averaging(output_dir: Path, recorder: Recorder, **settings: Any) -> AveragingTrainer:
    samples = token_samples(12)
    trainer = quiet_trainer(
        output_dir,
        TokenModel(),
        samples,
        recorder,
        trainer_class=AveragingTrainer,
        trainer_options={"eval_dataset": samples},
        momentum=0.9,
        shuffle=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        logging_strategy="steps",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        **settings,
    )
    assert isinstance(trainer, AveragingTrainer)
    return trainer


def eval_losses(recorder: Recorder) -> list[float]:
    return [metrics["eval_loss"] for metrics in recorder.details("on_evaluate", "metrics")]


def test_custom_component_resumes_exactly(tmp_path: Path) -> None:
    straight_events, first_events, second_events = Recorder(), Recorder(), Recorder()
    straight = averaging(tmp_path / "straight", straight_events)
    straight.train()
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    averaging(tmp_path / "resumed", first_events, max_steps=3, **saving).train()
    resumed = averaging(tmp_path / "resumed", second_events, **saving)
    assert resumed.train().global_step == 6
    assert second_events.steps("on_step_end") == [4, 5, 6]
    assert eval_losses(straight_events) == eval_losses(first_events) + eval_losses(second_events)
    expected, got = weights(straight.unwrapped_model()), weights(resumed.unwrapped_model())
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    values = straight.average.values
    assert all(torch.equal(values[name], resumed.average.values[name]) for name in values)
    assert not torch.equal(values["head.weight"], expected["head.weight"])


def test_required_component_missing_in_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    samples = token_samples(12)
    quiet_trainer(tmp_path, TokenModel(), samples, max_steps=1, save_strategy="steps").train()
    with pytest.raises(CheckpointLoadError, match="required component 'average'"):
        averaging(tmp_path, Recorder()).train()


PREPARATION = [
    "_init_distributed",
    "_init_device",
    "_init_dataloaders",
    "_prepare_model",
    "_init_optimizer",
    "_wrap",
    "_init_checkpoint_manager",
]
OF_A_RUN = [
    "_train_step",
    "_forward_backward_step",
    "_backward",
    "_clip_grad_norm",
    "_prediction_step",
    "_eval_loop",
    "_prepare_batch",
    "_count_batch_tokens",
    "_distributed_loss",
    "_distributed_tokens",
    "_distributed_peak_mem",
    "get_state_components",
    "get_process_groups",
    "_get_dataset_sharing_pattern",
    "unwrapped_model",
]
FOR_STRATEGIES = ["_compile_model", "_should_sync_gradients", "_is_pipeline_parallel", "_is_model_parallel"]


def test_every_hook_is_called(tmp_path: Path) -> None:
    called: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        def hook(self: Trainer, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return getattr(Trainer, name)(self, *args, **kwargs)

        return hook

    hooks = {name: noting(name) for name in PREPARATION + OF_A_RUN}
    samples = token_samples(2)
    trainer = quiet_trainer(
        tmp_path,
        TokenModel(),
        samples,
        trainer_class=type("Noting", (Trainer,), hooks),
        trainer_options={"eval_dataset": samples},
        logging_strategy="steps",
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
    )
    trainer.train()
    assert [name for name in called if name in PREPARATION] == PREPARATION
    assert set(called) == {*PREPARATION, *OF_A_RUN}
    assert all(callable(getattr(trainer, name)) for name in FOR_STRATEGIES)


def test_step_loss_can_be_replaced(tmp_path: Path) -> None:
    class Doubling(Trainer):
        def _backward(self, loss: Tensor) -> None:
            super()._backward(loss * 2)

    def change(trainer_class: type[Trainer]) -> Tensor:
        model = TokenModel()
        before = model.head.weight.detach().clone()
        samples = token_samples(1)
        quiet_trainer(tmp_path, model, samples, trainer_class=trainer_class, learning_rate=1.0).train()
        return model.head.weight.detach() - before

    torch.testing.assert_close(change(Doubling), 2 * change(Trainer))
