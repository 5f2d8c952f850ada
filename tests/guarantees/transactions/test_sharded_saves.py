"""Saves of FSDP2 ranks that fail, and damaged shard files: the same error on all ranks, and the last good checkpoint."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointSaveError
from forgather.ml.distributed import Peers
from forgather.ml.trainer.fsdp2 import FSDP2Trainer
from tests.support.data_parallel import fsdp2_trainer
from tests.support.faults.job import debris
from tests.support.faults.save_failures import limited_file_size
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, saved_steps, tiny_llama, token_samples
from tests.support.tiny_parallel import captured_logs

LIMIT_BYTES = 4 * 1024


def build(output_dir: Path, *callbacks: Any, **settings: Any) -> FSDP2Trainer[Any]:
    defaults = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "momentum": 0.9, "save_total_limit": 3}
    return fsdp2_trainer(output_dir, tiny_llama, token_samples(40), *callbacks, **{**defaults, **settings})


def save_on_a_full_disk(output_dir: Path, troubled: tuple[int, ...]) -> str:
    """Save well at step 2; at step 4, writes of some ranks stop half-way."""
    build(output_dir, max_steps=2).train()
    trainer = build(output_dir, save_strategy="no")
    trainer.train()
    limited = dist.get_rank() in troubled
    with limited_file_size(LIMIT_BYTES) if limited else nullcontext(), pytest.raises(CheckpointSaveError) as error:
        trainer.save_checkpoint()
    left_over = Peers.world().gather(debris(output_dir))
    assert not any(left_over), left_over
    # The ranks are still in step: the next save succeeds.
    trainer.save_checkpoint()
    return str(error.value)


@pytest.mark.parametrize("troubled", [(0,), (1,), (0, 1)])
def test_full_disk_of_one_rank_fails_the_save_on_all_ranks(troubled: tuple[int, ...], tmp_path: Path) -> None:
    first, second = run_on_ranks(save_on_a_full_disk, 2, tmp_path, troubled)
    assert first == second
    assert f"rank {troubled[0]} failed" in first and "File too large" in first
    assert saved_steps(tmp_path) == [2, 4]
    for step in (2, 4):
        assert store.verify_checkpoint(str(tmp_path / "checkpoints" / f"checkpoint-{step}")) == []


def resume_damaged(output_dir: Path, name: str) -> tuple[list[int], list[str], str]:
    """Resume with and without the path of a checkpoint with a damaged file."""
    recorder = Recorder()
    with captured_logs() as lines:
        build(output_dir, recorder, max_steps=5, save_strategy="no", resume_from_checkpoint=True).train()
    named = build(output_dir, resume_from_checkpoint=str(output_dir / "checkpoints" / "checkpoint-4"), max_steps=5)
    with pytest.raises(CheckpointCorruptError) as error:
        named.train()
    return recorder.steps("on_step_end"), [line for line in lines if name in line], str(error.value)


def save_twice(output_dir: Path) -> list[str]:
    build(output_dir).train()
    Peers.world().gather(None)
    folder = output_dir / "checkpoints" / "checkpoint-4"
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".pt", ".safetensors"))


def test_damaged_byte_in_a_shard_file_is_found_and_auto_resume_falls_back(tmp_path: Path) -> None:
    pristine = tmp_path / "pristine"
    names = run_on_ranks(save_twice, 2, pristine)[0]
    sharded = [name for name in names if name.startswith(("model-", "optimizer"))]
    assert len(sharded) == 4, "two weight files and two files of moments"
    for name in sharded:
        output_dir = Path(shutil.copytree(pristine, tmp_path / name))
        path = output_dir / "checkpoints" / "checkpoint-4" / name
        content = bytearray(path.read_bytes())
        content[len(content) * 2 // 3] ^= 4
        path.write_bytes(content)
        results = run_on_ranks(resume_damaged, 2, output_dir, name)
        for steps, _, error in results:
            assert steps == [3, 4, 5], "from the checkpoint before"
            assert name in error and "damaged" in error
        assert any(warnings for _, warnings, _ in results), "a warning names the file"
