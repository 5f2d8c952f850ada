"""Rendezvous of launchers: the state in the store is signed JSON, and nothing else in it is believed or unpickled."""

import base64
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from forgather._job_secret import SECRET_VARIABLE
from forgather.cli.launch import elastic_meeting
from forgather.cli.launch.elastic_meeting import ElasticMeeting
from forgather.cli.launch.node_meeting import NodeMeeting, NumberedMeeting, wait_in_thread
from forgather.cli.launch.sealed_state import SealedState
from tests.support.launch import free_port

KEY = "forgather/rendezvous"


class Bomb:
    """Runs code when somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return Path.touch, (self._path,)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(SECRET_VARIABLE, "a secret that the nodes share")
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    yield


def meeting(endpoint: str, node_rank: int, nodes: tuple[int, int] = (1, 2)) -> ElasticMeeting:
    return ElasticMeeting(endpoint, *nodes, node_rank, node_wait=0, node_timeout=20)


def closes(one: ElasticMeeting) -> bool:
    time.sleep(0.1)
    return one.is_closed()


def test_rendezvous_survives_forged_deleted_and_repeated_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_meeting, "_HEARTBEAT_SECONDS", 1)
    endpoint = f"127.0.0.1:{free_port()}"
    host = meeting(endpoint, 0)
    info = host.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    store = TCPStore("127.0.0.1", int(endpoint.rpartition(":")[2]), is_master=False, wait_for_workers=False)
    first = store.get(KEY)
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    members = host.members
    assert members
    # Every question below reads the store.
    host._handler._state_holder._cache_duration = 0  # type: ignore[union-attr]
    # Another job of the same user, with the same secret, that has ended after many rounds.
    elsewhere = meeting(f"127.0.0.1:{free_port()}", 0)
    elsewhere.next_rendezvous()
    state: Any = elsewhere._handler._state_holder  # type: ignore[union-attr]
    for _ in range(50):
        state.mark_dirty()
        state.sync()
    elsewhere.shutdown()
    ended = elsewhere._server.get(KEY)  # type: ignore[union-attr]
    for forged in (bomb, base64.b64encode(bomb), b"", b"{}", b"x" * 1_000_000, first[:-1], first, ended):
        store.set(KEY, forged)  # type: ignore[arg-type]
        # Also the name under which torch's own handler keeps its pickle.
        store.set("torch.rendezvous.forgather", base64.b64encode(bomb))  # type: ignore[arg-type]
        assert host.num_nodes_waiting() == 0 and not host.is_closed()
        assert host.members == members
    store.delete_key(KEY)
    assert host.num_nodes_waiting() == 0 and host.members == members
    # A node that joins finds the state that the host has written again.
    joining = meeting(endpoint, 1)
    other = SealedState(store, b"another secret")
    assert other.get_state() is None or pickle.loads(other.get_state()[0]).participants == {}  # type: ignore[index]
    store.wait([KEY])
    assert joining.num_missing() is None
    joining._handler = joining._connected()
    assert joining.num_nodes_waiting() == 0 and joining.members == members
    assert not (tmp_path / "ran").exists()
    host.shutdown()
    # A node looks at most once a second.
    assert any(closes(joining) for _ in range(100))


def test_node_with_another_secret_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    first = NumberedMeeting(endpoint, 2, 0)
    monkeypatch.setenv(SECRET_VARIABLE, "not what the other node has")
    second = NumberedMeeting(endpoint, 2, 1)
    stores = [one._connected(1e12) for one in (first, second)]
    for number in (1, 2):
        for one, store in zip((first, second), stores, strict=True):
            one._missing = one._show_presence(one.sealed(store), number)
    assert first.num_missing() == 1 and second.num_missing() is None
    for one in (first, second):
        remedy = one.remedy_for_secrets()
        assert "not signed with the secret of this node (FORGATHER_JOB_SECRET)" in remedy
        assert "to the same text on all nodes" in remedy


def test_answer_to_another_job_is_no_answer() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    host, node = NumberedMeeting(endpoint, 3, 0), NumberedMeeting(endpoint, 3, 2)
    store = host.sealed(host._connected(1e12))
    store.set("missing", json.dumps({"missing": 0, "host": "of another job", "marks": ["a", "b"]}))
    assert node._show_presence(node.sealed(node._connected(1e12)), 1) == 1


def test_nodes_with_one_secret_meet(tmp_path: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    found: list[tuple[int, int]] = []

    def meet(one: NodeMeeting) -> None:
        info = one.next_rendezvous()
        info.store.set(f"rank {info.rank}", "hello")
        info.store.wait([f"rank {other}" for other in range(info.world_size)])
        found.append((info.rank, info.world_size))

    nodes = [NumberedMeeting(endpoint, 3, rank) for rank in range(3)]
    threads = [threading.Thread(target=meet, args=(one,)) for one in nodes[1:]]
    for thread in threads:
        thread.start()
    wait_in_thread(lambda: meet(nodes[0]), nodes[0])
    for thread in threads:
        thread.join(30)
    assert sorted(found) == [(0, 3), (1, 3), (2, 3)]
