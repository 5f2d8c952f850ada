"""Hostile checkpoints run no code, corrupt no memory, and neither hang nor exhaust the process."""

import io
import json
import os
import pickle
import resource
import socket
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.cpu_vec_isa  # One of its classes runs the compiler when tested for truth.

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.encoding.codec import TAG, encode_state
from forgather.ml.checkpoint.encoding.state_budget import budget_of
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError
from forgather.ml.checkpoint.files.hashed_io import HashingWriter
from forgather.ml.checkpoint.files.state_files import read_state, write_state
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest
from forgather.ml.trainer.callbacks.early_stopping import EarlyStopping
from tests.support.faults.forked import fork
from tests.support.faults.hostile import change_state, put, seal, trained, trainer_in, with_pickle
from tests.support.sampling import long_search, sampled
from tests.support.tiny_models import TokenModel, quiet_trainer, token_samples


def compiler_class(marker: Path) -> dict[str, Any]:
    flags = f"-wrapper /bin/sh,-c,'touch {marker}'"
    return {
        TAG: "dataclass",
        "class": "torch._inductor.cpu_vec_isa:VecAVX2",
        "fields": {"_arch_flags": flags, "_macro": [], "_dtype_nelements": {}},
    }


@pytest.mark.parametrize("key", ["evaluation_is_pending", "should_epoch_stop", "best_saved_metric"])
def test_unregistered_class_in_trainer_state_is_never_rebuilt(key: str, tmp_path: Path) -> None:
    newest = trained(tmp_path / "run")
    marker = tmp_path / "marker"
    change_state(newest, "trainer_state.pt", lambda state: state.update({key: compiler_class(marker)}))
    with pytest.raises(CheckpointLoadError, match=r"trainer_state\.pt.*VecAVX2.*register_state_class"):
        trainer_in(tmp_path / "run", steps=6).train(resume_from_checkpoint=str(newest))
    assert not marker.exists()


def test_unregistered_class_in_callback_state_is_never_rebuilt(tmp_path: Path) -> None:
    def trainer() -> Any:
        return quiet_trainer(
            tmp_path / "run",
            TokenModel(),
            token_samples(16),
            EarlyStopping(),
            max_steps=2,
            save_steps=2,
            save_strategy="steps",
            eval_strategy="steps",
            eval_steps=2,
            trainer_options={"eval_dataset": token_samples(4)},
        )

    trainer().train()
    newest, marker = tmp_path / "run" / "checkpoints" / "checkpoint-2", tmp_path / "marker"
    metadata = json.loads((newest / "checkpoint_metadata.json").read_text())
    (states,) = metadata["callbacks"].values()
    states["0"][next(iter(states["0"]))] = compiler_class(marker)
    put(newest, "checkpoint_metadata.json", json.dumps(metadata).encode())
    with pytest.raises(CheckpointLoadError, match=r"checkpoint_metadata\.json.*VecAVX2.*register_state_class"):
        trainer().train(resume_from_checkpoint=str(newest))
    assert not marker.exists()


# --- values of the wrong kind


def first_moment(state: Any) -> tuple[dict[str, Any], torch.Tensor]:
    name = next(name for name, entry in state["state"].items() if entry["exp_avg"].ndim == 2)
    return state["state"][name], state["state"][name]["exp_avg"]


MOMENTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "short": lambda moment: torch.zeros(3),
    "expanded": lambda moment: torch.zeros(1).expand(moment.shape),
    "transposed": lambda moment: torch.zeros(moment.shape[::-1]).t(),
    "larger": lambda moment: torch.zeros(moment.shape[0] + 1, moment.shape[1]),
    "integers": lambda moment: torch.zeros(moment.shape, dtype=torch.int64),
    "sparse": lambda moment: torch.zeros(moment.shape).to_sparse(),
    "text": lambda moment: "moment",
}


@pytest.mark.parametrize("kind", MOMENTS)
def test_malformed_moments_are_rejected(kind: str, tmp_path: Path) -> None:
    newest = trained(tmp_path / "run")

    def change(state: Any) -> None:
        entry, moment = first_moment(state)
        entry["exp_avg"] = MOMENTS[kind](moment)

    change_state(newest, "optimizer_state.pt", change)
    trainer = trainer_in(tmp_path / "run", steps=6)
    with pytest.raises(CheckpointLoadError, match=r"(?s)optimizer_state\.pt.*exp_avg"):
        trainer.train(resume_from_checkpoint=str(newest))


def test_moments_that_share_memory_are_rejected(tmp_path: Path) -> None:
    newest = trained(tmp_path / "run")

    def change(state: Any) -> None:
        entry, _ = first_moment(state)
        entry["exp_avg_sq"] = entry["exp_avg"]

    change_state(newest, "optimizer_state.pt", change)
    with pytest.raises(CheckpointLoadError, match=r"(?s)optimizer_state\.pt.*exp_avg"):
        trainer_in(tmp_path / "run", steps=6).train(resume_from_checkpoint=str(newest))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("evaluation_is_pending", "no"),
        ("evaluation_is_pending", 0),
        ("evaluated_step", -1.5),
        ("best_model_checkpoint", "../../elsewhere"),
        ("best_model_checkpoint", "/etc"),
        ("should_epoch_stop", None),
    ],
)
def test_malformed_trainer_state_is_rejected(key: str, value: Any, tmp_path: Path) -> None:
    newest = trained(tmp_path / "run")
    change_state(newest, "trainer_state.pt", lambda state: state.update({key: value}))
    with pytest.raises(CheckpointLoadError, match=rf"trainer_state\.pt.*trainer\.{key}"):
        trainer_in(tmp_path / "run", steps=6).train(resume_from_checkpoint=str(newest))


# --- what would hang


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


IRREGULAR: dict[str, Callable[[Path], None]] = {
    "fifo": fifo,
    "directory": Path.mkdir,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "socket": listening,
}


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("name", [MANIFEST_NAME, "trainer_state.pt", "model.safetensors", "checkpoint_metadata.json"])
def test_non_regular_file_is_damage(name: str, kind: str, short_tmp: Path) -> None:
    newest = trained(short_tmp / "r")
    (newest / name).unlink()
    IRREGULAR[kind](newest / name)
    assert name in "\n".join(store.verify_checkpoint(str(newest)))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        trainer_in(short_tmp / "r", steps=6).train(resume_from_checkpoint=str(newest))
    output = trainer_in(short_tmp / "r", steps=6).train()
    assert output.global_step == 6


@pytest.fixture
def short_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short temporary directory: the path of a socket has at most 108 bytes."""
    return tmp_path_factory.mktemp("h")


# --- what would exhaust the memory


def inflating() -> bytes:
    """Return an archive with a compressed tensor of 200 MiB."""
    source, target = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.zeros(200 * 2**20, dtype=torch.uint8)}, source)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.namelist():
            new.writestr(entry, old.read(entry))
    return target.getvalue()


def saved(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def doubling() -> list[Any]:
    value: list[Any] = []
    for _ in range(40):
        value = [value, value]
    return value


def wide(kind: str, **parts: Any) -> dict[str, Any]:
    return {TAG: kind, **parts, "data": torch.zeros(1, dtype=torch.uint8).expand(2**32)}


BOMBS: dict[str, Callable[[], bytes]] = {
    "compressed": inflating,
    "expanded bytes": lambda: saved({"a": wide("bytes")}),
    "expanded array": lambda: saved({"a": wide("ndarray", dtype="|u1", shape=(2**32,), order="C")}),
    "repeated bytes": lambda: saved(
        [{TAG: "bytes", "data": one} for one in [torch.zeros(2**20, dtype=torch.uint8)] * 999]
    ),
    "set of a range": lambda: saved({TAG: "set", "items": {TAG: "range", "bounds": (0, 2**40, 1)}}),
    "deque of a range": lambda: saved({TAG: "deque", "maxlen": None, "items": {TAG: "range", "bounds": (0, 2**40, 1)}}),
    "shape of a range": lambda: saved(
        wide("ndarray", dtype="|u1", shape={TAG: "range", "bounds": (0, 2**40, 1)}, order="C")
    ),
    "colliding set": lambda: saved({TAG: "set", "items": [n * (2**61 - 1) for n in range(200_000)]}),
    "colliding dict": lambda: saved(
        {n * (2**61 - 1): None for n in range(50)} | {n * (2**61 - 1): 0 for n in range(9000)}
    ),
    "shared references": lambda: saved(doubling()),
    "repeated encoding": lambda: with_pickle(
        b"\x80\x02](c_codecs\nencode\nq\x00X"
        + struct.pack("<I", 10**6)
        + b"a" * 10**6
        + b"q\x01X\x06\x00\x00\x00latin1q\x02\x86R"
        + b"h\x00h\x01h\x02\x86R" * 20_000
        + b"e."
    ),
    "repeated integer": lambda: saved([{TAG: "int", "hex": one} for one in ["f" * 10**6] * 20_000]),
    "repeated text": lambda: saved(
        [{TAG: "numpy_scalar", "dtype": "<U1000000", "value": one} for one in ["f" * 10**6] * 9_000]
    ),
    "random range": lambda: saved({TAG: "random", "state": (2, {TAG: "range", "bounds": (0, 2**40, 1)}, None)}),
    "size of a tensor": lambda: with_pickle(b"\x80\x02ctorch\nSize\n" + b"N\x85R."),
    "text of a tag": lambda: saved({TAG: doubling()}),
    "parts of a tag": lambda: saved(
        [one for one in [{TAG: "set", **{str(n): 0 for n in range(60_000)}}] for _ in range(99)]
    ),
    "empty lists": lambda: with_pickle(b"\x80\x02](" + b"]" * 4_000_000 + b"e."),
    "bytearray": lambda: with_pickle(pickle.dumps(bytearray, 2)[:-1] + b"J" + struct.pack("<i", 2**31 - 1) + b"\x85R."),
    "tensor": lambda: with_pickle(b"\x80\x02ctorch\nTensor\nJ" + struct.pack("<i", 2**31 - 1) + b"\x85R."),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_decoding_stays_within_its_memory_budget(kind: str, tmp_path: Path) -> None:
    """Runs in a child with memory and time limits. The budget is four times the file size plus 64 MiB."""
    path = tmp_path / "state.pt"
    path.write_bytes(BOMBS[kind]())

    def read() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        # The allocator also reserves address space for another thread, and never touches it.
        limit = pages * resource.getpagesize() + budget_of(path.stat().st_size) + 96 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        with pytest.raises(CheckpointError, match=r"state\.pt"):
            read_state(str(path))

    assert os.waitstatus_to_exitcode(os.waitpid(fork(read), 0)[1]) == 0


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": ' + b" " * (65 * 2**20) + b"1}",
        b"[" * 1_000_000,
        b"[" + b"[]," * 10_000_000 + b"[]]",
        b'{"format_version": 1, "format_version": 1}',
    ],
    ids=["huge", "deep", "many lists", "twice"],
)
def test_manifest_bomb_is_damage(text: bytes, tmp_path: Path) -> None:
    newest = trained(tmp_path / "run")
    (newest / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match=f"{MANIFEST_NAME} is damaged"):
        store.open_checkpoint(str(newest))
    assert trainer_in(tmp_path / "run", steps=6).train().global_step == 6


SMALL_OBJECTS: dict[str, Callable[[], Any]] = {
    "numbers": lambda: list(range(300, 500_300)),
    "floats": lambda: [n / 7 for n in range(500_000)],
    "texts": lambda: [str(n) for n in range(200_000)],
    "records": lambda: [{"step": n, "loss": n / 7, "rate": n / 3} for n in range(100_000)],
    "empty lists": lambda: [[] for _ in range(200_000)],
    "empty dicts": lambda: [{} for _ in range(200_000)],
    "pairs": lambda: [(n, n + 1) for n in range(200_000)],
    "a set": lambda: set(range(400_000)),
    "int keys": lambda: {n: n for n in range(200_000)},
    "tensors": lambda: [torch.tensor(n) for n in range(20_000)],
    "bytes": lambda: [b"%d" % n for n in range(60_000)],
    "arrays": lambda: [np.arange(3) for _ in range(8_000)],
    "scalars": lambda: [np.float64(n) for n in range(30_000)],
    "deep": lambda: [[[[n]]] for n in range(60_000)],
}


@pytest.mark.parametrize("kind", sampled(SMALL_OBJECTS, ["numbers", "arrays"]))
def test_saved_states_of_small_objects_can_be_read(kind: str, tmp_path: Path) -> None:
    """Small objects take much more memory than their files, but no saved state is rejected as a bomb."""
    state = SMALL_OBJECTS[kind]()
    path = str(tmp_path / "state.pt")
    with HashingWriter(path) as writer:
        write_state(writer, encode_state(state))
    restored = read_state(path)
    assert len(restored) == len(state) and type(restored) is type(state)
    if kind not in ("tensors", "arrays"):
        assert restored == state


@long_search
def test_long_log_history_can_be_read(tmp_path: Path) -> None:
    """A log history of 150,000 records takes more memory than its file, and is no bomb."""
    newest = trained(tmp_path / "run", save_total_limit=1)
    trainer = trainer_in(tmp_path / "run", steps=6)
    trainer.load_checkpoint(str(newest))
    history = [{"step": number, "loss": number / 7, "rate": number / 3} for number in range(150_000)]
    trainer.state.log_history = history
    path = trainer.save_checkpoint()
    again = trainer_in(tmp_path / "run", steps=6)
    again.load_checkpoint(path)
    assert again.state.log_history == history
    again._close_after(None, None)
    trainer._close_after(None, None)


def test_start_reads_each_manifest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "run", steps=8, save_total_limit=None)
    reads: list[str] = []
    load = CheckpointManifest.load.__func__  # type: ignore[attr-defined]

    def counted(cls: Any, path: str, sealed: bool = False) -> CheckpointManifest:
        reads.append(path)
        manifest: CheckpointManifest = load(cls, path, sealed)
        return manifest

    monkeypatch.setattr(CheckpointManifest, "load", classmethod(counted))
    from forgather.ml.checkpoint import manifest as manifests

    manifests._read.clear()
    # A manifest that was just written is read again, because a change within a clock tick would go unnoticed.
    time.sleep(0.05)
    trainer_in(tmp_path / "run", steps=8, save_total_limit=None).train()
    assert len(reads) == len(set(reads)) == 4


def test_checksum_is_checked_before_the_content(tmp_path: Path) -> None:
    newest = trained(tmp_path / "run")
    content = (newest / "trainer_state.pt").read_bytes()
    (newest / "trainer_state.pt").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"trainer_state\.pt is damaged: the file has checksum"):
        trainer_in(tmp_path / "run").train(resume_from_checkpoint=str(newest))
    seal(newest, "trainer_state.pt")
    with pytest.raises(CheckpointError, match=r"trainer_state\.pt was rejected"):
        trainer_in(tmp_path / "run").train(resume_from_checkpoint=str(newest))
