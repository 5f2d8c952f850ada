"""Loads into existing tensors: the same memory before and after, no second copy, nothing changed by damage."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.coordinator import CheckpointCoordinator
from forgather.ml.checkpoint.errors import CheckpointCorruptError
from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.trainer.recipes.weight_average import WeightAverage

_MIB = 2**20


class Training:
    """Model, AdamW and EMA of about 3 x `width`² x 4 bytes each."""

    def __init__(self, width: int, seed: int, safetensors: bool = True) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.average = WeightAverage(self.model.named_parameters(), 0.9)
        self.safetensors = safetensors

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.begin()
        self.average.update()

    def coordinator(self) -> CheckpointCoordinator:
        held = {"model": self.model, "optimizer": self.optimizer, "ema": self.average}
        components = [StateComponent(key, one, SharingPattern.GLOBAL) for key, one in held.items()]
        return CheckpointCoordinator(
            components,
            {},
            StaticDistributedEnvironment(),
            ".",
            model=self.model,
            save_safetensors=self.safetensors,
        )

    def tensors(self) -> list[Tensor]:
        states = self.optimizer.state.values()
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step")]
        return [*(one.data for one in self.model.parameters()), *moments, *self.average.tensors()]


def copies(training: Training) -> list[Tensor]:
    return [tensor.clone() for tensor in training.tensors()]


def are_equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("safetensors", [True, False])
def test_second_load_keeps_the_tensors(tmp_path: Path, safetensors: bool) -> None:
    saved, path = Training(200, seed=1, safetensors=safetensors), str(tmp_path / "checkpoint-1")
    saved.step()
    saved.coordinator().save_checkpoint(path)
    other = Training(200, seed=2, safetensors=safetensors)
    other.coordinator().load_checkpoint(path)
    assert are_equal(saved.tensors(), other.tensors())
    pointers = [tensor.data_ptr() for tensor in other.tensors()]
    other.step()
    assert not are_equal(saved.tensors(), other.tensors())
    other.coordinator().load_checkpoint(path)
    assert are_equal(saved.tensors(), other.tensors())
    assert [tensor.data_ptr() for tensor in other.tensors()] == pointers
    # Both runs continue equally: no tensor and no counter belongs to the file.
    torch.manual_seed(3)
    saved.step()
    torch.manual_seed(3)
    other.step()
    assert are_equal(saved.tensors(), other.tensors())


@pytest.mark.parametrize("name", ["optimizer_state.pt", "ema_state.pt"])
def test_damaged_state_changes_no_existing_tensor(tmp_path: Path, name: str) -> None:
    saved, path = Training(200, seed=1), tmp_path / "checkpoint-1"
    saved.step()
    saved.coordinator().save_checkpoint(str(path))
    with (path / name).open("r+b") as file:
        file.seek((path / name).stat().st_size // 2)
        file.write(b"damage")
    other = Training(200, seed=2)
    other.step()
    before = copies(other)
    with pytest.raises(CheckpointCorruptError, match=name):
        other.coordinator().load_checkpoint(str(path))
    assert are_equal(other.tensors(), before)


def test_state_of_new_parameters_does_not_stay_mapped(tmp_path: Path) -> None:
    """An optimizer with moments of some parameters only copies the others out of the file."""
    saved, path = Training(200, seed=1), tmp_path / "checkpoint-1"
    saved.step()
    saved.coordinator().save_checkpoint(str(path))
    other = Training(200, seed=2)
    next(other.model.parameters()).grad = torch.zeros(200, 200)
    other.optimizer.step()
    other.coordinator().load_checkpoint(str(path))
    assert are_equal(saved.tensors(), other.tensors())
    assert str(path) not in Path("/proc/self/maps").read_text()


_GROWTH_JOB = """
import sys
from pathlib import Path
from tests.unit.ml.checkpoint.test_load_in_place import Training

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

training, path = Training(2048, seed=1), sys.argv[1]
training.step()
training.coordinator().save_checkpoint(path)
training.coordinator().load_checkpoint(path)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
training.coordinator().load_checkpoint(path)
print(status("VmHWM") - before, sum(tensor.nbytes for tensor in training.tensors()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark of memory is Linux's")
def test_second_load_needs_no_second_copy(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _GROWTH_JOB, str(tmp_path / "checkpoint-1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    growth, total = map(int, done.stdout.split())
    # Weights, two moments and an average: about 192 MiB.
    assert total > 190 * _MIB
    assert growth < 64 * _MIB, f"{growth / _MIB:.0f} MiB"
