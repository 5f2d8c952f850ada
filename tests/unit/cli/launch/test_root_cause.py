"""Root cause of a failed job: the process to blame, among several that failed."""

import json
import signal
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from forgather.cli.launch.root_cause import find_root_cause

LOST = "DistributedError: contact with the other ranks was lost while saving: RuntimeError: Connection closed by peer"


def failure(
    folder: Path, rank: int, exitcode: int = 1, message: str | None = None, timestamp: int = 10
) -> ProcessFailure:
    file = folder / f"{rank}.json"
    if message is not None:
        extra = {"py_callstack": f"Traceback\n{message}", "timestamp": str(timestamp)}
        file.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    return ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=exitcode, error_file=str(file))


def test_killed_process_is_the_cause_and_lost_contact_the_consequence(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 0, message=LOST), 1: failure(tmp_path, 1, exitcode=-signal.SIGKILL)}
    cause = find_root_cause(failures)
    assert cause.sentence().startswith("rank 1 was killed by SIGKILL.") and "memory" in cause.sentence()


def test_first_genuine_error_is_the_cause(tmp_path: Path) -> None:
    failures = {
        0: failure(tmp_path, 0, exitcode=-signal.SIGTERM),
        1: failure(tmp_path, 1, message=LOST, timestamp=11),
        2: failure(tmp_path, 2, message="KeyError: 'b'", timestamp=13),
        3: failure(tmp_path, 3, message="ValueError: bad\nbatch", timestamp=12),
    }
    cause = find_root_cause(failures)
    assert cause.sentence() == "rank 3 failed: ValueError: bad."
    assert cause.traceback == "Traceback\nValueError: bad\nbatch"


def test_error_agreed_by_all_ranks_is_attributed_to_its_origin(tmp_path: Path) -> None:
    agreed = (
        "CheckpointSaveError: rank 2 failed while saving: OSError: full\n\nTraceback of rank 2:\nline\nOSError: full"
    )
    cause = find_root_cause({rank: failure(tmp_path, rank, message=agreed) for rank in range(3)})
    assert cause.sentence() == "rank 2 failed while saving: OSError: full."
    assert cause.traceback == "line\nOSError: full"


def test_usage_error_is_reported_as_such(tmp_path: Path) -> None:
    cause = find_root_cause({0: failure(tmp_path, 0, exitcode=2, message="UsageError: model.x is wrong.")})
    assert cause.usage_error == "model.x is wrong."


def test_process_without_a_message_is_reported_by_its_exit_code(tmp_path: Path) -> None:
    assert find_root_cause({1: failure(tmp_path, 1, exitcode=7)}).sentence() == (
        "rank 1 exited with code 7 without an error message."
    )
