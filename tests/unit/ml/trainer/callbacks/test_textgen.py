"""Text samples during training, without any effect on training."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forgather.ml.trainer.callbacks import TBLogger, TextgenCallback
from tests.unit.ml.trainer.callbacks.run import Run

WORDS = ["once", "upon", "a", "time", "there", "was", "bear", "<eos>"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **sizes))


class FakeTrainer:
    """Stub with the trainer attributes that TextgenCallback uses."""

    def __init__(self, model: nn.Module, *callbacks: Any) -> None:
        self.model = model
        self.callbacks = list(callbacks)

    def unwrapped_model(self) -> nn.Module:
        return self.model


def prepared_run(tmp_path: Path, *callbacks: Any, **attributes: Any) -> Run:
    model = tiny_llama()
    run = Run(tmp_path, *callbacks, model=nn.Sequential(model), **attributes)
    run.processing_class = tokenizer()
    run.trainer = FakeTrainer(model, *callbacks)
    return run


def random_numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_prompt_and_continuation_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = prepared_run(tmp_path, TextgenCallback("once upon a", max_new_tokens=4), global_step=7)
    run.send("on_train_begin")
    run.evaluate(eval_loss=1.0)
    text = capsys.readouterr().out
    assert "samples at step 7" in text and "once upon a" in text


def test_control_characters_of_samples_are_visible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Hostile(PreTrainedTokenizerFast):
        def decode(self, *ids: Any, **options: Any) -> str:
            return "\x1b[2Jdecoded"

    run = prepared_run(tmp_path, TextgenCallback("once \x9b31m", max_new_tokens=1))
    run.processing_class = Hostile(tokenizer_object=run.processing_class.backend_tokenizer, eos_token="<eos>")
    run.evaluate(eval_loss=1.0)
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\x9b" not in text and "[2Jdecoded" in text


def test_random_state_and_module_modes_are_restored(tmp_path: Path) -> None:
    run = prepared_run(tmp_path, TextgenCallback(["once", "bear"], max_new_tokens=4))
    model = run.trainer.model
    model.train()
    model.lm_head.eval()
    modes = [module.training for module in model.modules()]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = random_numbers()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    run.evaluate(eval_loss=1.0)
    assert random_numbers() == expected
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_same_weights_give_the_same_samples(tmp_path: Path) -> None:
    callback = TextgenCallback("once", max_new_tokens=8)
    run = prepared_run(tmp_path, callback)
    texts = [callback.generate(run.model, run.processing_class, run.trainer) for _ in range(2)]
    assert texts[0] == texts[1]


def test_samples_are_written_to_tensorboard_if_present(tmp_path: Path) -> None:
    run = prepared_run(tmp_path, TBLogger(), TextgenCallback("once", max_new_tokens=2))
    run.send("on_train_begin")
    run.evaluate(eval_loss=1.0)
    run.send("on_train_end")
    (directory,) = (tmp_path / "runs").iterdir()
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    assert "samples/0/text_summary" in accumulator.Tags()["tensors"]


def test_other_ranks_generate_too_but_print_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = prepared_run(tmp_path, TextgenCallback("once", max_new_tokens=2), is_world_process_zero=False)
    generate = run.trainer.model.generate
    calls: list[dict[str, Any]] = []

    def counted(**inputs: Any) -> torch.Tensor:
        calls.append(inputs)
        return generate(**inputs)

    run.trainer.model.generate = counted
    run.evaluate(eval_loss=1.0)
    assert len(calls) == 1
    assert capsys.readouterr().out == ""


def test_pipeline_generate_of_the_trainer_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = prepared_run(tmp_path, TextgenCallback("once", max_new_tokens=1))
    bear = torch.tensor([[WORDS.index("bear")]])
    run.trainer.pipeline_generate = lambda input_ids, **options: torch.cat([input_ids, bear], dim=1)
    run.evaluate(eval_loss=1.0)
    assert "oncebear" in capsys.readouterr().out.replace(" ", "")


def test_model_that_cannot_generate_is_rejected_before_training(tmp_path: Path) -> None:
    run = Run(tmp_path, TextgenCallback("once"))
    run.processing_class = tokenizer()
    with pytest.raises(ValueError, match="Linear has no method generate"):
        run.send("on_train_begin")


def test_missing_tokenizer_is_rejected_before_training(tmp_path: Path) -> None:
    run = prepared_run(tmp_path, TextgenCallback("once"))
    run.processing_class = None
    with pytest.raises(ValueError, match="processing_class"):
        run.send("on_train_begin")


def test_missing_prompts_are_rejected() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        TextgenCallback([])
