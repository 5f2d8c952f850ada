"""Facade: names, construction, callbacks, state, saves and resume as in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import forgather.hf
from forgather.hf import Trainer, TrainingArguments
from tests.guarantees.drop_in.programs import arguments, collate, made, rows, weights
from tests.support.tiny_models import tiny_llama


def test_other_names_are_forwarded_to_transformers() -> None:
    assert forgather.hf.AutoConfig is transformers.AutoConfig
    assert forgather.hf.__version__ == transformers.__version__
    assert {"Trainer", "AutoModelForCausalLM", "set_seed"} <= set(dir(forgather.hf))
    with pytest.raises(AttributeError, match=r"no attribute 'Trainr'.*Did you mean 'Trainer'"):
        _ = forgather.hf.Trainr
    with pytest.raises(ImportError):
        exec("from forgather.hf import NoSuchModel")


def test_arguments_are_positional_as_in_transformers(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs.loss

    model, args = tiny_llama(), arguments(tmp_path)
    metrics, preprocess = (lambda prediction: {}), (lambda logits, labels: logits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = transformers.EarlyStoppingCallback()
    chosen = (optimizer, None)
    trainer = Trainer(
        model, args, collate, rows(), rows(4), None, None, loss, metrics, [callback], chosen, None, preprocess
    )
    assert trainer.model is model and trainer.args is args and trainer.data_collator is collate
    assert trainer.compute_loss_func is loss and trainer.compute_metrics is metrics
    assert trainer.optimizer is optimizer and trainer.preprocess_logits_for_metrics is preprocess
    assert callback in trainer.callback_handler.callbacks and len(trainer.callback_handler.callbacks) > 1


def test_tokenizer_is_a_deprecated_name(tmp_path: Path) -> None:
    class Processor:
        """Stands for a tokenizer."""

    processor = Processor()
    with pytest.warns(FutureWarning, match="processing_class"):
        trainer = Trainer(tiny_llama(), arguments(tmp_path), collate, tokenizer=processor)
    assert trainer.processing_class is processor


def test_a_model_or_a_function_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="either model or model_init"):
        Trainer(args=arguments(tmp_path))
    trainer = Trainer(args=arguments(tmp_path), model_init=tiny_llama, data_collator=collate, train_dataset=rows())
    trainer.train()
    assert trainer.state.global_step == 2


class Recorder(transformers.TrainerCallback):
    """Callback of transformers that records its arguments."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any, Any]] = []
        self.logs: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("begin", args, state))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self.events.append(("evaluate", args, dict(metrics)))


def test_callbacks_of_transformers_get_their_own_objects(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = made(Trainer, tmp_path, callbacks=[recorder], eval_strategy="steps", eval_steps=1)
    trainer.train()
    name, args, state = recorder.events[0]
    assert name == "begin" and args is trainer.args and isinstance(state, transformers.TrainerState)
    assert [event[0] for event in recorder.events] == ["begin", "evaluate", "evaluate"]
    assert sum("eval_loss" in logs for logs in recorder.logs) == 2
    assert sum("eval_loss" in record for record in trainer.state.log_history) == 2
    assert trainer.pop_callback(recorder) is recorder


def test_fractions_count_steps_of_the_run(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path, max_steps=4, logging_steps=0.5, warmup_steps=0.25)
    trainer.train()
    assert [record["step"] for record in trainer.state.log_history if "loss" in record] == [2, 4]
    assert trainer.engine.args.warmup_steps == 1


def test_a_run_resumes_only_if_it_is_asked_to(tmp_path: Path) -> None:
    whole = made(Trainer, tmp_path / "whole", max_steps=4)
    whole.train()
    first = made(Trainer, tmp_path / "parts", max_steps=4, save_strategy="steps", save_steps=2)
    with pytest.raises(ValueError, match="no valid checkpoint"):
        first.train(resume_from_checkpoint=True)
    first.train()
    checkpoint = next((tmp_path / "parts").rglob("checkpoint-2"))
    second = made(Trainer, tmp_path / "parts", max_steps=4)
    second.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(weights(second), weights(whole)) and second.state.global_step == 4
    third = made(Trainer, tmp_path / "parts", max_steps=4, save_strategy="steps", save_steps=2)
    third.train(resume_from_checkpoint=True)
    assert torch.equal(weights(third), weights(whole))


def test_save_model_writes_a_directory_for_from_pretrained(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(map(torch.equal, loaded.parameters(), trainer.model.parameters()))
    assert json.loads((tmp_path / "training_args.json").read_text())["max_steps"] == 2
    assert not (tmp_path / "training_args.bin").exists()
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 2


def test_metrics_are_saved_and_a_card_is_written_offline(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path)
    output = trainer.train()
    trainer.log_metrics("train", output.metrics)
    trainer.save_metrics("train", output.metrics)
    assert json.loads((tmp_path / "train_results.json").read_text())["train_loss"] == output.training_loss
    assert output.metrics["total_flos"] == trainer.state.log_history[-1]["total_flos"] == trainer.state.total_flos > 0
    trainer.create_model_card(model_name="tiny", tags=["test"])
    assert "tiny" in (tmp_path / "README.md").read_text()


def test_push_to_hub_without_network_fails_at_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RuntimeError, match=r"push_to_hub=True needs the repository 'mine'.*HF_HUB_OFFLINE"):
        made(Trainer, tmp_path, push_to_hub=True, hub_model_id="mine")


def test_unavailable_methods_say_what_to_do(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path)
    with pytest.raises(NotImplementedError, match="hyperparameter search is not available"):
        trainer.hyperparameter_search()
    with pytest.raises(AttributeError, match="no_such_method"):
        _ = trainer.no_such_method
    with pytest.raises(TypeError, match=r"forgather\.hf\.TrainingArguments"):
        Trainer(tiny_llama(), {"output_dir": "x"})


def test_plain_arguments_of_transformers_are_accepted(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, save_strategy="no")
    trainer = Trainer(tiny_llama(), args, collate, rows())
    trainer.train()
    assert trainer.state.global_step == 1 and not isinstance(args, TrainingArguments)


def test_callbacks_wait_for_a_background_save_before_they_may_change_weights(tmp_path: Path) -> None:
    class Mine:
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            calls.append(f"handler with {type(args).__module__}")

    calls: list[str] = []
    trainer = made(Trainer, tmp_path, callbacks=[Mine()], max_steps=1)
    trainer.engine._callback_handler.guard(lambda: calls.append("wait"))
    trainer.train()
    assert calls == ["wait", "handler with forgather.hf.arguments"]
