"""Settings of transformers with another value than the default: the run equals transformers, or the log says why not."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import forgather.hf
from forgather.ml.checkpoint.errors import CheckpointError
from tests.guarantees.drop_in.programs import SuperLoss, arguments, collate, made, rows
from tests.support.sampling import sampled
from tests.support.tiny_models import tiny_llama
from tests.support.tiny_parallel import captured_logs

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bf16": {"bf16": True},
    "gradient_checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "label_smoothing": {"label_smoothing_factor": 0.2},
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "adafactor": {"optim": "adafactor"},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "fused": {"optim": "adamw_torch_fused"},
    "rmsprop": {"optim": "rmsprop"},
    "adam": {"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "weight_decay": 0.3, "max_grad_norm": 0.1},
    "no_clipping": {"max_grad_norm": 0.0},
    "schedule": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.001}},
    "warm_up": {"warmup_steps": 0.5},
    "batch_size": {"auto_find_batch_size": True},
    "tensorboard": {"report_to": ["tensorboard"]},
    "tokens": {"include_num_input_tokens_seen": "all"},
    "tokens_without_padding": {"include_num_input_tokens_seen": "non_padding"},
    "logs": {"logging_first_step": True, "logging_steps": 2},
    "no_logs": {"logging_strategy": "no"},
    "drop_last": {"dataloader_drop_last": True, "per_device_train_batch_size": 3, "per_device_eval_batch_size": 4},
    "part_of_an_epoch": {"max_steps": -1, "num_train_epochs": 1.5},
    "evaluations": {"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 2, "eval_on_start": True},
    "evaluations_by_epoch": {"eval_strategy": "epoch", "max_steps": -1, "num_train_epochs": 3, "eval_delay": 2},
    "best": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    },
    "saves": {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2},
    "saves_without_limit": {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 0},
    "epochs_without_effect": {"num_train_epochs": 0},
    "no_epochs": {"max_steps": -1, "num_train_epochs": 0},
    "saves_by_epoch": {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2},
}
SAMPLE = (
    *("bf16", "gradient_checkpointing", "label_smoothing", "adafactor", "sgd", "adam", "tensorboard", "best", "saves"),
    *("saves_without_limit", "epochs_without_effect", "no_epochs"),
    *("tokens_without_padding", "evaluations", "evaluations_by_epoch", "batch_size", "schedule"),
)


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Events(transformers.TrainerCallback):
    """Callback that notes logs, evaluations and saves with their steps."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("log", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("save", state.global_step))


def run(module: Any, output_dir: Path, trainer: Any = None, **settings: Any) -> dict[str, Any]:
    """Train with the trainer of a module, and return what its user sees."""
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "learning_rate": 0.01,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
    }
    args = module.TrainingArguments(str(output_dir), **{**defaults, **settings})
    events = Events()
    made_trainer = (trainer or module.Trainer)(tiny_llama(), args, collate, rows(), rows(4), callbacks=[events])
    made_trainer.remove_callback(transformers.PrinterCallback)
    made_trainer.train()
    history = made_trainer.state.log_history
    names = ("loss", "eval_loss", "learning_rate", "num_input_tokens_seen")
    best = made_trainer.state.best_model_checkpoint
    return {
        "events": events.events,
        "numbers": [record[name] for record in history for name in names if name in record],
        "state": (made_trainer.state.global_step, made_trainer.state.epoch),
        "best": best and os.path.basename(best),
        "saved": sorted(path.name for path in output_dir.glob("checkpoint-*")),
        "evaluation": made_trainer.evaluate()["eval_loss"],
    }


@pytest.mark.parametrize("name", sampled(SETTINGS, SAMPLE))
def test_a_setting_has_the_effect_of_transformers(tmp_path: Path, name: str) -> None:
    expected = run(transformers, tmp_path / "theirs", **SETTINGS[name])
    found = run(forgather.hf, tmp_path / "ours", **SETTINGS[name])
    assert_same(found, expected)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("numbers", "evaluation"):
        assert found.pop(name) == pytest.approx(expected.pop(name), rel=1e-4, abs=1e-5)
    assert found == expected


def test_label_smoothing_has_the_same_effect_below_an_override(tmp_path: Path) -> None:
    expected = run(transformers, tmp_path / "theirs", label_smoothing_factor=0.2)
    found = run(forgather.hf, tmp_path / "ours", SuperLoss, label_smoothing_factor=0.2)
    assert_same(found, expected)


def test_group_by_length_puts_similar_lengths_together(tmp_path: Path) -> None:
    widths: list[int] = []

    class Widths(SuperLoss):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            widths.append(int(inputs["attention_mask"].sum(1).max() - inputs["attention_mask"].sum(1).min()))
            return super().compute_loss(model, inputs, *rest, **options)

    run(forgather.hf, tmp_path, Widths, train_sampling_strategy="group_by_length", per_device_train_batch_size=2)
    # In the order of the dataset it would be 13.
    assert sum(widths[:4]) <= 6


def test_streams_of_datasets_train_up_to_max_steps(tmp_path: Path) -> None:
    import datasets

    stream = datasets.Dataset.from_list(rows()).to_iterable_dataset().shuffle(seed=1, buffer_size=4)
    losses = []
    for module in (transformers, forgather.hf):
        options = {"max_steps": 3, "use_cpu": True, "report_to": [], "logging_steps": 1, "save_strategy": "no"}
        args = module.TrainingArguments(str(tmp_path), **options)
        trainer = module.Trainer(tiny_llama(), args, collate, stream)
        trainer.train()
        losses.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
    assert len(losses[1]) == 3 and losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_several_evaluation_datasets_have_the_names_of_transformers(tmp_path: Path) -> None:
    seen = []
    for module in (transformers, forgather.hf):
        args = module.TrainingArguments(
            str(tmp_path / module.__name__),
            max_steps=2,
            use_cpu=True,
            report_to=[],
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="b_loss",
            train_sampling_strategy="sequential",
            disable_tqdm=True,
        )
        events, data = Events(), {"a": rows(4), "b": rows(6)}
        trainer = module.Trainer(tiny_llama(), args, collate, rows(), data, callbacks=[events])
        trainer.train()
        names = [sorted(name for name in record if "loss" in name) for record in trainer.state.log_history]
        metrics = {name: value for name, value in trainer.evaluate().items() if name.endswith("loss")}
        explicit = trainer.evaluate({"c": rows(3)})["eval_c_loss"]
        seen.append((events.events, names[:4], trainer.state.best_metric, *metrics.items(), explicit))
        assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-2")
    for ours, theirs in zip(seen[1], seen[0], strict=True):
        assert ours == (pytest.approx(theirs, abs=1e-6) if isinstance(theirs, float) else theirs) or (
            ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], abs=1e-6)
        )


def test_a_checkpoint_of_transformers_is_imported_and_stays_unchanged(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 6, "per_device_train_batch_size": 2}
    expected = run(transformers, tmp_path, **options)
    # As if the run had stopped after its first checkpoint.
    assert expected["saved"] == ["checkpoint-4", "checkpoint-6"]
    os.rename(tmp_path / "checkpoint-6", tmp_path.with_name("finished"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    trainer = made(forgather.hf.Trainer, tmp_path, **options, seed=1)
    trainer.train(resume_from_checkpoint=True)
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    # Loss and learning rate of each step: the losses of the last two.
    assert losses == pytest.approx(expected["numbers"][8::2], abs=1e-5) and trainer.state.global_step == 6
    assert all(path.read_bytes() == content for path, content in before.items())
    assert (tmp_path / "checkpoint-6" / "checkpoint_manifest.json").exists()


def test_an_explicit_choice_of_our_checkpoints_is_not_replaced_by_an_import(tmp_path: Path) -> None:
    made(forgather.hf.Trainer, tmp_path, save_strategy="steps", save_steps=2).train()
    (tmp_path / "checkpoint-9").mkdir()
    with pytest.raises(CheckpointError):
        made(forgather.hf.Trainer, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    again = made(forgather.hf.Trainer, tmp_path, max_steps=3)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "fsdp_config['transformer_layer_cls_to_wrap']": {
        "fsdp": True,
        "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
    },
    "accelerator_config['even_batches']": {"accelerator_config": {"even_batches": False}},
    "fg_n_microbatches": {"fg_n_microbatches": 2},
    "fg_shard_optimizer": {"fg_shard_optimizer": True},
    "fg_pipe_schedule": {"fg_pipe_schedule": "1f1b"},
}


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_an_option_without_effect_is_logged(tmp_path: Path, name: str) -> None:
    with captured_logs() as records:
        made(forgather.hf.Trainer, tmp_path, **WITHOUT_EFFECT[name])
    assert [record for record in records if record.startswith(f"{name}=") and "has no effect" in record]


def test_contradicting_strategies_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"fsdp=True cannot be used with fg_strategy='single'"):
        made(forgather.hf.Trainer, tmp_path, fsdp=True, fg_strategy="single")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with captured_logs() as records:
        trainer = made(forgather.hf.Trainer, tmp_path)
    assert trainer._strategy == "fsdp2" and any("accelerate launch asks for FSDP" in record for record in records)


def test_a_pipeline_refuses_what_needs_the_complete_model(tmp_path: Path) -> None:
    class Saves(forgather.hf.Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            raise AssertionError("not called")

    with pytest.raises(TypeError, match=r"_save would never be called: each rank of a pipeline"):
        Saves(args=arguments(tmp_path, fg_strategy="pipeline"), model_init=tiny_llama)
    args = forgather.hf.Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, fg_strategy="pipeline", predict_with_generate=True
    )
    with pytest.raises(ValueError, match="predict_with_generate=True cannot be used"):
        forgather.hf.Seq2SeqTrainer(args=args, model_init=tiny_llama)
