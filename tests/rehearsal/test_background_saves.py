"""Background saves on the rehearsal device: pinned staging memory, and no host wait on the training thread."""

from pathlib import Path

import pytest

from forgather.ml.checkpoint import store
from forgather.ml.trainer.trainer import Trainer
from tests.support.rehearsal import Record, watching
from tests.support.rehearsed_runs import samples
from tests.support.tiny_models import quiet_trainer, tiny_llama

STAGING = "checkpoint/background/staged_snapshot.py"


def saved_run(output_dir: Path, memory: str | None) -> Record:
    """Train with background saves at steps 3 and 6; return the observations."""
    with watching() as record:
        trainer = quiet_trainer(
            output_dir,
            None,
            samples(),
            trainer_class=Trainer,
            trainer_options={"model_init": tiny_llama, "optimizer_cls_and_kwargs": None},
            use_cpu=False,
            per_device_train_batch_size=4,
            max_steps=6,
            save_strategy="steps",
            save_steps=3,
            async_save=True,
            async_save_memory=memory,
        )
        trainer.train()
    for step in (3, 6):
        assert store.verify_checkpoint(str(output_dir / "checkpoints" / f"checkpoint-{step}")) == []
    return record


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
