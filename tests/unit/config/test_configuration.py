"""Configuration files and command-line overrides: the parsed result, and the messages for mistakes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from forgather.cli.commands.train import read_configuration
from forgather.cli.errors import UsageError
from forgather.config.parser import to_dict
from tests.unit.cli.program import call

BASE = """\
model:
  model_type: llama
  config: {hidden_size: 64}

args:
  max_steps: 10
"""

# A kilobyte of nested aliases that stands for 10 billion values, in a section that the configuration has.
BOMB = "\n".join(
    ["optimizer:", "  class_path: torch.optim.SGD", "  init_args:", "    a0: &a0 [x]"]
    + [f"    a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 11)]
).encode()


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str, *words: str) -> Any:
    Path("run.yaml").write_text(text)
    return read_configuration(["run.yaml", *words])[0]


def refusal(text: str, *words: str) -> str:
    with pytest.raises(UsageError) as caught:
        read(text, *words)
    return str(caught.value)


def test_wrong_type_names_line_key_value_and_type() -> None:
    assert refusal(BASE.replace("max_steps: 10", "max_steps: ten")) == (
        "run.yaml, line 6: args.max_steps='ten' has type str, expected int."
    )
    assert refusal("args:\n  # a comment\n  max_grad_norm: [1]\n") == (
        "run.yaml, line 3: args.max_grad_norm=[1] has type list, expected float or None."
    )
    assert (
        refusal("data:\n  files: a.txt\n") == "run.yaml, line 2: data.files='a.txt' has type str, expected list of str."
    )


def test_wrong_type_on_the_command_line_names_its_source() -> None:
    assert refusal(BASE, "--args.max_steps", "1.5") == (
        "on the command line: args.max_steps=1.5 has type float, expected int."
    )


@pytest.mark.parametrize(
    ("text", "line", "key", "nearest"),
    [
        ("args:\n  max_step: 5\n", 2, "args.max_step", "args.max_steps"),
        ("args:\n  seed: 1\nmodl:\n  model_type: llama\n", 3, "modl", "model"),
        ("model:\n  model_typ: llama\n", 2, "model.model_typ", "model.model_type"),
        ("model:\n  max_steps: 5\n", 2, "model.max_steps", "args.max_steps"),
    ],
)
def test_unknown_key_names_its_line_and_suggests_the_nearest(text: str, line: int, key: str, nearest: str) -> None:
    message = refusal(text)
    assert message.startswith(f"run.yaml, line {line}: there is no key {key!r}. Did you mean {nearest!r}?")


def test_unknown_option_suggests_the_nearest() -> None:
    assert "no key '--args.max_setps'. Did you mean '--args.max_steps'?" in refusal(BASE, "--args.max_setps", "5")


def test_invalid_value_names_its_line() -> None:
    message = refusal("args:\n  seed: 1\n  eval_strategy: sometimes\n")
    assert message.startswith("run.yaml, line 3: args.eval_strategy='sometimes'") and "'steps'" in message


def test_yaml_errors_name_their_line() -> None:
    assert refusal("args:\n  max_steps: [1\n").startswith("run.yaml, line 3: invalid YAML")
    assert refusal("args:\n  seed: 1\n  seed: 2\n") == (
        "run.yaml, line 3: 'seed' is already set in line 2; remove one of the two."
    )
    assert refusal("args: 5\n") == "run.yaml, line 1: args=5 has type int, expected a mapping of its keys."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"args:\n  seed: 1\n\x00\x01", "run.yaml, line 3: invalid YAML: the control character #x00 is not permitted."),
        (b"a: " + b"[" * 20_000, "run.yaml: invalid YAML: its values are nested too deeply."),
        (b"args: {report_to: &a [*a]}", "run.yaml, line 1: invalid YAML: its aliases repeat more than 100,000 values."),
        (BOMB, "run.yaml, line 1: invalid YAML: its aliases repeat more than 100,000 values."),
        (
            b"args:\n  seed: 1\n  output_dir: 2020-13-45",
            "run.yaml, line 3: invalid YAML: '2020-13-45' is no value: it cannot be read as timestamp (month must be in "
            "1..12). Quote it if it is text.",
        ),
        (b"\x7fELF\x02\x01", "run.yaml, line 1: invalid YAML: the control character #x7f is not permitted."),
        (b"args: \xff\xfe", "The configuration 'run.yaml' cannot be read: it is no text in UTF-8, because of byte 6."),
    ],
)
def test_file_that_is_no_configuration_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    Path("run.yaml").write_bytes(content)
    answer = call(capsys, "train", "run.yaml")
    assert (answer.code, answer.errors) == (2, f"forgather: {message}\n")


@pytest.mark.parametrize(
    "value",
    ["1" * 5000, "0x" + "f" * 5000, "2001-12-14t21:59:43.10-99:99", "!!bool maybe", "!!timestamp x", '!!int ""'],
    ids=lambda value: value[:20],
)
def test_text_that_its_type_cannot_hold_names_its_line(value: str) -> None:
    message = refusal(f"args:\n  seed: 1\n  output_dir: [{value}]\n")
    assert message.startswith("run.yaml, line 3: invalid YAML: ") and "is no value" in message and len(message) < 400
    # A word of the command line that is no YAML is text.
    assert read(BASE, "--args.output_dir", "2020-13-45").args.output_dir == "2020-13-45"


def test_many_uses_of_an_anchor_are_a_configuration() -> None:
    keys = ", ".join(f"k{number}: {number}" for number in range(100))
    uses = "".join(f"    use{number}: *base\n" for number in range(60))
    text = f"model:\n  class_path: a.b\n  init_args:\n    base: &base {{{keys}}}\n{uses}"
    assert read(text).model.init_args["use59"]["k99"] == 99


def test_command_line_overrides_the_file() -> None:
    configuration = read(
        BASE,
        *(
            "--args.max_steps",
            "-1",
            "--args.learning_rate=1e-2",
            "--args.output_dir",
            "2024",
            "--args.shuffle",
            "false",
        ),
        *(
            "--model.config.hidden_size",
            "32",
            "--model.config.rope_parameters.rope_theta",
            "1e4",
            "--data.files",
            "a.txt",
        ),
        *("--args.logging_first_step", "--optimizer.class_path", "torch.optim.SGD", "--optimizer.init_args.lr", "1e-1"),
        *("--callbacks+", "{class_path: JsonLogger}", "--callbacks+", "{class_path: PlotCallback}"),
    )
    args = configuration.args
    assert (args.max_steps, args.learning_rate, args.output_dir) == (-1, 0.01, "2024")
    assert (args.shuffle, args.logging_first_step) == (False, True)
    assert configuration.model.config == {"hidden_size": 32, "rope_parameters": {"rope_theta": 10000.0}}
    assert configuration.data.files == ["a.txt"]
    assert configuration.optimizer.init_args == {"lr": 0.1}
    assert [entry["class_path"] for entry in configuration.callbacks] == ["JsonLogger", "PlotCallback"]


def test_values_in_free_form_mappings_keep_their_types() -> None:
    text = "model:\n  class_path: a.b\n  init_args: {revision: '1', rate: 1e-3, flag: yes}\n"
    assert read(text).model.init_args == {"revision": "1", "rate": 0.001, "flag": True}


def test_printed_configuration_round_trips(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(BASE)
    first = call(capsys, "train", "run.yaml", "--args.seed", "7", "--model.init_args.name", "'1e3'", "--print_config")
    assert first.code == 0
    assert yaml.safe_load(first.output)["args"]["seed"] == 7
    Path("printed.yaml").write_text(first.output)
    assert call(capsys, "train", "printed.yaml", "--print_config").output == first.output


def test_demo_is_the_default_configuration() -> None:
    configuration, is_demo = read_configuration(["--args.max_steps", "7"])
    assert is_demo
    assert configuration.args.max_steps == 7 and configuration.args.output_dir == "demo_output"
    assert to_dict(configuration)["model"]["model_type"] == "llama"


def test_missing_file_and_two_files_are_rejected() -> None:
    with pytest.raises(UsageError, match=r"'nowhere\.yaml' cannot be read: No such file"):
        read_configuration(["nowhere.yaml"])
    with pytest.raises(UsageError, match="Expected one configuration file, got "):
        read_configuration(["a.yaml", "b.yaml"])


def test_arguments_depend_on_the_kind_of_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    text = BASE + "  dispatch_batches: false\n  ddp:\n    bucket_cap_mb: 5\ntrainer: {kind: ddp}\n"
    configuration = read(text, "--args.post_local_sgd.enabled", "--args.ddp.static_graph", "true")
    args = configuration.args
    assert (args.dispatch_batches, args.ddp.bucket_cap_mb, args.ddp.static_graph) == (False, 5, True)
    assert args.post_local_sgd.enabled and args.post_local_sgd.period == 4
    assert to_dict(configuration)["args"]["ddp"]["bucket_cap_mb"] == 5
    Path("run.yaml").write_text(text)
    printed = call(capsys, "train", "run.yaml", "--print_config").output
    Path("printed.yaml").write_text(printed)
    assert call(capsys, "train", "printed.yaml", "--print_config").output == printed


def test_nested_arguments_are_checked_like_others() -> None:
    text = "trainer: {kind: ddp}\nargs:\n  ddp:\n    bucket_cap_mb: much\n"
    assert refusal(text).startswith("run.yaml, line 4: args.ddp.bucket_cap_mb='much' has type str, expected ")
    assert "there is no key 'args.ddp.bucket_cap'. Did you mean 'args.ddp.bucket_cap_mb'?" in refusal(
        text.replace("bucket_cap_mb: much", "bucket_cap: 5")
    )
    message = refusal("trainer: {kind: ddp}\nargs:\n  post_local_sgd:\n    period: 0\n")
    assert message.startswith("run.yaml, line 4: args.post_local_sgd.period=0 cannot be used")
    assert refusal("trainer: {kind: ddp}\nargs:\n  ddp: 5\n") == (
        "run.yaml, line 3: args.ddp=5 has type int, expected a mapping of its keys."
    )


def test_argument_of_another_trainer_names_the_trainer() -> None:
    message = refusal("args: {dispatch_batches: true}\n")
    assert "It belongs to --trainer ddp or fsdp2 or hybrid, but trainer.kind is 'single'." in message
    assert "It belongs to --trainer ddp" in refusal(BASE, "--args.ddp.bucket_cap_mb", "5")
