"""`forgather finalize` on checkpoints of `forgather train`."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forgather.cli.work.finalize import as_plain_data
from forgather.ml.finalize import FinalizeReport
from tests.unit.cli.program import Answer, call, spawn, write_tiny_run

INT_RECIPES = ("int8-dynamic-act-int4-weight", "int4-weight-only")
OWN_MODEL = """
from torch import nn

class Own(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(300, width), nn.Linear(width, width), nn.Linear(width, 300))

    def forward(self, input_ids):
        return self.layers(input_ids)
"""
OWN_LOSS = """
from forgather.ml.loss import CausalLoss

class Doubled(CausalLoss):
    def sum_over_targets(self, *args):
        return 2 * super().sum_over_targets(*args)
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_run(tmp_path)


def train(capsys: pytest.CaptureFixture[str], *words: str) -> float:
    """Train a few steps and return the last evaluation loss."""
    options = ["--model.config.hidden_size", "32", "--args.learning_rate", "1e-2", "--callbacks+"]
    answer = call(capsys, "train", "tiny.yaml", *options, "{class_path: JsonLogger}", *words)
    assert answer.code == 0, answer.errors
    lines = [json.loads(line) for line in Path("out/trainer_logs.jsonl").read_text().splitlines()]
    return float([line["eval_loss"] for line in lines if "eval_loss" in line][-1])


def finalize(capsys: pytest.CaptureFixture[str], *words: str) -> Answer:
    answer = call(capsys, "finalize", *words)
    assert answer.code == 0, answer.errors
    return answer


@pytest.mark.parametrize("recipe", INT_RECIPES)
def test_model_trained_with_a_qat_recipe_keeps_its_loss_when_quantised(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    loss_in_training = train(capsys, "--args.qat_recipe", recipe)
    report = json.loads(finalize(capsys, "out", "final", "--quantize", recipe, "--json").output)
    assert report["schema"] == "forgather.finalize/1" and report["recipe"] == recipe
    assert report["checkpoint"] == "out/checkpoints/checkpoint-5"
    assert report["loss_after"] == pytest.approx(loss_in_training, abs=1e-4)
    assert report["loss_before"] != report["loss_after"]
    assert report["loss_before"] == pytest.approx(report["loss_after"], abs=0.1)
    assert report["bytes_after"] < report["bytes_before"]
    assert (len(report["layers"]["converted"]), report["layers"]["total"]) == (7, 8)
    assert list(report["layers"]["skipped"]) == ["lm_head"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained("final"), AutoTokenizer.from_pretrained("final")
    assert "Intx" in type(model.model.layers[0].mlp.up_proj.weight).__name__
    text = model.generate(**tokenizer("This is", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert text.shape[0] == 1


def test_report_is_a_table_with_both_losses_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    loss = train(capsys)
    answer = finalize(capsys, "out/checkpoints/checkpoint-5", "final", "--quantize", "int4-weight-only")
    assert "recipe     int4-weight-only, 7 of 8 linear layers" in answer.output
    before = re.search(r"before +([\d.]+ kB) +([\d.]+)", answer.output)
    after = re.search(r"after +([\d.]+ kB) +([\d.]+)", answer.output)
    assert before is not None and after is not None
    assert before[2] == f"{loss:.4f}" and abs(float(after[2]) - loss) < 0.1
    assert "saved      final" in answer.output
    assert "Writing model shards" not in answer.errors


def test_weights_are_last_or_ema_and_quantised_or_not(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    train(capsys, "--args.ema_decay", "0.5", "--args.qat_recipe", "int4-weight-only")
    finalize(capsys, "out", "plain")
    assert "trained for --quantize int4-weight-only; it is written in full precision" in caplog.text
    assert "averaged weights" in finalize(capsys, "out", "averaged", "--ema").output
    plain, averaged = (AutoModelForCausalLM.from_pretrained(name) for name in ("plain", "averaged"))
    assert (plain.lm_head.weight - averaged.lm_head.weight).abs().max() > 0
    other = finalize(capsys, "out", "other", "--quantize", INT_RECIPES[0], "--ema", "--no-evaluation")
    assert f"trained for --quantize int4-weight-only: its loss may be higher with {INT_RECIPES[0]}" in caplog.text
    assert "The losses were not measured: --no-evaluation." in other.output
    quantised = AutoModelForCausalLM.from_pretrained("other")
    assert torch.equal(quantised.lm_head.weight, averaged.lm_head.weight)


def test_losses_are_measured_with_the_loss_of_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_loss_to_finalize.py").write_text(OWN_LOSS)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("tiny.yaml").write_text(Path("tiny.yaml").read_text() + "loss: {class_path: own_loss_to_finalize.Doubled}\n")
    loss = train(capsys)
    words = ("out", "final", "--quantize", "int4-weight-only", "--json")
    answer = call(capsys, "finalize", *words)
    assert answer.code == 2 and "would run code that the checkpoint names" in " ".join(answer.errors.split())
    report = json.loads(finalize(capsys, *words, "--config", "out/config.yaml").output)
    assert report["loss_before"] == pytest.approx(loss, abs=1e-5)


def test_checkpoint_without_a_configuration_is_converted_without_losses_unless_config_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loss = train(capsys)
    Path("out/checkpoints/checkpoint-5/config.yaml").unlink()
    answer = finalize(capsys, "out", "first", "--quantize", "int4-weight-only")
    assert "losses were not measured: the checkpoint has no config.yaml" in answer.output
    words = ("--quantize", "int4-weight-only", "--config", "out/config.yaml", "--json")
    assert json.loads(finalize(capsys, "out", "second", *words).output)["loss_before"] == pytest.approx(loss)


def test_custom_model_is_built_by_the_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model_to_finalize.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = Path("tiny.yaml").read_text()
    model = "model: {class_path: own_model_to_finalize.Own, init_args: {width: 32}}\n"
    Path("tiny.yaml").write_text(model + text[text.index("data:") :])
    assert call(capsys, "train", "tiny.yaml").code == 0
    words = ("out", "final", "--quantize", "int4-weight-only", "--json")
    answer = call(capsys, "finalize", *words, "--no-evaluation")
    assert answer.code == 2 and "sets model.class_path" in " ".join(answer.errors.split())
    report = json.loads(finalize(capsys, *words, "--config", "out/config.yaml").output)
    assert report["layers"]["converted"] == ["layers.1"] and list(report["layers"]["skipped"]) == ["layers.2"]
    assert report["loss_after"] == pytest.approx(report["loss_before"], abs=0.1)
    # The model's code is needed to quantise it, not to copy its weights.
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_model_to_finalize")
    finalize(capsys, "out", "plain")


def test_report_is_valid_json_with_nan_and_infinite_losses() -> None:
    report = FinalizeReport("from", 1, "to", None, False, 1, 1, loss_before=math.nan, loss_after=math.inf)
    data = json.loads(json.dumps(as_plain_data(report), allow_nan=False))
    assert (data["loss_before"], data["loss_after"]) == ("nan", "inf")


def test_unavailable_device_in_the_configuration_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    train(capsys)
    stored = Path("out/checkpoints/checkpoint-5/config.yaml").read_text()
    assert "use_cpu: true" in stored and "device: null" in stored
    elsewhere = stored.replace("use_cpu: true", "use_cpu: false").replace("device: null", "device: cuda")
    Path("elsewhere.yaml").write_text(elsewhere)
    words = ("--quantize", "int4-weight-only", "--config", "elsewhere.yaml", "--json")
    answer = finalize(capsys, "out", "final", *words)
    assert json.loads(answer.output)["loss_after"] > 0


def test_impossible_requests_are_rejected_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    train(capsys)
    refusals = {
        ("out", "final", "--quantize", "int4-weight-onli"): (2, "no such recipe. Did you mean 'int4-weight-only'?"),
        ("nowhere", "final"): (2, "'nowhere' is not a checkpoint: there is no such directory"),
        ("out", "text"): (2, "'text' exists already. Nothing is overwritten"),
        ("out",): (2, "the following arguments are required: OUT"),
        ("out", "final", "--ema"): (1, "has no averaged weights"),
        ("out", "final", "--quantize", "float8-dynamic-act-float8-weight"): (1, "the device is 'cpu'"),
    }
    for words, (code, message) in refusals.items():
        answer = call(capsys, "finalize", *words)
        assert (answer.code, message in " ".join(answer.errors.split())) == (code, True), answer
    Path("text").rename("moved")
    answer = call(capsys, "finalize", "out", "final", "--quantize", "int4-weight-only")
    assert answer.code == 2 and "--no-evaluation" in answer.errors
    assert not Path("final").exists()
    finalize(capsys, "out", "final", "--quantize", "int4-weight-only", "--no-evaluation")


def test_help_lists_the_recipes_and_imports_nothing_slow(tmp_path: Path) -> None:
    program = (
        "from forgather.cli.main import main; code = main(); "
        "sys.exit('imported' if {'torch', 'transformers', 'torchao'} & set(sys.modules) else code)"
    )
    answer = spawn(tmp_path, "finalize", "--help", program=program)
    assert (answer.code, answer.errors) == (0, "")
    assert all(recipe in answer.output for recipe in INT_RECIPES)


def test_gpt2_has_no_layer_to_quantise_and_a_quantised_model_cannot_be_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(capsys)
    finalize(capsys, "out", "small", "--quantize", "int4-weight-only", "--no-evaluation")
    words = ("train", "tiny.yaml", "--model", "{pretrained: small}", "--args.output_dir", "again")
    answer = call(capsys, *words)
    assert answer.code == 1 and "LlamaForCausalLM is quantised" in answer.errors and "step 1" not in answer.output
    gpt2 = "{model_type: gpt2, config: {n_embd: 32, n_layer: 1, n_head: 2, n_positions: 64}}"
    assert call(capsys, "train", "tiny.yaml", "--model", gpt2, "--args.output_dir", "gpt2").code == 0
    answer = call(capsys, "finalize", "gpt2", "final", "--quantize", "int4-weight-only", "--no-evaluation")
    assert answer.code == 1 and "c_attn: it is a Conv1D of transformers" in " ".join(answer.errors.split())
