"""A script that is killed and started again continues from its last checkpoint, and ends like an uninterrupted one."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers.trainer_utils import get_last_checkpoint

from tests.guarantees.drop_in_scripts.doomed_script import doom
from tests.guarantees.drop_in_scripts.script_runs import OURS, run_program, tiny_files, write_program
from tests.support.launch import CapturedProcess
from tests.support.rank_nursery import WarmProgram

SAVING = {
    "save_strategy": "steps",
    "save_steps": 2,
    # Order and dropout are random, so a resume must restore the random state.
    "train_sampling_strategy": "random",
}


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model folder with dropout."""
    folder = tmp_path_factory.mktemp("random") / "model"
    shutil.copytree(tiny_files() / "models" / "run_clm", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "resid_pdrop": 0.2, "embd_pdrop": 0.1}))
    return str(folder)


def test_a_killed_script_ends_like_an_uninterrupted_one(random_model: str, tmp_path: Path) -> None:
    settings = {**SAVING, "model_name_or_path": random_model}
    straight = run_program("run_clm", OURS, tmp_path / "straight", **settings)

    killed = tmp_path / "killed"
    command = write_program("run_clm", OURS, killed, **settings)
    doom(Path(command[0]), step=5)
    start = WarmProgram("tests.guarantees.drop_in_scripts.doomed_script", tuple(command))
    process = CapturedProcess(start, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, None, "doomed script")
    assert process.wait(timeout=300) == -signal.SIGKILL, process.output
    assert str(get_last_checkpoint(str(killed / "output"))).endswith("checkpoint-4")

    resumed = run_program("run_clm", OURS, killed, **settings)
    assert resumed.losses == straight.losses
    assert resumed.metrics["eval_loss"] == straight.metrics["eval_loss"]
    found, wanted = (load_file(result.output_dir / "model.safetensors") for result in (resumed, straight))
    assert all(found[name].equal(wanted[name]) for name in wanted)
