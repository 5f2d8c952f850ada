"""Background saves on the rehearsal device: pinned staging memory, and no host wait on the training thread."""

from pathlib import Path
from typing import Any

import pytest

from forgather.ml.checkpoint import store
from forgather.ml.trainer.trainer import Trainer
from tests.support.rehearsal import Record, watching
from tests.support.rehearsed_runs import samples
from tests.support.tiny_models import quiet_trainer, tiny_llama

STAGING = "checkpoint/background/staged_snapshot.py"


STEPS = (3, 6)


def saved_run(output_dir: Path, memory: str | None, is_async: bool = True, **settings: Any) -> Record:
    """Train with saves at steps 3 and 6; return the observations."""
    with watching() as record:
        trainer = quiet_trainer(
            output_dir,
            None,
            samples(),
            trainer_class=Trainer,
            trainer_options={"model_init": tiny_llama, "optimizer_cls_and_kwargs": None},
            use_cpu=False,
            per_device_train_batch_size=4,
            max_steps=STEPS[-1],
            save_strategy="steps",
            save_total_limit=None,
            async_save=is_async,
            async_save_memory=memory,
            **{"save_steps": STEPS[0], **settings},
        )
        trainer.train()
    for step in STEPS:
        assert store.verify_checkpoint(str(path_of(output_dir, step))) == []
    return record


def path_of(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"checkpoint-{step}"


def files_of(output_dir: Path) -> dict[str, bytes]:
    """Return the files of all checkpoints, without the manifests, which contain the time."""
    files = (file for step in STEPS for file in path_of(output_dir, step).iterdir())
    return {f"{one.parent.name}/{one.name}": one.read_bytes() for one in files if "manifest" not in one.name}


@pytest.mark.parametrize("memory", [None, "24KB"])
def test_files_contain_the_state_at_the_moment_of_the_save(tmp_path: Path, memory: str | None) -> None:
    # A copy to pinned memory arrives when somebody waits for it. A save that reads it earlier writes other bytes.
    saved_run(tmp_path / "foreground", None, is_async=False)
    saved_run(tmp_path / "background", memory)
    expected, found = files_of(tmp_path / "foreground"), files_of(tmp_path / "background")
    assert [name for name in {**expected, **found} if expected.get(name) != found.get(name)] == []


def test_save_after_the_first_step_is_copied_to_pinned_memory(tmp_path: Path) -> None:
    record = saved_run(tmp_path, None, save_steps=1)
    copies = [one.name for one in record.events if one.kind == "d2h" and STAGING in one.where]
    assert len(copies) == STEPS[-1] * 4 * len(list(tiny_llama().parameters()))
    assert set(copies) == {"non_blocking to pinned"}
    assert record.count("hazard") == 0


def test_all_tensors_are_copied_to_pinned_memory_without_a_wait(tmp_path: Path) -> None:
    record = saved_run(tmp_path, None)
    copies = [one for one in record.events if one.kind == "d2h" and "checkpoint/" in one.where]
    # Weights, both moments and the step of each parameter, in two saves.
    assert len(copies) == 2 * 4 * len(list(tiny_llama().parameters()))
    assert {one.name for one in copies} == {"non_blocking to pinned"}
    assert all(STAGING in one.where for one in copies)
    assert record.count("hazard") == 0


@pytest.mark.parametrize("memory", [None, "24KB"])
def test_only_the_thread_of_the_save_waits_for_copies(tmp_path: Path, memory: str | None) -> None:
    record = saved_run(tmp_path, memory)
    waits = [one for one in record.events if one.kind == "sync" and "checkpoint/" in one.where]
    assert waits
    for one in waits:
        assert any("background/saves.py" in line and line.endswith(" _run") for line in one.stack), one
    assert record.count("hazard") == 0
