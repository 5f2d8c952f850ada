"""Deployable models from checkpoints (`finalize`): written weights equal the trained ones, and load again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from forgather.ml.checkpoint.errors import CheckpointLoadError, CheckpointNotFoundError
from forgather.ml.finalize import averaged_weights, finalize, load_finalized, load_model, resolve_checkpoint
from forgather.ml.trainer.trainer import Trainer
from tests.support.pipelines import llama, pipeline_trainer, tied_gpt2
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCAB_SIZE, quiet_trainer, tiny_llama, token_samples, weights

INPUT = {"input_ids": torch.arange(8).unsqueeze(0)}


class Own(nn.Module):
    """Model unknown to transformers, with a tied head and a layer of width 24, which group size 32 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embedding = nn.Embedding(VOCAB_SIZE, 32)
        self.up, self.down = nn.Linear(32, 24), nn.Linear(24, 32, bias=False)
        self.head = nn.Linear(32, VOCAB_SIZE, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(input_ids)
        logits: Tensor = self.head(hidden + self.scale * self.down(self.up(hidden).relu()))
        return logits


def trained(folder: Path, model: nn.Module, **settings: Any) -> Trainer:
    """Train two steps, save, and return the trainer."""
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, **settings}
    trainer = quiet_trainer(folder, model, token_samples(4), **settings)
    trainer.train()
    return trainer


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output = model(**INPUT)
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def keep_logits(measured: list[Tensor]) -> Callable[[nn.Module], float]:
    """Return an evaluation that appends the logits of a model to a list; the loss is the length of the list."""

    def evaluate(model: nn.Module) -> float:
        measured.append(logits_of(model))
        return float(len(measured))

    return evaluate


def wide_llama(**options: Any) -> nn.Module:
    return tiny_llama(0, hidden_size=32, intermediate_size=32, num_attention_heads=2, **options)


def test_plain_directory_holds_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run", tied_gpt2(2))
    report = finalize(str(tmp_path / "run"), str(tmp_path / "model"))
    assert (report.step, report.recipe, report.layers, report.loss_after) == (2, None, None, None)
    assert report.bytes_after == report.bytes_before == (tmp_path / "model/model.safetensors").stat().st_size
    assert report.checkpoint == str(tmp_path / "run/checkpoints/checkpoint-2")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(one, weights(loaded)[name]) for name, one in weights(trainer.unwrapped_model()).items())
    assert torch.equal(logits_of(loaded), logits_of(load_model(report.checkpoint)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_directory_loads_as_it_was_measured(tmp_path: Path, dtype: str) -> None:
    trained(tmp_path / "run", wide_llama(tie_word_embeddings=True).to(getattr(torch, dtype)))
    measured: list[Tensor] = []
    report = finalize(
        str(tmp_path / "run"),
        str(tmp_path / "model"),
        quantize="int4-weight-only",
        evaluate=keep_logits(measured),
        device="cpu",
    )
    assert (report.loss_before, report.loss_after) == (1.0, 2.0)
    assert report.layers is not None and list(report.layers.skipped) == ["lm_head"]
    for loaded in (load_finalized(str(tmp_path / "model")), AutoModelForCausalLM.from_pretrained(tmp_path / "model")):
        assert torch.equal(logits_of(loaded), measured[1])
        assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
        assert loaded.dtype == getattr(torch, dtype)
    assert 0 < (measured[0] - measured[1]).abs().max() < 0.5
    assert sorted(path.suffix for path in (tmp_path / "model").iterdir()) == [".json", ".json", ".safetensors"]
    # The weights are readable for the same users as the configuration.
    assert len({path.stat().st_mode for path in (tmp_path / "model").iterdir()}) == 1


def test_skipped_layers_are_loaded_unquantised(tmp_path: Path) -> None:
    trained(tmp_path / "run", tiny_llama(0, hidden_size=32, intermediate_size=48))
    run, output = str(tmp_path / "run"), str(tmp_path / "model")
    measured: list[Tensor] = []
    report = finalize(run, output, quantize="int4-weight-only", evaluate=keep_logits(measured), device="cpu")
    assert report.layers is not None and "model.layers.0.mlp.down_proj" in report.layers.skipped
    stored = json.loads((tmp_path / "model/config.json").read_text())["quantization_config"]
    assert set(stored["modules_to_not_convert"]) == set(report.layers.skipped)
    assert torch.equal(logits_of(load_finalized(output)), measured[1])


def test_custom_model_is_built_by_the_caller(tmp_path: Path) -> None:
    trained(tmp_path / "run", Own())
    with pytest.raises(
        CheckpointLoadError, match=r"has no config\.json, because its model is not a transformers model"
    ):
        finalize(str(tmp_path / "run"), str(tmp_path / "model"), quantize="int4-weight-only", device="cpu")
    measured: list[Tensor] = []
    report = finalize(
        str(tmp_path / "run"),
        str(tmp_path / "model"),
        quantize="int4-weight-only",
        model_init=Own,
        evaluate=keep_logits(measured),
        device="cpu",
    )
    assert report.layers is not None and report.layers.converted == ["up"]
    loaded = load_finalized(str(tmp_path / "model"), Own)
    assert isinstance(loaded, Own) and loaded.head.weight is loaded.embedding.weight
    assert not loaded.training, "loaded for inference"
    assert "Intx" in type(loaded.up.weight).__name__ and torch.equal(logits_of(loaded), measured[1])
    with pytest.raises(CheckpointLoadError, match="do not fit this model"):
        load_finalized(str(tmp_path / "model"), lambda: nn.Sequential(nn.Linear(2, 2)))


def mixtral() -> nn.Module:
    """Build a Mixtral, which transformers stores under other parameter names."""
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=2,
        )
    )


def test_renamed_parameters_of_transformers_are_handled(tmp_path: Path) -> None:
    trained(tmp_path / "run", mixtral())
    run, output = str(tmp_path / "run"), str(tmp_path / "model")
    measured: list[Tensor] = []
    finalize(run, output, quantize="int4-weight-only", model_init=mixtral, evaluate=keep_logits(measured), device="cpu")
    assert torch.equal(measured[1], logits_of(load_finalized(output, mixtral)))


def test_plain_custom_model_loads_from_either_file_format(tmp_path: Path) -> None:
    for kind in (True, False):
        trainer = trained(tmp_path / f"run{kind}", Own(), save_safetensors=kind)
        finalize(str(tmp_path / f"run{kind}"), str(tmp_path / f"model{kind}"))
        loaded = load_finalized(str(tmp_path / f"model{kind}"), Own)
        assert torch.equal(logits_of(loaded), logits_of(trainer.unwrapped_model()))


def test_ema_weights_replace_the_last_weights(tmp_path: Path) -> None:
    trained(tmp_path / "run", wide_llama(), ema_decay=0.5)
    averages = averaged_weights(resolve_checkpoint(str(tmp_path / "run")))
    finalize(str(tmp_path / "run"), str(tmp_path / "averaged"), ema=True)
    finalize(str(tmp_path / "run"), str(tmp_path / "last"))
    averaged, last = (
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).named_parameters()) for name in ("averaged", "last")
    )
    assert averages.keys() == averaged.keys()
    assert all(torch.equal(averages[name], one) for name, one in averaged.items())
    assert any(not torch.equal(averages[name], one) for name, one in last.items())


def test_losses_are_measured_on_ema_weights_and_on_the_written_files(tmp_path: Path) -> None:
    trained(tmp_path / "run", wide_llama(), ema_decay=0.5)
    checkpoint, output = resolve_checkpoint(str(tmp_path / "run")), str(tmp_path / "model")
    averages = averaged_weights(checkpoint)
    measured: list[Any] = []

    def evaluate(model: nn.Module) -> float:
        measured.append(model)
        assert torch.equal(model.get_parameter("lm_head.weight"), averages["lm_head.weight"])
        assert not model.training
        return 0.0

    finalize(checkpoint, output, quantize="int4-weight-only", ema=True, evaluate=evaluate, device="cpu")
    assert [model.name_or_path for model in measured] == [checkpoint, output]
    assert not torch.equal(load_model(checkpoint).get_parameter("lm_head.weight"), averages["lm_head.weight"])


def train_stages(output_dir: str) -> None:
    pipeline_trainer(
        Path(output_dir),
        lambda: llama(2, hidden_size=32, intermediate_size=32),
        token_samples(8),
        max_steps=2,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=2,
        ema_decay=0.5,
    ).train()


def test_weights_and_ema_of_all_pipeline_stages_become_one_model(tmp_path: Path) -> None:
    run_on_ranks(train_stages, 2, str(tmp_path / "run"))
    checkpoint = resolve_checkpoint(str(tmp_path / "run"))
    averages = averaged_weights(checkpoint)
    model = load_model(checkpoint)
    assert averages.keys() == dict(model.named_parameters()).keys()
    report = finalize(checkpoint, str(tmp_path / "model"), quantize="int4-weight-only", ema=True, device="cpu")
    assert report.layers is not None and report.averaged
    head = load_finalized(str(tmp_path / "model")).get_output_embeddings()  # type: ignore[operator]
    assert torch.equal(head.weight, averages["lm_head.weight"])


def test_impossible_requests_are_rejected_and_leave_nothing_behind(tmp_path: Path) -> None:
    narrow = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    trained(tmp_path / "run", narrow)
    run, output = str(tmp_path / "run"), str(tmp_path / "model")
    with pytest.raises(ValueError, match="No layer of the model can be quantised by 'int4-weight-only'"):
        finalize(run, output, quantize="int4-weight-only", device="cpu")
    with pytest.raises(CheckpointLoadError, match=r"no averaged weights: its components are model, .*ema_decay"):
        finalize(run, output, ema=True)
    with pytest.raises(ValueError, match="quantises to float8 only on hardware"):
        finalize(run, output, quantize="float8-dynamic-act-float8-weight", device="cpu")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for place, reason in {
        run: "Nothing is overwritten",
        "": "no name was given",
        str(tmp_path / "link"): "Nothing is overwritten",
        f"{run}/checkpoints/checkpoint-9": "among the checkpoints",
        f"{run}/checkpoints/checkpoint-2/model": "among the checkpoints",
        f"{run}/checkpoints/checkpoint-2/config.json/model": "among the checkpoints",
        f"{__file__}/model": "is not a writable directory",
    }.items():
        with pytest.raises(FileExistsError, match=reason):
            finalize(run, place)
    (tmp_path / "link").unlink()
    with pytest.raises(CheckpointNotFoundError, match="there is no such directory"):
        finalize(str(tmp_path / "nowhere"), output)
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint"):
        finalize(str(tmp_path / "empty"), output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "run"]


def test_checkpoint_without_weights_is_rejected(tmp_path: Path) -> None:
    trained(tmp_path / "run", tiny_llama(), checkpoint_components=["optimizer", "trainer"])
    with pytest.raises(CheckpointLoadError, match=r"saved without the model's weights.*Choose another checkpoint"):
        finalize(str(tmp_path / "run"), str(tmp_path / "model"))


def test_leftovers_of_a_killed_attempt_are_removed(tmp_path: Path) -> None:
    trained(tmp_path / "run", wide_llama())
    left, others = tmp_path / ".tmp-model-0123456789ab", tmp_path / ".tmp-model-of-mine"
    left.mkdir(), others.mkdir()
    # The folder of checkpoints also stands for its newest checkpoint.
    finalize(str(tmp_path / "run/checkpoints"), str(tmp_path / "model"))
    assert not left.exists() and others.exists()


def test_damaged_file_is_not_copied(tmp_path: Path) -> None:
    trained(tmp_path / "run", wide_llama())
    config = tmp_path / "run/checkpoints/checkpoint-2/config.json"
    config.write_bytes(config.read_bytes().replace(b"llama", b"lamma"))
    with pytest.raises(CheckpointLoadError, match=r"config\.json"):
        finalize(str(tmp_path / "run"), str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()
