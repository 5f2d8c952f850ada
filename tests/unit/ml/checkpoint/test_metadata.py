"""`checkpoint_metadata.json`: valid content is read, and anything else is damage reported by file name."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback

from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointLoadError, CheckpointSaveError
from forgather.ml.checkpoint.metadata import METADATA_NAME, CheckpointMetadata
from forgather.ml.checkpoint.retention import BestCheckpoints
from forgather.ml.trainer.callbacks import DefaultMetrics, EarlyStopping

FINE: dict[str, Any] = {
    "best_checkpoints": [["checkpoint-3", 0.5], ["checkpoint-1", 1]],
    "best_metric_key": "eval_loss",
    "callbacks": {"EarlyStopping": {"0": {"best": 0.5, "best_step": 3, "num_without_improvement": 1}}},
}


def write(directory: Path, content: Any) -> str:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (directory / METADATA_NAME).write_bytes(data)
    return str(directory)


def test_metadata_round_trips(tmp_path: Path) -> None:
    best = BestCheckpoints([("/out/checkpoints/checkpoint-3", 0.5)], "loss")
    metadata = CheckpointMetadata.of(best, [{"a": {"x": 1}}, {"a": {"x": 2}}])
    assert CheckpointMetadata.read(write(tmp_path, metadata.to_bytes())) == metadata


def test_missing_metadata_file_gives_defaults(tmp_path: Path) -> None:
    assert CheckpointMetadata.read(str(tmp_path)) == CheckpointMetadata()


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    assert CheckpointMetadata.read(write(tmp_path, {**FINE, "added": 1})).best_metric_key == "eval_loss"


WRONG: list[Any] = [
    b"",
    b"{",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"callbacks": {}, "callbacks": {}}',
    [],
    "text",
    None,
    {},
    *({key: value for key, value in FINE.items() if key != lacking} for lacking in FINE),
    {**FINE, "best_checkpoints": None},
    {**FINE, "best_checkpoints": {}},
    {**FINE, "best_checkpoints": [["checkpoint-3"]]},
    {**FINE, "best_checkpoints": [["checkpoint-3", "0.5"]]},
    {**FINE, "best_checkpoints": [["checkpoint-3", True]]},
    {**FINE, "best_checkpoints": [["checkpoint-3", 2**70]]},
    {**FINE, "best_checkpoints": [["checkpoint-3", None]]},
    {**FINE, "best_checkpoints": [[3, 0.5]]},
    {**FINE, "best_checkpoints": [["checkpoint-3", 0.5, 1]]},
    *({**FINE, "best_checkpoints": [[name, 0.5]]} for name in ("", ".", "..", "../x", "/etc", "a/b", ".hidden", "a\0")),
    {**FINE, "best_metric_key": 3},
    {**FINE, "best_metric_key": ["loss"]},
    {**FINE, "callbacks": []},
    {**FINE, "callbacks": {"a": []}},
    {**FINE, "callbacks": {"a": {"first": 1}}},
    {**FINE, "callbacks": {"a": {"-1": 1}}},
    {**FINE, "callbacks": {"a": {"٣": 1}}},
]


@pytest.mark.parametrize("content", WRONG)
def test_malformed_content_is_damage(tmp_path: Path, content: Any) -> None:
    path = write(tmp_path, content)
    with pytest.raises(CheckpointCorruptError, match=METADATA_NAME):
        CheckpointMetadata.read(path)


def test_oversized_file_is_damage(tmp_path: Path) -> None:
    with open(tmp_path / METADATA_NAME, "wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(CheckpointCorruptError, match=METADATA_NAME):
        CheckpointMetadata.read(str(tmp_path))


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "dangling", "device"])
def test_only_a_regular_file_is_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / METADATA_NAME
    (tmp_path / "other.json").write_text("{}")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to({"link": tmp_path / "other.json", "dangling": tmp_path / "none", "device": "/dev/zero"}[kind])
    with pytest.raises(CheckpointCorruptError, match=METADATA_NAME):
        CheckpointMetadata.read(str(tmp_path))


# --- callbacks


def states(**by_name: Any) -> CheckpointMetadata:
    return CheckpointMetadata(callbacks={name: {"0": state} for name, state in by_name.items()})


def test_one_bad_callback_state_leaves_all_callbacks_unchanged() -> None:
    first, second = EarlyStopping(), DefaultMetrics()
    before = first.state_dict(), second.state_dict()
    good = {"best": 0.5, "best_step": 3, "num_without_improvement": 1}
    damaged = states(EarlyStopping=good, DefaultMetrics={"last_log_step": "x"})
    for act in (damaged.check_callbacks, damaged.restore_callbacks):
        with pytest.raises(CheckpointLoadError, match=r"callbacks\.DefaultMetrics\.last_log_step.*train without"):
            act([first, second], 0)
    assert (first.state_dict(), second.state_dict()) == before
    states(EarlyStopping=good, DefaultMetrics={"last_log_step": 3}).restore_callbacks([first, second], 0)
    assert first.state_dict() == good


class OwnState(EarlyStopping):
    """Callback that overrides the state of its base class."""

    kept: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state_dict: Any) -> None:
        self.kept = state_dict["kept"]


def test_overridden_callback_state_is_not_checked_by_the_base_schema() -> None:
    callback = OwnState()
    states(OwnState={"kept": "text"}).restore_callbacks([callback], 0)
    assert callback.kept == "text"


def test_exported_state_sets_only_exported_attributes() -> None:
    callback = EarlyStoppingCallback()
    name = type(callback).__name__
    states(**{name: {"early_stopping_patience_counter": 2}}).restore_callbacks([callback], 0)
    assert callback.early_stopping_patience_counter == 2
    for hostile in ({"on_evaluate": 1}, [], "text"):
        with pytest.raises(CheckpointLoadError, match=rf"callbacks\.{name}"):
            states(**{name: hostile}).restore_callbacks([callback], 0)
    assert callable(callback.on_evaluate)


class Holds:
    """Callback with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


def written(*callbacks: Any) -> bytes:
    return CheckpointMetadata.of(BestCheckpoints(), [CheckpointMetadata.states_of(callbacks)]).to_bytes()


def test_nan_and_infinity_round_trip_through_valid_json(tmp_path: Path) -> None:
    state = {"a": math.nan, "b": [math.inf, (1.5, {"c": -math.inf})], "__float__": "text"}
    data = written(Holds(state))
    json.loads(data, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    (tmp_path / METADATA_NAME).write_bytes(data)
    restored = Holds()
    CheckpointMetadata.read(str(tmp_path)).restore_callbacks([restored], 0)
    assert repr(restored.state) == repr({**state, "b": [math.inf, [1.5, {"c": -math.inf}]]})


def test_bare_nan_and_infinity_of_older_checkpoints_are_read(tmp_path: Path) -> None:
    data = {**FINE, "callbacks": {"Holds": {"0": {"best": math.inf, "last": [math.nan]}}}}
    (tmp_path / METADATA_NAME).write_text(json.dumps(data))
    restored = Holds()
    CheckpointMetadata.read(str(tmp_path)).restore_callbacks([restored], 0)
    assert repr(restored.state) == "{'best': inf, 'last': [nan]}"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": [1, {2: math.nan}]}, r"Holds\.a\[1\] has the key 2 of type int"),
        ({"a": {"b": torch.zeros(2)}}, r"Holds\.a\.b is of type Tensor"),
        ({"a": {None: 1}}, r"Holds\.a has the key None of type NoneType"),
    ],
)
def test_unsupported_state_is_named(state: Any, said: str) -> None:
    with pytest.raises(CheckpointSaveError, match=said):
        written(Holds(state))


def test_weight_decay_groups_value_is_checked(tmp_path: Path) -> None:
    for value, expected in (("auto", "auto"), (None, "all")):
        data = FINE if value is None else {**FINE, "weight_decay_groups": value}
        (tmp_path / METADATA_NAME).write_text(json.dumps(data))
        assert CheckpointMetadata.read(str(tmp_path)).weight_decay_groups == expected
    (tmp_path / METADATA_NAME).write_text(json.dumps({**FINE, "weight_decay_groups": ["auto"]}))
    with pytest.raises(CheckpointCorruptError, match="weight_decay_groups"):
        CheckpointMetadata.read(str(tmp_path))
