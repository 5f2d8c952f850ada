"""Code that a checkpoint names never runs, even if its manifest is consistent."""

import json
from pathlib import Path

import pytest

from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.checkpoint.store import amend_file
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
