"""Control of a running job: status, refused requests, hostile clients, and the socket file."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from forgather._control import messages
from forgather._control.address import SOCKET_NAME
from forgather._control.server import Server
from forgather.tools.control import (
    ControlError,
    Evaluation,
    NoAnswerError,
    NoRunningJobError,
    RefusedError,
    Saved,
    connect,
)
from tests.support.control_job import RunningJob, make_trainer, samples, train, until
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import saved_steps

NOBODY = 65534


@pytest.fixture
def job(tmp_path: Path) -> Iterator[RunningJob]:
    with RunningJob(tmp_path / "run") as running:
        yield running


def in_child(work: Callable[[], str]) -> str:
    """Return the result of `work` in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = work()
        except BaseException as error:  # noqa: BLE001 - the parent compares it
            text = repr(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


def speak(path: Path, *parts: bytes) -> str:
    """Send bytes to a socket, and return the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(20)
        client.connect(str(path))
        # The job may hang up before it has read everything.
        with contextlib.suppress(BrokenPipeError):
            for part in parts:
                client.sendall(part)
        answer = b""
        while part := client.recv(65536):
            answer += part
    return answer.decode()


def waiting(work: Callable[[], Any], results: list[Any]) -> threading.Thread:
    def run() -> None:
        try:
            results.append(work())
        except ControlError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def request(command: str, **more: Any) -> bytes:
    return json.dumps({"forgather_control": 1, "command": command, **more}).encode() + b"\n"


# --- answers


def test_status_describes_a_run_that_is_held_inside_a_step(job: RunningJob) -> None:
    job.gate.let_pass(3)
    until(lambda: connect(job.output_dir).status().step == 3)
    until(lambda: connect(job.output_dir).status().phase == "a callback")
    status = connect(job.output_dir).status()
    assert (status.step, status.max_steps, status.world_size, status.trainer) == (3, 8, 1, "Trainer")
    assert (status.loss_step, status.pid, status.output_dir) == (3, os.getpid(), str(job.output_dir))
    assert status.loss is not None and status.loss > 0 and status.checkpoint is None
    (rank,) = status.ranks
    assert (rank.rank, rank.pid, rank.step, rank.phase, rank.stopped) == (0, os.getpid(), 4, "a callback", False)
    assert status.seconds_since_step >= 0


def test_request_waits_for_the_step_and_says_so(job: RunningJob) -> None:
    notes: list[str] = []
    results: list[Any] = []
    thread = waiting(connect(job.output_dir, note=notes.append).save, results)
    with pytest.raises(NoAnswerError, match=r"has not answered within 0\.1 s\. It still"):
        connect(job.output_dir, timeout=0.1).evaluate()
    thread.join(3)
    assert thread.is_alive() and "step 0 is done, rank 0 is in a callback" in notes[0]
    job.gate.let_pass(1)
    thread.join(30)
    assert results == [Saved(1, str(job.output_dir / "checkpoints" / "checkpoint-1"))]


def test_requests_that_the_run_does_not_reach_are_told_its_end(job: RunningJob) -> None:
    job.gate.let_pass(7)
    until(lambda: connect(job.output_dir).status().step == 7)
    evaluated: list[Any] = []
    refused: list[Any] = []
    threads = [waiting(connect(job.output_dir).evaluate, evaluated)]
    # The client is queued when the run begins to end, and its step is the last one.
    until(lambda: job.has_queued(1))
    job.end()
    threads.append(waiting(lambda: connect(job.output_dir), refused))
    for thread in threads:
        thread.join(30)
    assert isinstance(evaluated[0], Evaluation) and evaluated[0].step == 8
    assert isinstance(refused[0], NoRunningJobError) and "No job runs in" in str(refused[0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loging_steps": 3}, "There is no setting 'loging_steps'. Did you mean 'logging_steps'?"),
        ({"learning_rate": 1.0}, "learning_rate cannot be changed during a run: the optimizer"),
        ({"seed": 1}, "seed cannot be changed during a run: it is read when training starts"),
        ({"logging_steps": "ten"}, "logging_steps='ten' has type str, expected int"),
        ({"logging_steps": 0}, "it must be a number of 1 or more"),
        ({"save_strategy": "often"}, "not an interval strategy"),
        ({"save_steps": 10**25}, "it must be at most 2**63 - 1"),
        ({"save_total_limit": 0}, "None keeps all"),
        ({}, "Name a setting"),
    ],
)
def test_setting_is_refused_with_the_reason(job: RunningJob, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError) as refused:
        connect(job.output_dir).set(**values)
    assert message in str(refused.value)


def test_failed_evaluation_is_reported_and_training_continues(tmp_path: Path) -> None:
    class Broken(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("the disk is gone")

    with RunningJob(tmp_path / "run", eval_strategy="no") as job:
        job.trainer.eval_dataset = Broken(samples(4))
        results: list[Any] = []
        thread = waiting(connect(job.output_dir).evaluate, results)
        until(lambda: job.has_queued(1))
        job.end()
        thread.join(30)
    assert "the disk is gone" in str(results[0]) and job.error is None
    assert job.trainer.state.global_step == 8


def test_background_save_is_answered_after_its_commit(tmp_path: Path) -> None:
    with RunningJob(tmp_path / "run", async_save=True, checkpoint_layout="output_dir") as job:
        results: list[Any] = []
        thread = waiting(connect(job.output_dir).save, results)
        until(lambda: job.has_queued(1))
        job.end()
        thread.join(30)
    assert results == [Saved(1, str(job.output_dir / "checkpoint-1"))]
    # The checkpoints lie beside the socket of the next run.
    assert train("single", str(job.output_dir), settings={"checkpoint_layout": "output_dir"}).step == 8


# --- socket file


def test_socket_is_for_its_owner_only(job: RunningJob) -> None:
    path = job.output_dir / SOCKET_NAME
    assert stat.S_ISSOCK(path.lstat().st_mode) and stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert [one.name for one in job.output_dir.glob(".forgather.sock*")] == [SOCKET_NAME]
    job.end()
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_are_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with RunningJob(Path(folder) / "run") as job:
            path = job.output_dir / SOCKET_NAME

            def as_nobody() -> str:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                try:
                    connect(job.output_dir).status()
                except ControlError as error:
                    return str(error)
                return "answered"

            assert "belongs to another user" in in_child(as_nobody)
            # Not only the mode of the file protects the job.
            os.chmod(path, 0o666)
            answer = in_child(lambda: (os.setuid(NOBODY), speak(path, request("stop")))[1])
            assert json.loads(answer) == {"ok": False, "kind": "refused", "error": "This job belongs to another user."}
            assert connect(job.output_dir).status().step == 0


def test_long_paths_work(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 20) / ("long" * 40)
    with RunningJob(folder) as job:
        assert (folder / SOCKET_NAME).exists()
        assert connect(job.output_dir).status().step == 0


def test_socket_of_a_killed_job_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    def be_killed() -> str:
        Server(str(folder), lambda request, client: None, lambda now: None)
        os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    assert in_child(be_killed) == ""
    assert (folder / SOCKET_NAME).exists()
    with pytest.raises(NoRunningJobError, match="is left from a job that was killed"):
        connect(folder)
    with RunningJob(folder):
        assert connect(folder).status().step == 0


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_other_files_in_the_place_of_the_socket_stay(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, target = tmp_path / "run", tmp_path / "target"
    folder.mkdir()
    target.write_text("kept")
    path = folder / SOCKET_NAME
    if kind == "link":
        path.symlink_to(target)
    elif kind == "file":
        path.write_text("kept")
    else:
        path.mkdir()
    assert train("single", str(folder)).ended == "finished"
    assert "forgather control cannot reach this job" in caplog.text and "is not a socket" in caplog.text
    assert path.is_dir() if kind == "folder" else path.read_text() == "kept"
    with pytest.raises(NoRunningJobError, match="is not a socket"):
        connect(folder)


def test_forked_workers_do_not_keep_the_socket_open(job: RunningJob) -> None:
    assert job.trainer.desk is not None and job.trainer.desk._server is not None
    listener = job.trainer.desk._server._listener
    inode = os.readlink(f"/proc/self/fd/{listener.fileno()}")

    def links() -> str:
        found = []
        for name in os.listdir("/proc/self/fd"):
            if os.path.islink(f"/proc/self/fd/{name}"):
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        return " ".join(found)

    assert inode in links()
    assert inode not in in_child(links)
    assert connect(job.output_dir).status().step == 0


def test_argument_switches_the_socket_off(tmp_path: Path) -> None:
    with RunningJob(tmp_path / "run", control_socket=False) as job:
        assert not (job.output_dir / SOCKET_NAME).exists()
        with pytest.raises(NoRunningJobError):
            connect(job.output_dir)
    assert job.trainer.state.global_step == 8


# --- hostile clients


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"\x00\xff\xfe\n", "not a line of JSON"),
        (b"[" * 10000 + b"\n", "not a line of JSON"),
        (b"[]\n", "not an object"),
        (b'{"forgather_control": 99, "command": "status"}\n', "speaks version 1"),
        (request("delete"), "must be one of"),
        (request("set", values=["x"]), "must be one of"),
        (b"x" * 20000, "too long"),
        (b"x" * 20000 + b"\n", "too long"),
        # Much of this is unread when the answer is sent.
        (b"x" * 100000, "too long"),
    ],
)
def test_garbage_is_refused_and_the_job_stays_reachable(job: RunningJob, sent: bytes, message: str) -> None:
    answer = json.loads(speak(job.output_dir / SOCKET_NAME, sent))
    assert answer["kind"] == "refused" and message in answer["error"]
    assert connect(job.output_dir).status().step == 0


def test_silent_slow_and_vanishing_clients_do_not_disturb_others(job: RunningJob) -> None:
    path = str(job.output_dir / SOCKET_NAME)
    clients = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(20)]
    for client in clients:
        client.connect(path)
    clients[0].sendall(b'{"forgather')
    # A request is served also if its client does not wait for the answer.
    clients[1].sendall(request("save"))
    assert b"accepted" in clients[1].recv(4096)
    clients[1].close()
    clients[2].sendall(request("status"))
    clients[2].close()
    assert connect(job.output_dir).status().step == 0
    job.end()
    assert job.error is None and saved_steps(job.output_dir) == [1, 6, 8]
    for client in clients:
        client.close()


def connected(path: Path, number: int, *, sent: bytes = b"") -> list[socket.socket]:
    """Return clients that have connected and sent their bytes."""
    clients = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(number)]
    for client in clients:
        client.settimeout(20)
        client.connect(str(path))
        if sent:
            client.sendall(sent)
    return clients


@pytest.mark.parametrize("command", ["stop", "abort"])
def test_waiting_and_idle_clients_keep_no_command_out(job: RunningJob, command: str) -> None:
    path = job.output_dir / SOCKET_NAME
    waiting_clients = connected(path, 32, sent=request("save"))
    for client in waiting_clients:
        assert b"accepted" in client.recv(4096)
    with pytest.raises(RefusedError, match="32 clients wait for this job already"):
        connect(job.output_dir).evaluate()
    idle = connected(path, 300)
    assert connect(job.output_dir).status().step == 0
    assert getattr(connect(job.output_dir), command)(wait=False) is None
    job.end()
    # Clients that wait stayed, and idle ones made room.
    assert b'"ok"' in waiting_clients[0].recv(4096) and job.trainer.state.global_step == 1
    for client in (*waiting_clients, *idle):
        client.close()


def test_client_that_waits_longest_makes_room_for_more_than_a_hundred_others(job: RunningJob) -> None:
    clients = connected(job.output_dir / SOCKET_NAME, 140, sent=request("stop"))
    assert connect(job.output_dir).status().step == 0
    answer = b"".join(iter(lambda: clients[0].recv(4096), b""))
    assert b"Too many clients wait" in answer
    job.end()
    answer = b"".join(iter(lambda: clients[-1].recv(4096), b""))
    assert b'"ok": true' in answer
    for client in clients:
        client.close()


@pytest.fixture
def stopped_job(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """Control socket in a process that SIGSTOP has stopped, and the pid."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        server = Server(
            str(tmp_path), lambda _, client: server.send(client, messages.success({"ranks": []})), lambda now: None
        )
        os.write(writing, b"!")
        signal.pause()
    os.read(reading, 1)
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    yield tmp_path, child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)


def test_monitor_of_a_stopped_job_is_told_so_at_every_poll(stopped_job: tuple[Path, int]) -> None:
    folder, pid = stopped_job
    for _ in range(40):
        with pytest.raises(NoAnswerError, match=r"has not answered within .* may be stopped \(SIGSTOP\)"):
            connect(folder, timeout=0.02).status()
    os.kill(pid, signal.SIGCONT)
    assert connect(folder).status().ranks == ()


def test_full_queue_of_a_stopped_job_is_explained(stopped_job: tuple[Path, int]) -> None:
    folder, pid = stopped_job
    clients = []
    with contextlib.suppress(BlockingIOError):
        while True:
            clients.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            clients[-1].setblocking(False)
            clients[-1].connect(str(folder / SOCKET_NAME))
    with pytest.raises(NoAnswerError, match=r"does not accept connections.*SIGSTOP"):
        connect(folder, timeout=0.1)
    os.kill(pid, signal.SIGCONT)
    assert connect(folder).status().ranks == ()
    for client in clients:
        client.close()


# --- stacks


def test_stacks_show_where_a_held_run_waits(job: RunningJob) -> None:
    stacks = connect(job.output_dir).stacks()
    assert list(stacks) == [0] and "wait_for_the_test" in stacks[0] and "Thread control" in stacks[0]
    assert connect(job.output_dir).status().step == 0


class Stuck:
    """Callback of rank 1 that waits: in Python, or in C code that keeps the GIL."""

    changes_control = False

    def __init__(self, how: str, folder: Path) -> None:
        self._how = how
        self._folder = folder

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and not state.is_world_process_zero:
            self.stay_here()

    def stay_here(self) -> None:
        (self._folder / "stuck").touch()
        if self._how == "gil":
            ctypes.PyDLL(None).sleep(5)
        until((self._folder / "seen").exists)


def stacks_of_two_ranks(how: str, directory: str) -> Any:
    folder = Path(directory)
    trainer = make_trainer("ddp", str(folder / "run"), [Stuck(how, folder)])
    found: list[Any] = []

    def look() -> None:
        until((folder / "stuck").exists)
        found.append(connect(folder / "run").stacks())
        (folder / "seen").touch()

    if dist.get_rank() == 0:
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
    trainer.train()
    return (trainer.state.global_step, found[0] if found else {})


@pytest.mark.parametrize("how", ["python", "gil"])
def test_stacks_of_all_ranks_are_shown_while_one_is_stuck(tmp_path: Path, how: str) -> None:
    (step, stacks), (other_step, _) = run_on_ranks(stacks_of_two_ranks, 2, how, str(tmp_path))
    assert list(stacks) == [0, 1] and "stay_here" in stacks[1] and "stay_here" not in stacks[0]
    assert "_train_loop" in stacks[0]
    # Nothing was ended.
    assert step == other_step == 8
