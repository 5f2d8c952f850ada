"""First attempts of new users: option names of other programs, one text file, compressed data, own modules."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from forgather.cli.commands.train import read_configuration
from forgather.cli.errors import UsageError
from forgather.config.data_builders import build_datasets
from forgather.config.help import choices_of
from forgather.config.model_builders import model_builder
from forgather.config.schema import DataSection, ModelSection
from forgather.data.byte_tokenizer import byte_tokenizer
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from tests.unit.cli.program import call, spawn, write_tiny_run

SAVED_DATASET = """
def load_from_disk(path):
    return [{"text": f"document {number}"} for number in range(9)]
"""
OWN_CALLBACK = """
import torch

def ready_loader():
    samples = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(40)]
    return {"train": torch.utils.data.DataLoader(samples, batch_size=10)}

class Speaks:
    def on_train_begin(self, args, state, control, **kwargs):
        print("module beside the configuration")
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_run(tmp_path)


def refusal(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        read_configuration(["tiny.yaml", *words])
    return str(caught.value)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--lr", "Did you mean '--args.learning_rate'?"),
        ("--learning-rate", "Did you mean '--args.learning_rate'?"),
        ("--model_name_or_path", "Did you mean '--model.pretrained'?"),
        ("--output_dir", "Did you mean '--args.output_dir'?"),
        ("--batch_size", "Did you mean '--args.per_device_train_batch_size'?"),
        ("--num_train_epochs", "Did you mean '--args.num_train_epochs'?"),
        ("--bf16", "Set --args.mixed_precision to bf16."),
        ("--args.evaluation_strategy", "Did you mean '--args.eval_strategy'?"),
        ("--nproc_per_node", "Did you mean '--nproc'?"),
    ],
)
def test_option_names_of_other_programs_suggest_the_equivalent(option: str, expected: str) -> None:
    assert expected in refusal(option, "1")


def test_section_may_be_a_mapping_and_yaml_no_is_a_string() -> None:
    words = ("--model", '{"model_type": "gpt2", "config": {"n_layer": 1}}', "--args", "{eval_strategy: no, seed: 5}")
    configuration, _ = read_configuration(["tiny.yaml", *words, "--model.config.n_head", "2"])
    assert configuration.model.config == {"n_layer": 1, "n_head": 2}, "replaces the section of the file"
    assert (configuration.args.eval_strategy, configuration.args.seed, configuration.args.max_steps) == ("no", 5, 5)
    assert "expected a mapping of its keys" in refusal("--model", "gpt2")
    text = Path("tiny.yaml").read_text().replace("eval_strategy: steps", "eval_strategy: no\n  save_strategy: no")
    Path("no.yaml").write_text(text)
    args = read_configuration(["no.yaml"])[0].args
    assert (args.eval_strategy, args.save_strategy) == ("no", "no")
    assert TrainingArguments(eval_strategy=False).eval_strategy == "no"  # type: ignore[arg-type]


def test_help_lists_exactly_the_accepted_choices(capsys: pytest.CaptureFixture[str]) -> None:
    choices = choices_of("forgather.ml.trainer.arguments.training_arguments", "TrainingArguments")
    assert {"eval_strategy", "lr_scheduler_type", "mixed_precision", "qat_recipe", "on_save_error"} <= set(choices)
    assert all(values for values in choices.values())
    for name, values in choices.items():
        with pytest.raises(ValueError) as caught:
            TrainingArguments(**{name: "nonsense"})
        assert all(repr(value) in str(caught.value) for value in values), name
    text = " ".join(call(capsys, "train", "--help").output.split())
    assert "--args.eval_strategy When to evaluate. (no, steps or epoch; str, default 'no')" in text


def test_single_text_is_split_by_tokens_for_evaluation() -> None:
    Path("one.txt").write_text("abcdefghij" * 20)
    tokenizer = byte_tokenizer()
    for seed in range(4):
        section = DataSection(files=["one.txt"], eval_fraction=0.25, sequence_length=16, seed=seed)
        made = build_datasets(section, tokenizer, TrainingArguments(output_dir="o", eval_strategy="steps"))
        assert made.eval is not None and (len(made.train.tokens), len(made.eval.tokens)) == (150, 51)
        again = made.eval.__class__.__new__(made.eval.__class__)
        again.__setstate__(made.eval.__getstate__())
        assert np.array_equal(again.tokens, made.eval.tokens)
        without = build_datasets(section, tokenizer, TrainingArguments(output_dir="o"))
        assert without.eval is None and len(without.train.tokens) == 201


def test_compressed_json_lines_are_read_and_binary_files_rejected() -> None:
    with gzip.open("data.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(40)))
    args, tokenizer = TrainingArguments(output_dir="o"), byte_tokenizer()
    made = build_datasets(DataSection(files=["data.jsonl.gz"], eval_fraction=0.0), tokenizer, args)
    assert bytes(made.train.tokens[:6].astype(np.uint8)) == b"text 0"
    Path("data.bin").write_bytes(gzip.compress(b"text" * 99))
    with pytest.raises(ValueError, match=r"data\.bin is not UTF-8 text"):
        build_datasets(DataSection(files=["data.bin"]), tokenizer, args)
    Path("bad.txt.gz").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"bad\.txt\.gz cannot be decompressed"):
        build_datasets(DataSection(files=["bad.txt.gz"]), tokenizer, args)


def test_evaluation_on_training_data_is_rejected_or_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/datasets.py").write_text(SAVED_DATASET)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    args, tokenizer = TrainingArguments(output_dir="o"), byte_tokenizer()
    with pytest.raises(ValueError, match=r"has no splits, so data\.eval_split='validation' cannot be used"):
        build_datasets(DataSection(dataset="text", eval_split="validation"), tokenizer, args)
    with pytest.raises(UsageError, match="would evaluate on the training data"):
        build_datasets(DataSection(dataset="text", eval_split="train"), tokenizer, args)
    with pytest.raises(UsageError, match=r"data\.eval_split='test' has no effect with data\.files"):
        build_datasets(DataSection(files=["text/*.txt"], eval_split="test"), tokenizer, args)
    build_datasets(DataSection(files=["text/*.txt"], eval_files=["text/1.txt"]), tokenizer, args)
    assert "1 of 1 files of data.eval_files are also in data.files" in caplog.text
    monkeypatch.delitem(sys.modules, "datasets", raising=False)


def test_config_of_a_pretrained_model_is_applied_or_rejected() -> None:
    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model_builder(ModelSection(model_type="llama", config=tiny), byte_tokenizer())().save_pretrained("base")
    model = model_builder(ModelSection(pretrained="base", config={"attention_dropout": 0.5}), None)()
    assert model.config.attention_dropout == 0.5
    plain = AutoModelForCausalLM.from_pretrained("base")
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight)
    with pytest.raises(ValueError, match="does not fit the weights in 'base'"):
        model_builder(ModelSection(pretrained="base", config={"num_hidden_layers": 2}), None)()
    with pytest.raises(UsageError, match="LlamaConfig has no value 'hiden_size'"):
        model_builder(ModelSection(pretrained="base", config={"hiden_size": 2}), None)
    with pytest.raises(UsageError, match=r"model\.init_args=.* has no effect with model\.model_type"):
        model_builder(ModelSection(model_type="llama", init_args={"a": 1}), byte_tokenizer())


def test_resume_lists_changed_settings_and_a_failed_run_keeps_the_stored_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside.py").write_text(OWN_CALLBACK)
    # Like an installed script, with its own folder in sys.path.
    script = "sys.path[0:1] = ['elsewhere']; from forgather.cli.main import main; sys.exit(main())"
    words = ("train", "tiny.yaml", "--callbacks+", "{class_path: beside.Speaks}")
    first = spawn(tmp_path, *words, program=script)
    assert first.code == 0 and "module beside the configuration" in first.output, first.errors
    assert " -> " not in first.output and "steps      5, 0.28 epochs" in first.output
    assert call(capsys, "train", "tiny.yaml", "--args.max_steps", "6", "--model.config.hidden_size", "32").code == 1
    assert yaml.safe_load(Path("out/config.yaml").read_text())["args"]["max_steps"] == 5
    again = call(capsys, *words[:2], "--args.max_steps", "8", "--args.learning_rate", "3e-4")
    assert again.code == 0
    rows = [line.strip() for line in again.output.splitlines() if " -> " in line]
    assert rows[0].startswith("changed") and "args.max_steps: 5 -> 8" in rows[0]
    assert rows[1] == "args.learning_rate: 0.001 -> 0.0003" and rows[2].startswith("callbacks: ") and len(rows) == 3
    loader = (
        "--data",
        "{class_path: beside.ready_loader}",
        "--args",
        "{eval_strategy: no, max_steps: 1, output_dir: o2}",
    )
    assert "batch      10 per device x 1 accumulated" in call(capsys, *words[:2], *loader).output
