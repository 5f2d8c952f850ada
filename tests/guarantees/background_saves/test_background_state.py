"""A background save contains the state at the moment of the save, whatever training does meanwhile."""

import os
from pathlib import Path

import pytest
import torch

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.files import planned_file
from tests.support.faults.job import Job, debris
from tests.support.ranks import outcomes_on_ranks, run_on_ranks

# Less than the state of a rank: a part of it stays live until the save has read it.
SMALL = "20KB"


def files_of(path: str) -> dict[str, bytes]:
    """Return the content of a checkpoint without the manifest, which contains the time."""
    return {one.name: one.read_bytes() for one in Path(path).iterdir() if one.name != "checkpoint_manifest.json"}


def save_while_training(output_dir: str, memory: str | None, sharded: bool, safetensors: bool = True) -> None:
    """Save in the background and train on; the files must equal the files of a foreground save."""
    options = {"sharded": sharded, "save_safetensors": safetensors}
    job = Job(output_dir, async_save=True, async_save_memory=memory, **options)
    job.train()
    job.manager.prepare_background_saves()
    expected = job.digest()
    random_state = torch.get_rng_state()
    path = job.save()
    job.train(3)
    assert job.manager.finish_save() == path
    job.train()
    job.manager.close()
    loaded = Job(output_dir, seed=99, **options)
    assert loaded.manager.load_checkpoint() == path
    assert loaded.digest() == expected
    torch.set_rng_state(random_state)
    again = loaded.manager.save_checkpoint(os.path.join(output_dir, "foreground"))
    if loaded.rank == 0:
        assert files_of(again) == files_of(path)
        assert store.verify_checkpoint(path) == []
        assert debris(output_dir) == []
    loaded.manager.close()


@pytest.mark.parametrize("memory", [None, SMALL, "1KB"])
@pytest.mark.parametrize("safetensors", [True, False])
def test_files_equal_a_foreground_save(tmp_path: Path, memory: str | None, safetensors: bool) -> None:
    save_while_training(str(tmp_path), memory, sharded=False, safetensors=safetensors)


@pytest.mark.parametrize("memory", [None, SMALL])
@pytest.mark.parametrize("sharded", [False, True])
def test_files_of_two_ranks_equal_a_foreground_save(tmp_path: Path, memory: str | None, sharded: bool) -> None:
    run_on_ranks(save_while_training, 2, str(tmp_path), memory, sharded)


def test_second_save_waits_for_the_first(tmp_path: Path) -> None:
    job = Job(tmp_path, async_save=True)
    paths = []
    for _ in range(3):
        job.train()
        paths.append(job.save())
    job.manager.close()
    assert [one.path for one in store.find_checkpoints(str(tmp_path / "checkpoints"))] == paths
    assert all(store.verify_checkpoint(path) == [] for path in paths)


def test_retention_counts_background_saves(tmp_path: Path) -> None:
    job = Job(tmp_path, limit=1, async_save=True)
    for _ in range(3):
        job.train()
        path = job.save()
    job.manager.close()
    assert [one.path for one in store.find_checkpoints(str(tmp_path / "checkpoints"))] == [path]


def diverge_in_background(output_dir: str) -> None:
    job = Job(output_dir, async_save=True)
    job.train()
    with torch.no_grad():
        job.model.layer.weight[0, 0] += job.rank
    job.save()
    job.train()
    job.manager.finish_save()


def test_divergence_raises_on_every_rank(tmp_path: Path) -> None:
    outcomes = outcomes_on_ranks(diverge_in_background, 2, str(tmp_path))
    assert [outcome.error_type for outcome in outcomes] == ["ReplicationError"] * 2
    for outcome in outcomes:
        assert "Replication validation failed" in str(outcome.error_message)
        assert "layer.weight: rank 1 differs from rank 0" in str(outcome.error_message)
    assert store.find_checkpoints(str(tmp_path / "checkpoints")) == []


def fail_on_rank_1(output_dir: str) -> list[object]:
    """Fail to write one file on rank 1, with each action after errors."""
    job = Job(output_dir, async_save=True, on_save_error="warn")
    job.train()

    def write(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    patch = pytest.MonkeyPatch()
    if job.rank == 1:
        patch.setattr(planned_file.PlannedFile, "write", write)
    first = job.save()
    finished = job.manager.finish_save()
    patch.undo()
    second = job.save()
    job.manager.close()
    return [bool(first), finished, job.manager.num_save_errors, bool(second)]


def test_failed_save_of_one_rank_warns_on_every_rank(tmp_path: Path) -> None:
    assert run_on_ranks(fail_on_rank_1, 2, str(tmp_path)) == [[True, "", 1, True]] * 2
    assert len(store.find_checkpoints(str(tmp_path / "checkpoints"))) == 1
    assert debris(tmp_path) == []


def test_damaged_background_checkpoint_is_skipped(tmp_path: Path) -> None:
    job = Job(tmp_path, async_save=True)
    paths = []
    for _ in range(2):
        job.train()
        paths.append(job.save())
    job.manager.close()
    damaged = Path(paths[1]) / "optimizer_state.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert any("optimizer_state.pt" in str(problem) for problem in store.verify_checkpoint(paths[1]))
    loaded = Job(tmp_path, seed=99)
    assert loaded.manager.load_checkpoint() == paths[0]
    loaded.manager.close()
