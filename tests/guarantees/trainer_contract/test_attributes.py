"""Trainer attributes exist from construction on, and are None until preparation sets them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forgather.ml.checkpoint.manager import CheckpointManager
from forgather.ml.distributed import DistributedEnvInterface
from forgather.ml.loss import RescaleLoss
from forgather.ml.trainer.base_trainer import BaseTrainer
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.trainer import Trainer, enable_hf_activation_checkpointing
from forgather.ml.trainer.trainer_types import TrainerControl, TrainerState
from tests.guarantees.trainer_contract.small_trainer import SmallTrainer, small_trainer
from tests.support.data_parallel import environment
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, TokenModel, quiet_trainer, token_samples

IN_PREPARATION = (
    "train_dataloader",
    "eval_dataloader",
    "state",
    "checkpoint_manager",
    "amp_context",
    "do_train",
    "do_eval",
    "max_steps",
    "epoch_train_steps",
    "num_processes",
    "is_local_process_zero",
    "is_world_process_zero",
    "gradient_accumulation_step",
    "_flops_per_token",
    "_stop_requested_by",
)
BY_CONSTRUCTOR = (
    "optimizer_factory",
    "lr_scheduler_factory",
    "fused_loss_factory",
    "optimizer_groups",
    "enable_activation_checkpoint_fn",
    "use_fused_loss",
    "model_splitter",
    "pipe_schedule_factory",
)


def causal(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("trainer_class", [SmallTrainer, Trainer, DDPTrainer])
@pytest.mark.parametrize("name", IN_PREPARATION)
def test_attribute_is_none_before_preparation(trainer_class: Any, name: str, tmp_path: Path) -> None:
    assert getattr(unprepared(trainer_class, tmp_path), name) is None


def unprepared(trainer_class: Any, output_dir: Path) -> Any:
    if issubclass(trainer_class, SmallTrainer):
        return small_trainer(output_dir, trainer_class=trainer_class)
    return quiet_trainer(output_dir, TokenModel(), token_samples(2), trainer_class=trainer_class)


def test_constructor_stores_its_arguments(tmp_path: Path) -> None:
    model, data, callback = TokenModel(), token_samples(2), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    given: dict[str, Any] = {
        "model_init": TokenModel,
        "data_collator": torch.utils.data.default_collate,
        "processing_class": "tokenizer",
        "eval_dataset": data[:1],
        "loss_fn": causal,
        "optimizer": optimizer,
        "lr_scheduler": schedule,
    }
    trainer = Trainer(
        args={"output_dir": str(tmp_path), "use_cpu": True},
        model=model,
        train_dataset=data,
        callbacks=[callback],
        default_callbacks=False,
        **given,
    )
    for name in set(given) - {"model_init", "optimizer", "lr_scheduler"}:
        assert getattr(trainer, name) is given[name], name
    assert trainer.model is model and trainer.train_dataset is data and trainer.callbacks == [callback]
    assert trainer.optimizer is optimizer and trainer.lr_scheduler is schedule
    assert isinstance(trainer.model_init(), TokenModel)
    assert isinstance(trainer.control, TrainerControl)
    assert isinstance(trainer.dist, DistributedEnvInterface) and trainer.dist.world_size == 1


def test_factories_are_attributes(tmp_path: Path) -> None:
    def fused(module: torch.nn.Module) -> Any:
        return causal

    given: dict[str, Any] = {
        "optimizer_factory": torch.optim.SGD,
        "lr_scheduler_factory": torch.optim.lr_scheduler.ConstantLR,
        "fused_loss_factory": fused,
        "optimizer_groups": {"all": None},
        "enable_activation_checkpoint_fn": None,
    }
    trainer = Trainer(args={"output_dir": str(tmp_path), "use_cpu": True}, model=TokenModel(), **given)
    assert {name: getattr(trainer, name) for name in given} == given
    assert trainer.use_fused_loss is True
    plain = quiet_trainer(tmp_path, TokenModel(), [])
    assert plain.use_fused_loss is False
    assert plain.enable_activation_checkpoint_fn is enable_hf_activation_checkpointing


@pytest.mark.parametrize("trainer_class", [Trainer, DDPTrainer])
@pytest.mark.parametrize("name", BY_CONSTRUCTOR)
def test_every_trainer_has_the_constructor_attributes(trainer_class: Any, name: str, tmp_path: Path) -> None:
    assert hasattr(unprepared(trainer_class, tmp_path), name)


class Watching(Trainer):
    """Trainer that records gradient_accumulation_step in each micro-batch."""

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        numbers.append(self.gradient_accumulation_step)
        return super()._forward_backward_step(input_dict, labels)


numbers: list[int | None] = []


def test_preparation_sets_the_attributes(tmp_path: Path) -> None:
    data = token_samples(5)
    trainer = quiet_trainer(
        tmp_path,
        TokenModel(),
        data,
        trainer_class=Watching,
        trainer_options={"eval_dataset": data[:1]},
        gradient_accumulation_steps=2,
        num_train_epochs=2,
    )
    numbers.clear()
    trainer.train()
    assert numbers == [1, 2, 1, 2, 1] * 2
    assert (trainer.do_train, trainer.do_eval) == (True, True)
    assert (trainer.max_steps, trainer.epoch_train_steps) == (6, 5)
    assert (trainer.num_processes, trainer.is_local_process_zero, trainer.is_world_process_zero) == (1, True, True)
    assert trainer.amp_context.enabled is False
    assert isinstance(trainer.state, TrainerState) and isinstance(trainer.checkpoint_manager, CheckpointManager)
    assert isinstance(trainer._flops_per_token, (int, float)) and trainer._flops_per_token > 0
    assert isinstance(trainer.loss_fn, RescaleLoss)
    assert trainer.args.resume_from_checkpoint is False


def test_evaluation_alone_does_not_prepare_training(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, TokenModel(), token_samples(2))
    trainer.evaluate(token_samples(1))
    assert trainer.do_eval is True and not trainer.do_train
    assert trainer.train_dataloader is None and trainer.optimizer is None


@pytest.mark.parametrize("length", [0, 3])
def test_loaders_are_truthy_at_any_length(length: int, tmp_path: Path) -> None:
    data = token_samples(3)
    options = {"eval_dataset": data[:length]}
    trainer = quiet_trainer(tmp_path, TokenModel(), data, trainer_options=options, per_device_train_batch_size=2)
    trainer.train()
    assert bool(trainer.train_dataloader) and bool(trainer.eval_dataloader)
    assert trainer.train_dataloader.dataset is data and trainer.train_dataloader.batch_size == 2
    assert len(trainer.eval_dataloader.dataset) == length


def attributes_of_ddp(output_dir: str) -> dict[str, Any]:
    data = token_samples(6)
    trainer = quiet_trainer(
        Path(output_dir),
        TokenModel(),
        data,
        trainer_class=DDPTrainer,
        trainer_options={"distributed_env": environment(), "eval_dataset": data},
    )
    before = trainer.mesh, trainer.ddp_group, trainer.post_local_sgd_state
    trainer.train()
    return {
        "before": before,
        "mesh": tuple(trainer.mesh.shape),  # type: ignore[union-attr]
        "group": trainer.ddp_group.size(),  # type: ignore[union-attr]
        "processes": (trainer.num_processes, trainer.is_world_process_zero),
        "true": bool(trainer.train_dataloader) and bool(trainer.eval_dataloader),
        "forwarded": (trainer.train_dataloader.dataset is data, trainer.train_dataloader.batch_size),
        "batches": trainer.epoch_train_steps,
        "scale": trainer.loss_fn.scale_factor,
    }


def test_ddp_attributes(tmp_path: Path) -> None:
    results = run_on_ranks(attributes_of_ddp, 2, str(tmp_path))
    for rank, result in enumerate(results):
        assert result.pop("processes") == (2, rank == 0)
        assert result == {
            "before": (None, None, None),
            "mesh": (2,),
            "group": 2,
            "true": True,
            "forwarded": (True, 1),
            "batches": 3,
            "scale": 2,
        }


def test_base_class_has_the_constructor_attributes(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path)
    for name in ("loss_fn", "optimizer", "lr_scheduler", "data_collator", "processing_class", "model_init"):
        assert getattr(trainer, name) is None, name
    assert isinstance(trainer, BaseTrainer)
