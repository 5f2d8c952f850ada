"""Job secret: made once for a user, readable by nobody else, and a signature under one name only."""

import os
import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistStoreError, TCPStore

from forgather._job_secret import SECRET_VARIABLE, SealedStore, given_secret, hand_to_workers, job_secret, seal, unseal


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    yield tmp_path / "forgather"


def test_secret_is_made_once_and_only_its_owner_can_read_it(folder: Path) -> None:
    assert given_secret() == b""
    first = job_secret()
    assert job_secret() == first and len(first) == 32
    assert [path.name for path in folder.iterdir()] == ["job-secret"]
    assert stat.S_IMODE((folder / "job-secret").stat().st_mode) == 0o600
    assert hand_to_workers() == first == given_secret()
    del os.environ[SECRET_VARIABLE]


@pytest.mark.parametrize("kind", ["readable", "link", "fifo", "short", "not_writable"])
def test_a_file_that_is_no_secret_is_refused(folder: Path, kind: str) -> None:
    path = folder / "job-secret"
    job_secret()
    if kind == "readable":
        path.chmod(0o644)
    elif kind == "short":
        path.write_text("abc\n")
    elif kind == "not_writable":
        path.unlink()
        folder.rmdir()
        folder.write_text("a file where the folder should be")
    else:
        target = path.rename(folder / "other")
        path.symlink_to(target) if kind == "link" else os.mkfifo(path)
    with pytest.raises(ValueError, match=r"chmod 600|FORGATHER_JOB_SECRET|at least 16"):
        job_secret()


def test_variable_comes_before_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "the same text on all nodes")
    assert job_secret() == given_secret() == hand_to_workers()
    assert not folder.exists()


def test_signature_holds_for_one_key_and_one_name() -> None:
    message = seal(b"key", "name", b"content")
    assert unseal(b"key", "name", message) == b"content"
    assert unseal(b"other", "name", message) is None
    assert unseal(b"key", "nam", message) is None
    for position in range(len(message)):
        assert unseal(b"key", "name", message[:position]) is None
        changed = bytes(value ^ (number == position) for number, value in enumerate(message))
        assert unseal(b"key", "name", changed) is None


def test_values_of_strangers_count_as_missing() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, replay = SealedStore(store, b"key", "round 1"), SealedStore(store, b"key", "round 2")
    store.set("ranks", "forged")
    replay.set("verdict", "of another round")
    assert ours.find("ranks") is None and ours.find("verdict") is None and ours.find("missing") is None
    with pytest.raises(DistStoreError, match="not signed with the secret of this job"):
        ours.get("ranks", timedelta(seconds=0.2))
    ours.set("ranks", "0 1")
    ours.wait(["ranks"])
    assert ours.multi_get(["ranks"]) == [b"0 1"] and ours.check(["ranks"]) and not ours.check(["verdict"])
