"""A run that resumes a modified or imported checkpoint really trains with it."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, ExponentialLR, LRScheduler, StepLR

from forgather.ml.trainer.trainer import Trainer
from forgather.tools.checkpoints import import_as_checkpoint, modify_checkpoint
from forgather.tools.checkpoints.edits import ModificationError
from tests.support.foreign_directories import content_of, save_with_accelerate, save_with_dcp, train_with_transformers
from tests.support.tiny_models import Recorder, quiet_trainer, tiny_llama, token_samples
from tests.unit.cli.program import call, write_plain_run
from tests.unit.tools.checkpoints.runs import ADAMW, trained, trainer

SCHEDULES: dict[str, Callable[[Any], LRScheduler] | None] = {
    "linear": None,
    "step": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.9),
}


def rates_of(output_dir: Path, schedule: Any, steps: int) -> list[float]:
    """Train to a step, from the newest checkpoint, and return the learning rates by step."""
    options = {**ADAMW, **({} if schedule is None else {"lr_scheduler_factory": schedule})}
    recorder = Recorder()
    quiet_trainer(
        output_dir,
        tiny_llama(0),
        token_samples(32),
        recorder,
        trainer_options=options,
        lr_scheduler_type="linear",
        save_strategy="steps",
        save_steps=3,
        logging_strategy="steps",
        logging_steps=1,
        resume_from_checkpoint=True,
        max_steps=steps,
    ).train()
    return [record["learning_rate"] for _, record in recorder.logs if "learning_rate" in record]


@pytest.mark.parametrize("name", SCHEDULES)
def test_resumed_run_trains_with_the_scaled_learning_rate(tmp_path: Path, name: str) -> None:
    # An unlimited horizon for the linear schedule: both legs must plan the same number of steps.
    schedule = SCHEDULES[name] or (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 - s / 20))
    rates_of(tmp_path / "plain", schedule, 3)
    shutil.copytree(tmp_path / "plain", tmp_path / "scaled")
    modify_checkpoint(str(tmp_path / "scaled"), scales=[("optimizer.lr", "0.5")])
    plain, scaled = (rates_of(tmp_path / one, schedule, 7) for one in ("plain", "scaled"))
    assert len(plain) == 4 and len(set(plain)) > 1
    assert scaled == pytest.approx([rate / 2 for rate in plain], rel=1e-12)


def test_cyclic_schedules_take_their_rates_from_the_configuration(tmp_path: Path) -> None:
    rates_of(tmp_path, lambda optimizer: CyclicLR(optimizer, 1e-3, 1e-2, cycle_momentum=False), 3)
    with pytest.raises(ModificationError, match="CyclicLR"):
        modify_checkpoint(str(tmp_path), scales=[("optimizer.lr", "0.5")])


def test_checkpoint_of_a_pipeline_is_modified_and_resumed_on_one_device(tmp_path: Path) -> None:
    run = trained("pipeline", tmp_path / "run")
    modify_checkpoint(str(run), settings=[("optimizer.lr", "0.001")])
    resumed: Trainer[Any] = trainer("single", str(run), max_steps=4, resume_from_checkpoint=True)
    resumed.load_checkpoint()
    assert {group["initial_lr"] for group in resumed.optimizer.param_groups} == {0.001}
    assert resumed.state.global_step == 2


@pytest.mark.parametrize("configuration", ["plain.yaml", "out/checkpoints/checkpoint-4-modified/config.yaml"])
def test_changed_argument_takes_effect_with_the_old_and_the_stored_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configuration: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_plain_run(tmp_path)
    schedule = ["--args.lr_scheduler_type", "constant", "--callbacks+", "{class_path: JsonLogger}"]
    assert call(capsys, "train", "plain.yaml", *schedule, "--args.max_steps", "4").code == 0
    answer = call(
        capsys, "checkpoint", "modify", "out", "--set", "args.learning_rate=5e-5", "--set", "args.max_steps=6"
    )
    assert answer.code == 0 and "newest checkpoint" in answer.output, answer.errors
    words = ["--args.max_steps", "6", *schedule] if configuration == "plain.yaml" else []
    answer = call(capsys, "train", configuration, *words)
    assert answer.code == 0, answer.errors
    lines = Path("out/trainer_logs.jsonl").read_text().splitlines()
    assert '"learning_rate": 5e-05' in lines[-2] + lines[-1] + lines[-3], lines[-3:]


def test_imported_checkpoint_of_transformers_is_resumed_at_its_step(tmp_path: Path) -> None:
    theirs = train_with_transformers(tmp_path / "theirs", tiny_llama(0))
    result = import_as_checkpoint(str(tmp_path / "theirs" / "checkpoint-4"), str(tmp_path / "ours"))
    assert result.step == 4 and result.path.endswith("checkpoint-4") and "optimizer" in result.taken
    ours = quiet_trainer(
        tmp_path / "ours",
        tiny_llama(1),
        token_samples(16),
        trainer_options=ADAMW,
        max_steps=6,
        resume_from_checkpoint=True,
    )
    ours.load_checkpoint()
    assert ours.state.global_step == 4
    expected = theirs.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.unwrapped_model().state_dict().items())
    moments = [state["exp_avg"] for state in ours.optimizer.state.values()]
    assert moments and all(moment.abs().sum() > 0 for moment in moments)
    ours.train()
    assert ours.state.global_step == 6


def save_foreign(owner: str, folder: Path, model: nn.Module) -> None:
    if owner == "accelerate.save_state":
        save_with_accelerate(folder, model)
    else:
        save_with_dcp(folder, {"model": model.state_dict()})


@pytest.mark.parametrize("owner", ["accelerate.save_state", "torch.distributed.checkpoint"])
def test_command_imports_weights_that_the_next_run_starts_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_plain_run(tmp_path)
    monkeypatch.delitem(sys.modules, "plain", raising=False)
    theirs = importlib.import_module("plain").PlainModel()
    save_foreign(owner, Path("theirs"), theirs)
    before = content_of(Path("theirs"))
    # Neither of both describes its model.
    answer = call(capsys, "checkpoint", "import", "theirs", "ours")
    assert answer.code == 2 and "--model CONFIG" in answer.errors and not Path("ours").exists()
    answer = call(capsys, "checkpoint", "import", "theirs", "ours", "--model", "plain.yaml", "--json")
    assert answer.code == 0, answer.errors
    found = json.loads(answer.output)
    assert found["schema"] == "forgather.checkpoint.import/1" and found["owner"] == f"a checkpoint of {owner}"
    assert found["step"] == 0 and found["taken"] == ["model (7 tensors)"]
    assert content_of(Path("theirs")) == before
    # A learning rate of 0 keeps the weights: the resumed run has those of the other program.
    more = ["--args.output_dir", "ours", "--args.learning_rate", "0", "--args.max_steps", "2"]
    answer = call(capsys, "train", "plain.yaml", *more)
    assert answer.code == 0, answer.errors
    weights = load_file("ours/checkpoints/checkpoint-2/model.safetensors")
    assert weights.keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in theirs.state_dict().items())
    assert call(capsys, "checkpoint", "verify", "ours", "--all").code == 0


def test_command_imports_into_the_model_of_a_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    theirs = tiny_llama(3)
    save_with_dcp(tmp_path / "theirs", theirs.state_dict())
    theirs.config.save_pretrained(tmp_path / "model")
    words = ["import", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--model", str(tmp_path / "model")]
    answer = call(capsys, "checkpoint", *words)
    assert answer.code == 2 and "--model CONFIG" in answer.errors and not (tmp_path / "ours").exists()
    theirs.config.architectures = [type(theirs).__name__]
    theirs.config.save_pretrained(tmp_path / "model")
    answer = call(capsys, "checkpoint", *words)
    assert answer.code == 0 and "torch.distributed.checkpoint" in answer.output, answer.errors
    weights = load_file(tmp_path / "ours" / "checkpoints" / "checkpoint-0" / "model.safetensors")
    assert weights and all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in weights.items())
