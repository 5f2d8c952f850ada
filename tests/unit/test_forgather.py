"""Package `forgather`: lazily imported public names, and the imports of a first step."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import forgather

EXPECTED = {
    "Trainer TrainingArguments BaseTrainer BaseTrainingArguments DDPTrainer DDPTrainingArguments AccelTrainer",
    "AccelTrainingArguments PipelineTrainer PipelineTrainingArguments HybridTrainer HybridTrainingArguments",
    "CheckpointManager CheckpointConfig CheckpointCoordinator StateComponent SharingPattern",
    "TrainerCallback TrainerControl TrainerState TrainOutput",
}
HEAVY = ("torch", "numpy", "transformers", "rich", "jsonargparse", "accelerate", "safetensors", "yaml")
FIRST_STEP = """
import sys, torch
before = set(sys.modules)
from forgather import Trainer, TrainingArguments

class Model(torch.nn.Linear):
    def forward(self, x, labels=None):
        return {"loss": super().forward(x).square().mean(), "logits": x}

args = TrainingArguments(output_dir=sys.argv[1], max_steps=1, use_cpu=True, save_strategy="no")
samples = [{"x": torch.ones(2), "labels": torch.ones(2)}] * 8
Trainer(args=args, model=Model(2, 2), train_dataset=samples).train()
print("imported", sorted({name.partition(".")[0] for name in sys.modules if name not in before}))
"""


def run(program: str, *words: str) -> str:
    """Run a program in a subprocess and return its output."""
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_and_dir_import_no_library() -> None:
    found = run(f"import sys, forgather; dir(forgather); print([name for name in {HEAVY} if name in sys.modules])")
    assert found == "[]\n"


def test_dir_lists_all_public_names_and_each_exists() -> None:
    assert {name for line in EXPECTED for name in line.split()} <= set(forgather.__all__) <= set(dir(forgather))
    assert {"__version__", "__doc__"} <= set(dir(forgather))
    for name in forgather.__all__:
        found = getattr(forgather, name)
        assert found.__name__ == name and found.__module__.startswith("forgather."), name


def test_public_names_are_the_defined_objects() -> None:
    from forgather import CheckpointManager, Trainer
    from forgather.ml.checkpoint.manager import CheckpointManager as defined_manager
    from forgather.ml.trainer.trainer import Trainer as defined_trainer

    assert (Trainer, CheckpointManager) == (defined_trainer, defined_manager)
    assert forgather.__version__.count(".") == 2


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(forgather.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == sorted(forgather.__all__)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(
        AttributeError, match=r"module 'forgather' has no attribute 'Trainr'\. Did you mean 'Trainer'\?"
    ):
        forgather.Trainr  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'forgather' has no attribute 'Xyz'$"):
        forgather.Xyz  # type: ignore[attr-defined] # noqa: B018
    assert not hasattr(forgather, "__wrapped__")


def test_first_step_imports_no_unneeded_library(tmp_path: Path) -> None:
    last = run(FIRST_STEP, str(tmp_path)).splitlines()[-1]
    imported = set(ast.literal_eval(last.removeprefix("imported ")))
    unneeded = {"transformers", "peft", "torchao", "accelerate", "matplotlib", "jsonargparse", "yaml", "tensorboard"}
    assert not imported & unneeded and "forgather" in imported
