"""Code that a checkpoint names never runs, and no size that it names is built, even if its manifest is consistent."""

import contextlib
import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from forgather.cli.main import main
from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.checkpoint.store import amend_file
from forgather.ml.checkpoint.weights.trial_build import require_plausible_model
from tests.unit.cli.conftest import process_as_before  # noqa: F401 - undoes the set-up of the command line
from tests.unit.cli.program import call, write_tiny_run

CODE = "import pathlib; pathlib.Path('ran').touch()\n"
AUTO_MAP = {
    "AutoConfig": "hostile.Config",
    "AutoModelForCausalLM": "hostile.Model",
    "AutoTokenizer": ["hostile.Tokenizer", "hostile.Tokenizer"],
}


def rewrite(checkpoint: Path, name: str, changes: dict[str, object]) -> None:
    """Change a JSON file of the checkpoint, and its record in the manifest."""
    content = json.loads((checkpoint / name).read_text()) | changes
    record = next(one for one in read_manifest(str(checkpoint)).files if one.path == name)
    amend_file(str(checkpoint), record, json.dumps(content).encode())


@pytest.mark.parametrize("command", [("generate", "--prompt", "x", "--max-new-tokens", "2"), ("evaluate",)])
@pytest.mark.parametrize("model_type", ["llama", "hostile"])
def test_code_named_by_model_and_tokenizer_files_does_not_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    model_type: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_run(tmp_path)
    assert call(capsys, "train", "tiny.yaml", "--args.max_steps", "1").code == 0
    checkpoint = tmp_path / "out/checkpoints/checkpoint-1"
    for folder in (checkpoint, tmp_path):
        (folder / "hostile.py").write_text(CODE)
    rewrite(checkpoint, "config.json", {"auto_map": AUTO_MAP, "model_type": model_type})
    rewrite(checkpoint, "tokenizer_config.json", {"auto_map": AUTO_MAP})
    name, *options = command
    answer = call(capsys, name, str(checkpoint), *options)
    # The classes of transformers are used where they exist.
    assert answer.code == (0 if model_type == "llama" else 1), answer.errors
    assert "Traceback" not in answer.errors and not (tmp_path / "ran").exists()


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Leave this process 500 MB of further memory, so that a model that is built all the same fails and harms nobody."""
    with open("/proc/self/statm", "rb") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 500 * 10**6, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


HUGE = 10**9
HUGE_VALUES: dict[str, object] = {
    "num_hidden_layers": HUGE,
    "hidden_size": HUGE,
    "vocab_size": HUGE,
    "intermediate_size": HUGE,
    "head_dim": HUGE,
    # The configuration class itself makes a list of this length.
    "num_labels": HUGE,
}


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with a checkpoint at step 1, and its exported model."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_run(folder)
    with contextlib.chdir(folder):
        assert main(["train", "tiny.yaml", "--args.max_steps", "1"]) == 0
        assert main(["finalize", "out/checkpoints/checkpoint-1", "exported"]) == 0
    return folder


@pytest.fixture
def tiny(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(tiny_run, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_refused(capsys: pytest.CaptureFixture[str], description: str, key: str, *words: str) -> None:
    with limited_memory():
        answer = call(capsys, *words)
    text = " ".join(answer.errors.split())
    assert answer.code in (1, 2) and f"{description} describes a model that cannot belong to the weights in" in text, (
        text
    )
    assert f"{key}={HUGE}" in text and "the weights are " in text


@pytest.mark.parametrize(("positions", "is_refused"), [(16_384, False), (65_536, True)])
def test_buffers_that_are_not_stored_may_exceed_the_weights_within_bounds(
    tmp_path: Path, positions: int, is_refused: bool
) -> None:
    # Its causal mask has positions ** 2 bytes in each layer.
    config = GPTNeoConfig(
        num_layers=2, attention_types=[[["global", "local"], 1]], hidden_size=8, num_heads=1, vocab_size=50
    )
    GPTNeoForCausalLM(config).save_pretrained(tmp_path)
    config.max_position_embeddings = positions
    config.save_pretrained(tmp_path)
    refused = pytest.raises(CheckpointLoadError, match="describes a model that cannot belong to the weights")
    with refused if is_refused else contextlib.nullcontext():
        require_plausible_model(lambda: GPTNeoForCausalLM(config), str(tmp_path / "config.json"), str(tmp_path))


@pytest.mark.parametrize("name", HUGE_VALUES)
def test_sizes_that_do_not_fit_the_weights_are_refused_before_a_model_is_built(
    tiny: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    rewrite(tiny / "out/checkpoints/checkpoint-1", "config.json", {name: HUGE})
    assert_refused(capsys, "checkpoint-1/config.json", name, "generate", "out", "--prompt", "x")


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "out"),
        ("finalize", "out", "deployed", "--quantize", "int8-dynamic-act-int4-weight", "--no-evaluation"),
        ("checkpoint", "import", "exported", "imported"),
        ("generate", "exported", "--prompt", "x"),
        ("train", "tiny.yaml", "--model", "{pretrained: exported}", "--args.output_dir", "fine"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_command_that_builds_a_described_model_refuses_a_billion_layers(
    tiny: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    rewrite(tiny / "out/checkpoints/checkpoint-1", "config.json", {"num_hidden_layers": HUGE})
    exported = tiny / "exported/config.json"
    exported.write_text(json.dumps(json.loads(exported.read_text()) | {"num_hidden_layers": HUGE}))
    assert_refused(capsys, "config.json", "num_hidden_layers", *words)


def test_replay_refuses_a_stored_configuration_of_a_billion_layers(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny / "out/checkpoints/checkpoint-1"
    text = (checkpoint / "config.yaml").read_text().replace("num_hidden_layers: 1\n", f"num_hidden_layers: {HUGE}\n")
    record = next(one for one in read_manifest(str(checkpoint)).files if one.path == "config.yaml")
    amend_file(str(checkpoint), record, text.encode())
    (tiny / "out/config.yaml").write_text(text)
    assert_refused(capsys, "config.yaml", "model.config.num_hidden_layers", "replay", "out", "--step", "1")
