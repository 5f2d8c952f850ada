"""Golden losses of a fixed tiny run: code changes must not alter a single bit unintentionally.

The losses are in `golden_losses.json`, as hexadecimal floats. `golden_losses_of_drawn_order.json` has the losses of the
same run in the data order of older versions, which their runs keep. After an intended change, rewrite the files with

    python -m tests.guarantees.exact_resume.test_golden_losses

and commit them together with the change that explains the difference. The run has its own process, with one thread and the
plainest CPU instructions, because the rounding of sums depends on both. Another version of torch may still round
differently: the files record the version that they were written for.
"""

import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drawn_order import DrawnOrder
from tests.support.launch import RankProcess
from tests.support.train_job import Scenario, build_trainer

MODULE = "tests.guarantees.exact_resume.test_golden_losses"
RUN_SECONDS = 120.0
GOLDEN_PATHS = {
    "keyed": Path(__file__).with_name("golden_losses.json"),
    "drawn": Path(__file__).with_name("golden_losses_of_drawn_order.json"),
}
# The same arithmetic on every CPU, for torch's own kernels, matrix products and low precision.
PLAIN_INSTRUCTIONS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
SETTINGS: dict[str, Any] = {
    "logging_steps": 1,
    "eval_steps": 2,
    "num_train_epochs": 3,
    "save_strategy": "no",
    # The setting that the golden values were written with.
    "weight_decay_groups": "all",
}


class StepLosses:
    """Callback that records the loss and the gradient norm of every step, before any averaging."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.norms: list[str] = []

    def on_train_metrics(
        self, args: Any, state: Any, control: Any, loss: torch.Tensor, grad_norm: torch.Tensor, **_: Any
    ) -> None:
        self.losses.append(float(loss).hex())
        self.norms.append(float(grad_norm).hex())


def losses_of_the_fixed_run(order: str) -> dict[str, Any]:
    """Train in this process, in one of the data orders, and return the losses with their versions."""
    torch.set_num_threads(1)
    steps = StepLosses()
    with tempfile.TemporaryDirectory() as directory:
        trainer = build_trainer(
            Scenario("golden", SETTINGS), directory, [steps, DrawnOrder()] if order == "drawn" else [steps]
        )
        trainer.train()
    history = trainer.state.log_history
    return {
        "written_for": {"torch": torch.__version__, "machine": platform.machine()},
        "loss": steps.losses,
        "grad_norm": steps.norms,
        "logged_loss": [record["loss"].hex() for record in history if "loss" in record],
        "learning_rate": [record["learning_rate"].hex() for record in history if "learning_rate" in record],
        "eval_loss": [record["eval_loss"].hex() for record in history if "eval_loss" in record],
    }


def write_losses(folder: Path) -> None:
    """Train both orders in a process with plain CPU instructions, which torch selects on import; write the losses."""
    process = RankProcess(0, [sys.executable, "-m", MODULE, str(folder)], PLAIN_INSTRUCTIONS)
    code = process.wait(RUN_SECONDS)
    assert code == 0, process.output


@pytest.fixture(scope="module")
def present_losses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the losses of the current code."""
    folder = tmp_path_factory.mktemp("losses")
    write_losses(folder)
    return folder


@pytest.mark.parametrize("order", GOLDEN_PATHS)
def test_losses_equal_the_golden_values(present_losses: Path, order: str) -> None:
    golden_path = GOLDEN_PATHS[order]
    present, golden = (json.loads(path.read_text()) for path in (present_losses / golden_path.name, golden_path))
    for name in ("loss", "grad_norm", "logged_loss", "learning_rate", "eval_loss"):
        assert present[name] == golden[name], (
            f"{name} differs; the golden values were written for {golden['written_for']}, this is {present['written_for']}"
        )


@pytest.mark.parametrize("order", GOLDEN_PATHS)
def test_golden_file_has_every_step(order: str) -> None:
    golden = json.loads(GOLDEN_PATHS[order].read_text())
    assert len(golden["loss"]) == len(golden["grad_norm"]) == len(golden["logged_loss"]) == 15
    assert len(golden["eval_loss"]) == 7
    assert len(set(golden["loss"])) == 15, "repeated losses do not come from training"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for name, golden_path in GOLDEN_PATHS.items():
            text = json.dumps(losses_of_the_fixed_run(name), indent=2)
            (Path(sys.argv[1]) / golden_path.name).write_text(text + "\n")
    else:
        write_losses(GOLDEN_PATHS["keyed"].parent)
