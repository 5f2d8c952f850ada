"""Damage to any verified file of a checkpoint is detected, named, and survived by auto-resume."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointError
from forgather.ml.distributed import Peers
from tests.support.faults.job import Job
from tests.support.ranks import run_on_ranks
from tests.support.sampling import sampled

MANIFEST = "checkpoint_manifest.json"
# Users may delete the state of an optional component to start it fresh. Metadata and metrics are not needed to resume.
MAY_BE_MISSING = ("notes_state_rank_0.pt", "checkpoint_metadata.json", "eval_metrics.json")
FILES = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "optimizer_state.pt",
    "trainer_state.pt",
    "node_state_node_0.pt",
    "group_state_group_everyone_0.pt",
    "dataset_state_rank_0.pt",
    "notes_state_rank_0.pt",
    "rng_state_rank_0.pt",
    "checkpoint_metadata.json",
    "eval_metrics.json",
    MANIFEST,
]
# Users edit the metrics, so their size and checksum are not verified.
VERIFIED = [name for name in FILES if name != "eval_metrics.json"]
# Files of other components are read like those of the optimizer and of the random state.
SAMPLE = [name for name in VERIFIED if not name.startswith(("notes", "group", "node", "dataset", "trainer"))]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output directory with two checkpoints."""
    output_dir = tmp_path_factory.mktemp("pristine")
    job = Job(output_dir)
    for loss in (0.5, 0.25):
        job.train()
        job.manager.set_eval_metrics({"loss": loss})
        job.save()
    job.manager.close()
    return output_dir


@pytest.fixture
def output_dir(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "output"))


@pytest.fixture
def newest(output_dir: Path) -> Path:
    return output_dir / "checkpoints" / "checkpoint-2"


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def positions(size: int) -> list[int]:
    """Return positions in the length and header, the middle, and the end, where archives have their directory."""
    return sorted({0, 7, 9, size // 4, size // 2, 3 * size // 4, size - 12, size - 1})


def damages(content: bytes) -> Iterator[bytes]:
    size = len(content)
    # The manifest's last byte is a newline. Cutting only this byte would not change its content.
    yield from (content[: size - 2], content[: size // 2], b"", content + b"\0")
    for number, position in enumerate(positions(size)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << number
        yield bytes(flipped)


def load(output_dir: Path, path: Path | None = None) -> tuple[str | None, Job]:
    job = Job(output_dir, seed=99)
    try:
        return job.manager.load_checkpoint(None if path is None else str(path)), job
    finally:
        job.manager.close()


def check_detected(output_dir: Path, newest: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    problems = store.verify_checkpoint(str(newest))
    assert any(name in problem for problem in problems), problems
    with pytest.raises(CheckpointCorruptError, match=name):
        load(output_dir, newest)
    caplog.clear()
    path, job = load(output_dir)
    assert path == str(output_dir / "checkpoints" / "checkpoint-1")
    assert job.state.global_step == 1
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(str(newest) in warning and name in warning for warning in warnings), warnings


def test_checkpoint_has_exactly_the_listed_files(newest: Path) -> None:
    assert sorted(entry.name for entry in newest.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", sampled(VERIFIED, SAMPLE))
def test_damaged_content_is_named_and_falls_back_to_older(
    name: str, output_dir: Path, newest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = (newest / name).read_bytes()
    for damaged in damages(original):
        (newest / name).write_bytes(damaged)
        check_detected(output_dir, newest, name, caplog)
        (newest / name).write_bytes(original)
    assert store.verify_checkpoint(str(newest)) == []


def test_bit_flip_in_a_tensor_name_is_damage(output_dir: Path, newest: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a misfit of the model it would stop auto-resume, and no older checkpoint would be tried."""
    for name in FILES[:2]:
        position = (newest / name).read_bytes().index(b".weight") + 1
        flip(newest / name, position)
        check_detected(output_dir, newest, name, caplog)
        flip(newest / name, position)


@pytest.mark.parametrize("stray", ["pytorch_model.bin.index.json", "model.safetensors", "other.txt"])
def test_file_missing_from_the_manifest_is_ignored(stray: str, output_dir: Path, newest: Path) -> None:
    (newest / stray).write_bytes(b"stray")
    assert load(output_dir)[0] == str(newest)


@pytest.mark.parametrize("name", [name for name in FILES if name not in MAY_BE_MISSING])
def test_missing_file_is_named_and_falls_back_to_older(
    name: str, output_dir: Path, newest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (newest / name).unlink()
    check_detected(output_dir, newest, name, caplog)


@pytest.mark.parametrize("name", MAY_BE_MISSING)
def test_missing_optional_file_is_named_in_a_warning(
    name: str, output_dir: Path, newest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (newest / name).unlink()
    for path in (newest, None):
        caplog.clear()
        assert load(output_dir, path)[0] == str(newest)
        assert any(name in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


def pairs() -> Iterator[tuple[str, str]]:
    others = [name for name in VERIFIED if name != MANIFEST]
    yield from zip(others, others[1:] + others[:1], strict=True)


@pytest.mark.parametrize(("first", "second"), sampled(pairs(), list(pairs())[::3]))
def test_swapped_files_are_detected(
    first: str, second: str, output_dir: Path, newest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = (newest / first).read_bytes()
    (newest / first).write_bytes((newest / second).read_bytes())
    (newest / second).write_bytes(content)
    problems = "\n".join(store.verify_checkpoint(str(newest)))
    assert first in problems
    assert second in problems
    with pytest.raises(CheckpointCorruptError):
        load(output_dir, newest)
    assert load(output_dir)[0] == str(output_dir / "checkpoints" / "checkpoint-1")


@pytest.mark.parametrize("name", sampled(VERIFIED, VERIFIED[::3]))
def test_file_of_an_older_checkpoint_is_detected(
    name: str, output_dir: Path, newest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = newest.parent / "checkpoint-1" / name
    if older.read_bytes() == (newest / name).read_bytes():
        assert name in ("config.json", "model.safetensors.index.json", "checkpoint_metadata.json") or "_state_" in name
        return
    shutil.copyfile(older, newest / name)
    if name == MANIFEST:
        # The older manifest is intact, but does not match these files.
        assert store.verify_checkpoint(str(newest)) != []
        with pytest.raises(CheckpointCorruptError):
            load(output_dir, newest)
    else:
        check_detected(output_dir, newest, name, caplog)


def test_bit_flips_across_the_manifest_are_detected(output_dir: Path, newest: Path) -> None:
    path = newest / MANIFEST
    original = path.read_bytes()
    unnoticed = []
    for position in range(0, len(original), 11):
        flip(path, position, bit=position % 8)
        try:
            store.open_checkpoint(str(newest))
            unnoticed.append(position)
        except CheckpointError as error:
            assert MANIFEST in str(error) or "format version" in str(error)
        path.write_bytes(original)
    assert unnoticed == []


def test_resume_raises_when_all_checkpoints_are_damaged(output_dir: Path, newest: Path) -> None:
    for step in (1, 2):
        flip(newest.parent / f"checkpoint-{step}" / "optimizer_state.pt", 300)
    with pytest.raises(CheckpointCorruptError, match="optimizer_state"):
        load(output_dir)


def test_edited_metrics_are_not_damage(output_dir: Path, newest: Path) -> None:
    for text in ('{"loss": 0.125, "note": "measured again"}', "{}"):
        (newest / "eval_metrics.json").write_text(text)
        assert store.verify_checkpoint(str(newest)) == []
        assert load(output_dir)[0] == load(output_dir, newest)[0] == str(newest)


def test_invalid_metrics_fail_verification_but_not_resume(output_dir: Path, newest: Path) -> None:
    (newest / "eval_metrics.json").write_text("0.125 or so")
    assert ["eval_metrics.json" in problem for problem in store.verify_checkpoint(str(newest))] == [True]
    assert load(output_dir)[0] == load(output_dir, newest)[0] == str(newest)


@pytest.mark.parametrize(("name", "step"), [("eval_metrics.json", 4), ("config.json", 3)])
def test_training_continues_beside_a_damaged_checkpoint(output_dir: Path, newest: Path, name: str, step: int) -> None:
    """Retention at the next save looks at all checkpoints."""
    (newest / name).write_bytes(b"#" * (newest / name).stat().st_size)
    job = Job(output_dir, limit=1)
    job.manager.load_checkpoint()
    job.train(2)
    path = job.save()
    job.manager.close()
    assert store.verify_checkpoint(path) == []
    assert sorted(os.listdir(newest.parent)) == [f"checkpoint-{step}"]


def train_on_two_ranks(output_dir: str) -> None:
    job = Job(output_dir)
    for _ in range(2):
        job.train()
        job.save()
    job.manager.close()


def resume_on_two_ranks(output_dir: str) -> tuple[str | None, int, str]:
    """Return the auto-resumed path and step, and the error of an explicit load of the damaged checkpoint."""
    job = Job(output_dir, seed=99)
    path = job.manager.load_checkpoint()
    step = job.state.global_step
    try:
        job.manager.load_checkpoint(os.path.join(output_dir, "checkpoints", "checkpoint-2"))
        error = ""
    except CheckpointCorruptError as damage:
        error = str(damage)
    job.manager.close()
    Peers.world().gather(None)
    return path, step, error


@pytest.mark.parametrize("name", ["dataset_state_rank_1.pt", "rng_state_rank_1.pt", "notes_state_rank_1.pt"])
def test_damage_on_one_rank_sends_all_ranks_to_the_older_checkpoint(name: str, tmp_path: Path) -> None:
    run_on_ranks(train_on_two_ranks, 2, str(tmp_path))
    flip(tmp_path / "checkpoints" / "checkpoint-2" / name, 200)
    for path, step, error in run_on_ranks(resume_on_two_ranks, 2, str(tmp_path)):
        assert path == str(tmp_path / "checkpoints" / "checkpoint-1")
        assert step == 1
        assert name in error
        assert "rank 1" in error
