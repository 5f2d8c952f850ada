"""Checkpoint store: atomic commit, replacement, deletion and recovery of checkpoint directories."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointVersionError,
)
from forgather.ml.checkpoint.files import durable
from forgather.ml.checkpoint.files.planned_file import PlannedFile, RawContent
from forgather.ml.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    CheckpointManifest,
    ComponentManifest,
    FileRecord,
    read_manifest,
    utc_now,
)


def commit(path: Path, content: bytes = b"state", step: int | None = None, timestamp: str | None = None) -> None:
    transaction = store.Transaction(str(path), store.new_attempt())
    transaction.begin(len(content))
    files = [
        PlannedFile("needed_state.raw", "needed", RawContent(content)).write(transaction.temporary_path, 0),
        PlannedFile("extra_state.raw", "extra", RawContent(b"extra")).write(transaction.temporary_path, 0),
    ]
    components = {
        "needed": ComponentManifest("needed", "global", [0]),
        "extra": ComponentManifest("extra", "global", [0], required=False),
    }
    transaction.commit(CheckpointManifest(str(path), 1, timestamp or utc_now(), components, step=step, files=files))


def test_newest_checkpoint_is_the_last_committed_for_any_step(tmp_path: Path) -> None:
    for step in (10, 9, 100, 20):
        commit(tmp_path / f"checkpoint-{step}", step=step)
    assert [store.step_of(found.path) for found in store.find_checkpoints(str(tmp_path))] == [10, 9, 100, 20]


def test_clock_set_back_does_not_change_the_newest_checkpoint(tmp_path: Path) -> None:
    future = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    commit(tmp_path / "checkpoint-1", timestamp=future)
    commit(tmp_path / "checkpoint-2")
    assert [store.step_of(found.path) for found in store.find_checkpoints(str(tmp_path))] == [1, 2]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_saving_a_step_again_replaces_it_without_leftovers(
    tmp_path: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(durable, "exchange", lambda first, second: False)
    path = tmp_path / "checkpoint-1"
    commit(path, b"old")
    commit(path, b"new")
    assert (path / "needed_state.raw").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["checkpoint-1"]
    assert store.verify_checkpoint(str(path)) == []


def test_interrupted_replacement_is_completed_by_recovery(tmp_path: Path) -> None:
    commit(tmp_path / "checkpoint-1", b"old")
    commit(tmp_path / "new", b"new")
    attempt = store.new_attempt()
    os.rename(tmp_path / "checkpoint-1", tmp_path / f".old-checkpoint-1-{attempt}")
    os.rename(tmp_path / "new", tmp_path / f".tmp-checkpoint-1-{attempt}")
    assert len(store.recover(str(tmp_path))) > 0
    assert os.listdir(tmp_path) == ["checkpoint-1"]
    assert (tmp_path / "checkpoint-1" / "needed_state.raw").read_bytes() == b"new"


def test_recovery_removes_only_temporary_directories(tmp_path: Path) -> None:
    commit(tmp_path / "checkpoint-1")
    for name in (".tmp-checkpoint-2-0123456789ab", ".trash-checkpoint-0-0123456789ab", "my-notes", ".mine"):
        (tmp_path / name).mkdir()
    store.recover(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [".mine", "checkpoint-1", "my-notes"]


def test_incomplete_directories_are_not_checkpoints(tmp_path: Path) -> None:
    commit(tmp_path / "checkpoint-1")
    commit(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "needed_state.raw").write_bytes(b"stat")
    (tmp_path / "checkpoint-3").mkdir()
    assert [store.step_of(found.path) for found in store.find_checkpoints(str(tmp_path))] == [1]
    with pytest.raises(CheckpointCorruptError, match=r"needed_state\.raw.*5 bytes.*has 4"):
        store.open_checkpoint(str(tmp_path / "checkpoint-2"))
    with pytest.raises(CheckpointCorruptError, match=MANIFEST_NAME):
        store.open_checkpoint(str(tmp_path / "checkpoint-3"))


def test_optional_file_may_be_removed_but_not_changed(tmp_path: Path) -> None:
    commit(tmp_path / "checkpoint-1")
    extra = tmp_path / "checkpoint-1" / "extra_state.raw"
    extra.write_bytes(b"other length")
    with pytest.raises(CheckpointCorruptError, match=r"extra_state\.raw"):
        store.open_checkpoint(str(tmp_path / "checkpoint-1"))
    extra.unlink()
    assert store.open_checkpoint(str(tmp_path / "checkpoint-1")).missing_optional == ["extra_state.raw"]
    assert store.verify_checkpoint(str(tmp_path / "checkpoint-1")) == []


def test_path_that_is_a_file_is_rejected_for_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"
    path.write_text("precious")
    with pytest.raises(NotADirectoryError, match="not a directory"):
        commit(path)
    with pytest.raises(CheckpointError, match="a file, not a checkpoint directory"):
        store.open_checkpoint(str(path))
    assert path.read_text() == "precious"


def test_checkpoint_removed_during_the_search_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        commit(tmp_path / f"checkpoint-{step}", step=step)
    real = store.open_checkpoint

    def open_checkpoint(path: str) -> store.FoundCheckpoint:
        if path.endswith("-1"):
            store.delete_checkpoint(path)
        if path.endswith("-2"):
            os.remove(os.path.join(path, MANIFEST_NAME))
            return store.FoundCheckpoint(path, read_manifest(path))
        return real(path)

    monkeypatch.setattr(store, "open_checkpoint", open_checkpoint)
    assert [store.step_of(found.path) for found in store.find_checkpoints(str(tmp_path))] == [3]
    with pytest.raises(CheckpointNotFoundError, match=r"There is no checkpoint at .*: no such directory"):
        real(str(tmp_path / "checkpoint-1"))


def test_files_in_subdirectories_are_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries of subdirectories are fsynced before the commit."""
    synced = []

    def fsync_directory(path: str) -> None:
        synced.append(os.path.basename(path))
        real(path)

    real = durable.fsync_directory
    monkeypatch.setattr(durable, "fsync_directory", fsync_directory)
    path = str(tmp_path / "checkpoint-1")
    transaction = store.Transaction(path, store.new_attempt())
    transaction.begin(1)
    names = ["templates/chat/a.jinja", "templates/b.jinja"]
    files = [PlannedFile(name, "model", RawContent(b"x")).write(transaction.temporary_path, 0) for name in names]
    transaction.commit(
        CheckpointManifest(path, 1, utc_now(), {"model": ComponentManifest("model", "global", [0])}, files=files)
    )
    assert store.verify_checkpoint(path) == []
    temporary = os.path.basename(transaction.temporary_path)
    assert synced[-4:] == ["chat", "templates", temporary, tmp_path.name]


def test_file_write_does_not_recreate_a_removed_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PlannedFile("templates/a.jinja", "model", RawContent(b"x")).write(str(tmp_path / "gone"), 0)
    assert os.listdir(tmp_path) == []


def test_recovery_of_files_leaves_directories_and_user_files_alone(tmp_path: Path) -> None:
    commit(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / ".mine-0123abcd").mkdir()
    (tmp_path / "checkpoint-1" / ".eval_metrics.json-0123abcd").write_text("half")
    (tmp_path / "checkpoint-1" / ".my-notes-20240131").write_text("mine")
    assert len(store.recover(str(tmp_path))) == 1
    assert (tmp_path / "checkpoint-1" / ".mine-0123abcd").is_dir()
    assert (tmp_path / "checkpoint-1" / ".my-notes-20240131").exists()
    assert not (tmp_path / "checkpoint-1" / ".eval_metrics.json-0123abcd").exists()


@pytest.mark.parametrize("name", ["a/b", "", ".hidden", "../up"])
def test_checkpoint_id_must_be_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="checkpoint_id"):
        store.checkpoint_path("out", name)


def test_free_space_is_checked_before_the_first_write(tmp_path: Path) -> None:
    transaction = store.Transaction(str(tmp_path / "checkpoint-1"), store.new_attempt())
    told = r"Not enough space.*needs 1,000,000,000,000,000,000 bytes, [\d,]+ are available"
    with pytest.raises(OSError, match=told), transaction.accounting_for(10**18):
        transaction.begin(10**18)
    assert os.listdir(tmp_path) == []


def test_amending_a_file_keeps_the_checkpoint_verifiable(tmp_path: Path) -> None:
    commit(tmp_path / "checkpoint-1")
    path = str(tmp_path / "checkpoint-1")
    record = FileRecord("eval_metrics.json", 0, "", 0, "metadata")
    for data in (b'{"a": 1}', b'{"a": 2.5}'):
        store.amend_file(path, record, data)
        assert store.verify_checkpoint(path) == []
        assert (tmp_path / "checkpoint-1" / "eval_metrics.json").read_bytes() == data
    assert [one.path for one in read_manifest(path).files].count("eval_metrics.json") == 1


class TestManifest:
    def manifest(self) -> CheckpointManifest:
        component = ComponentManifest("model", "replicated", [0], [0, 1], None, 10, "ab", {"note": 1})
        return CheckpointManifest("somewhere", 2, utc_now(), {"model": component}, step=7, metadata={"a": [1]})

    def test_manifest_round_trips(self, tmp_path: Path) -> None:
        manifest = self.manifest()
        assert CheckpointManifest.from_dict(manifest.to_dict()) == manifest
        manifest.save(str(tmp_path / "manifest.json"))
        assert CheckpointManifest.load(str(tmp_path / "manifest.json")) == manifest

    def test_timestamp_has_utc_offset_and_json_is_indented(self, tmp_path: Path) -> None:
        self.manifest().save(str(tmp_path / "manifest.json"))
        text = (tmp_path / "manifest.json").read_text()
        assert datetime.fromisoformat(json.loads(text)["timestamp"]).utcoffset() == timedelta(0)
        assert text.startswith('{\n  "')

    def test_unknown_manifest_keys_are_ignored(self, tmp_path: Path) -> None:
        path = tmp_path / "manifest.json"
        self.manifest().save(str(path))
        path.write_text(json.dumps({**json.loads(path.read_text()), "colour": "blue"}))
        assert CheckpointManifest.load(str(path), sealed=True) == CheckpointManifest.load(str(path))

    def test_newer_format_is_rejected_with_the_fix(self, tmp_path: Path) -> None:
        path = tmp_path / "manifest.json"
        self.manifest().save(str(path))
        path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": FORMAT_VERSION + 1}))
        with pytest.raises(CheckpointVersionError, match=r"format version 2.*Update forgather"):
            CheckpointManifest.load(str(path))

    @pytest.mark.parametrize(
        "path", ["/etc/passwd", "../up.pt", "a/../../up.pt", "a//b", "./a", "a/", ".", "", 7, "a\0"]
    )
    def test_file_path_outside_the_checkpoint_is_rejected(self, tmp_path: Path, path: str) -> None:
        manifest = self.manifest()
        manifest.files = [FileRecord(path, 1, "ab", 0, "model")]
        manifest.save(str(tmp_path / MANIFEST_NAME))
        with pytest.raises(CheckpointCorruptError, match=f"{MANIFEST_NAME} is damaged: manifest.files.0.path"):
            read_manifest(str(tmp_path))

    def test_bit_flip_in_any_byte_is_detected(self, tmp_path: Path) -> None:
        path = tmp_path / "manifest.json"
        manifest = self.manifest()
        manifest.save(str(path))
        intact = path.read_bytes()
        for position in range(len(intact)):
            damaged = bytearray(intact)
            damaged[position] ^= 1 << (position % 8)
            path.write_bytes(damaged)
            try:
                loaded = CheckpointManifest.load(str(path), sealed=True)
            except (CheckpointCorruptError, CheckpointVersionError):
                continue
            pytest.fail(f"bit flip at {position} ({intact[position : position + 20]!r}) passed: {loaded}")
