"""Habits of transformers users: changes after construction, Ctrl-C, events, modes, and the way back to transformers."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from forgather.hf import Trainer, TrainingArguments
from tests.guarantees.drop_in.programs import arguments, collate, made, rows
from tests.support.tiny_models import tiny_llama


def test_training_in_stages_uses_new_data_collator_and_arguments(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path, num_train_epochs=1, max_steps=-1)
    trainer.train()
    assert trainer.state.global_step == 4
    calls = []

    def counting(samples: Any) -> Any:
        calls.append(len(samples))
        return collate(samples)

    trainer.train_dataset, trainer.data_collator = rows(6), counting
    trainer.args.num_train_epochs, trainer.args.learning_rate = 2, 0.5
    trainer.train()
    assert trainer.state.global_step == 6
    assert sum(calls) == 12
    assert trainer.state.log_history[0]["learning_rate"] == 0.5


def test_evaluation_uses_a_new_collator(tmp_path: Path) -> None:
    trainer, calls = made(Trainer, tmp_path), []
    data = rows(4)
    before = trainer.evaluate(data)["eval_loss"]

    def counting(samples: Any) -> Any:
        calls.append(len(samples))
        return collate(samples)

    trainer.data_collator = counting
    assert trainer.evaluate(data)["eval_loss"] == before
    assert sum(calls) == 4


def test_evaluation_and_prediction_use_changed_arguments(tmp_path: Path) -> None:
    trainer, calls, shown = made(Trainer, tmp_path), [], []

    def counting(samples: Any) -> Any:
        calls.append(len(samples))
        return collate(samples)

    def metrics(prediction: Any) -> dict[str, float]:
        shown.append(prediction.inputs is not None)
        return {"samples": len(prediction.predictions)}

    trainer.data_collator, trainer.compute_metrics = counting, metrics
    data = rows(8)
    before = trainer.evaluate(data)["eval_loss"]
    trainer.args.per_device_eval_batch_size, trainer.args.include_for_metrics = 4, ["inputs"]
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(before, abs=1e-6)
    trainer.args.per_device_eval_batch_size, trainer.args.dataloader_drop_last = 3, True
    assert trainer.predict(data).predictions.shape[0] == 6
    assert calls == [2, 2, 2, 2, 4, 4, 3, 3]
    assert shown == [False, True, True]
    trainer.args.label_names = ["other"]
    with pytest.raises(ValueError, match=r"changed after the trainer was constructed.*label_names"):
        trainer.evaluate(data)


def test_change_without_effect_is_refused(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path)
    trainer.args.label_smoothing_factor = 0.1
    with pytest.raises(ValueError, match=r"changed after the trainer was constructed.*label_smoothing_factor"):
        trainer.train()


def test_best_saves_and_a_delay_in_epochs_may_be_set_after_construction(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path, max_steps=-1, num_train_epochs=3)
    trainer.args.set_evaluate("epoch", batch_size=2, delay=2).set_save("best")
    trainer.train()
    assert [record["epoch"] for record in trainer.state.log_history if "eval_loss" in record] == [2.0, 3.0]
    assert (tmp_path / "checkpoint-8").exists()


SETTERS: dict[str, Callable[[TrainingArguments], Any]] = {
    "training": lambda args: args.set_training(max_steps=2, batch_size=2, gradient_accumulation_steps=2, seed=3),
    "evaluate": lambda args: args.set_evaluate("steps", steps=1, batch_size=2),
    "no_evaluation": lambda args: args.set_evaluate(),
    "testing": lambda args: args.set_testing(batch_size=3, loss_only=True),
    "save": lambda args: args.set_save("steps", steps=1, total_limit=1),
    "logging": lambda args: args.set_logging("steps", steps=1, first_step=True),
    "optimizer": lambda args: args.set_optimizer("sgd", learning_rate=0.1, args="momentum=0.9"),
    "schedule": lambda args: args.set_lr_scheduler("cosine", warmup_steps=1, max_steps=2),
    "dataloader": lambda args: args.set_dataloader(train_batch_size=2, eval_batch_size=4, drop_last=True),
}


@pytest.mark.parametrize("setter", SETTERS)
def test_setters_of_the_arguments_lead_to_a_run(setter: str, tmp_path: Path) -> None:
    args = SETTERS[setter](arguments(tmp_path, report_to=[], disable_tqdm=True))
    trainer = Trainer(tiny_llama(), args, collate, rows(), rows(4))
    assert trainer.train().global_step == 2
    evaluated = [record["step"] for record in trainer.state.log_history if "eval_loss" in record]
    assert evaluated == ([1, 2] if setter == "evaluate" else [])
    assert (tmp_path / "checkpoint-2").exists() == (setter == "save")


class Counter(transformers.TrainerCallback):
    """Count the ends of micro-batches and steps."""

    def __init__(self) -> None:
        self.substeps = self.steps = 0

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.substeps += 1

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1


def test_substeps_end_between_the_micro_batches_of_a_step(tmp_path: Path) -> None:
    counter = Counter()
    made(Trainer, tmp_path, callbacks=[counter], gradient_accumulation_steps=2).train()
    assert (counter.substeps, counter.steps) == (2, 2)


class Interrupting(transformers.TrainerCallback):
    """Press Ctrl-C in the first step."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_reaches_the_script_as_keyboard_interrupt(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path, callbacks=[Interrupting()], max_steps=5, save_strategy="steps", save_steps=100)
    with pytest.raises(KeyboardInterrupt, match="SIGINT at step 1"):
        trainer.train()
    assert not trainer.is_in_train
    trainer.save_model(str(tmp_path / "model"))
    assert transformers.trainer_utils.get_last_checkpoint(str(tmp_path)).endswith("checkpoint-1")


def test_evaluation_leaves_the_model_in_eval_mode_and_training_is_not_disturbed(tmp_path: Path) -> None:
    modes = []

    class Watching(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
            modes.append(model.training)

    settings = {"eval_strategy": "steps", "eval_steps": 1, "callbacks": [Watching()]}
    trainer = made(Trainer, tmp_path, tiny_llama().train(), **settings)
    trainer.eval_dataset = rows(4)
    trainer.train()
    assert modes == [True, True]
    trainer.evaluate()
    assert not trainer.model.training


def test_model_init_may_take_a_trial(tmp_path: Path) -> None:
    trials = []

    def build(trial: Any) -> nn.Module:
        trials.append(trial)
        return tiny_llama()

    trainer = Trainer(args=arguments(tmp_path), model_init=build, data_collator=collate, train_dataset=rows())
    trainer.train()
    assert trials == [None, None]


class VectorLoss(nn.Module):
    """Model that returns one loss per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction="none"), "logits": logits}


def test_loss_per_sample_and_model_names_get_clear_errors(tmp_path: Path) -> None:
    data = [{"x": torch.randn(4), "labels": torch.tensor(index % 3)} for index in range(8)]
    with pytest.raises(ValueError, match=r"shape \(2,\), but training needs one number"):
        Trainer(VectorLoss(), arguments(tmp_path), train_dataset=data).train()
    with pytest.raises(TypeError, match=r"must be a torch\.nn.Module, not 'bert-base-uncased'"):
        Trainer("bert-base-uncased", arguments(tmp_path))  # type: ignore[arg-type]


def test_transformers_trains_on_from_our_checkpoint(tmp_path: Path) -> None:
    made(Trainer, tmp_path, save_strategy="steps", save_steps=2).train()
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, save_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[]
    )
    theirs = transformers.Trainer(tiny_llama(), args, collate, rows())
    assert theirs.train(resume_from_checkpoint=True).global_step == 4
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").exists()


def test_checkpoints_without_optimizer_keep_the_step_and_the_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    made(Trainer, tmp_path, **saves).train()
    assert not (tmp_path / "checkpoint-2" / "optimizer_state.pt").exists()
    resumed = made(Trainer, tmp_path, max_steps=3, **saves)
    assert resumed.train(resume_from_checkpoint=True).global_step == 3
    assert [record["step"] for record in resumed.state.log_history if "loss" in record] == [1, 2, 3]
    made(Trainer, tmp_path, max_steps=4).train(resume_from_checkpoint=True)
    assert "Component 'optimizer' starts fresh" in caplog.text


def test_an_optimizer_class_gets_the_weight_decay_of_the_arguments(tmp_path: Path) -> None:
    chosen = (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.7})
    args = arguments(tmp_path, weight_decay=0.25, max_steps=1)
    trainer = Trainer(tiny_llama(), args, collate, rows(), optimizer_cls_and_kwargs=chosen)
    trainer.train()
    assert sorted(group["weight_decay"] for group in trainer.optimizer.param_groups) == [0.0, 0.25]


def test_two_sources_of_the_optimizer_are_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    pair: tuple[Any, Any] = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    with pytest.raises(ValueError, match="only one of optimizers and optimizer_cls_and_kwargs"):
        chosen = (torch.optim.SGD, {"lr": 0.1})
        Trainer(model, arguments(tmp_path), optimizers=pair, optimizer_cls_and_kwargs=chosen)
    with pytest.raises(ValueError, match="cannot be used with model_init"):
        Trainer(args=arguments(tmp_path), model_init=tiny_llama, optimizers=pair)
