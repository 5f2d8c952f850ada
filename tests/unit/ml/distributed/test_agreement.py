"""Agreement: an error on one rank is raised on all ranks as the same error."""

import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from forgather.ml.distributed import DistributedError, Peers, agree, agreement
from tests.support.launch import finish_all, start_ranks
from tests.support.ranks import outcomes_on_ranks, run_on_ranks

DIE_WHILE_OTHERS_AGREE = """
from forgather.ml.distributed import DistributedEnvironment
from tests.unit.ml.distributed.test_agreement import die_while_others_agree

DistributedEnvironment(no_accelerator=True)
die_while_others_agree(dying_rank=1)
"""


def raise_on(failing_ranks: list[int]) -> None:
    if dist.get_rank() in failing_ranks:
        raise ValueError(f"bad row {dist.get_rank()}")


def fail_in_agreement(failing_ranks: list[int]) -> str:
    with agreement("reading rows"):
        raise_on(failing_ranks)
    return "fine"


def error_fields(failing_ranks: list[int]) -> tuple[Any, ...]:
    try:
        fail_in_agreement(failing_ranks)
    except DistributedError as error:
        return error.during, error.rank, error.error_type, error.message, error.traceback_text, repr(error.__cause__)
    raise AssertionError("no error reached this rank")


def agree_again_after_a_failure() -> list[int]:
    for failing_rank in (1, 0, 1):
        with pytest.raises(DistributedError, match=f"rank {failing_rank} failed while reading rows"):
            fail_in_agreement([failing_rank])
    fail_in_agreement([])
    return Peers.world().gather(dist.get_rank())


def die_while_others_agree(dying_rank: int) -> None:
    peers = Peers.world()
    peers.agree(None, "warming up")
    if dist.get_rank() == dying_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    peers.agree(None, "writing the shard")


def fail_while_a_peer_is_dead() -> str:
    peers = Peers.world()
    peers.agree(None, "warming up")
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        peers.agree(OSError("disk full"), "writing the shard")
    except DistributedError as error:
        return f"{error.rank} {error.__cause__!r}"
    raise AssertionError("no error reached this rank")


def leave_by(stop: type[BaseException]) -> None:
    with agreement("waiting for orders"):
        if dist.get_rank() == 1:
            raise stop("enough")


def exchange() -> tuple[list[dict[str, int]], str, str]:
    peers = Peers.world()
    gathered = peers.gather({"rank": peers.rank, "size": peers.size})
    words = ["from zero", "from one", "from two"]
    return gathered, peers.broadcast(words[peers.rank]), peers.broadcast(words[peers.rank], source=2)


def exchange_something_unsendable(by_gather: bool) -> None:
    peers = Peers.world()
    if by_gather:
        peers.gather(threading.Lock() if peers.rank == 1 else None)
    else:
        # Python converts no number of so many digits to text.
        peers.broadcast(10**5000, source=1)


def agree_in_pairs() -> str | None:
    groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3])]
    peers = Peers(groups[dist.get_rank() // 2])
    assert (peers.rank, peers.size) == (dist.get_rank() % 2, 2)
    try:
        with peers.agreement("working in pairs"):
            raise_on([3])
    except DistributedError as error:
        return f"{error.rank}: {error.message}"
    return None


def act_in_a_foreign_group() -> str:
    group = dist.new_group([0], backend="gloo")
    if dist.get_rank() == 0:
        return "member"
    with pytest.raises(ValueError, match="rank 1 is not a member"):
        Peers(group)
    return "foreign"


def nest_a_report() -> str:
    outer: Exception | None = None
    try:
        fail_in_agreement([1])
    except DistributedError as error:
        outer = error
    with pytest.raises(DistributedError) as again:
        agree(outer, "the larger operation")
    return str(again.value)


def test_agreement_without_failures_passes() -> None:
    assert run_on_ranks(fail_in_agreement, 3, []) == ["fine"] * 3


def test_failing_rank_makes_all_ranks_raise_the_same_error() -> None:
    outcomes = outcomes_on_ranks(fail_in_agreement, 3, [1])
    assert {outcome.error_type for outcome in outcomes} == {"DistributedError"}
    (message,) = {str(outcome.error_message) for outcome in outcomes}
    assert message.startswith("rank 1 failed while reading rows: ValueError: bad row 1")
    assert "in raise_on" in message, "the message contains the traceback of the failing rank"


def test_lowest_failing_rank_is_named_and_each_rank_chains_its_own_error() -> None:
    results = run_on_ranks(error_fields, 4, [3, 1])
    fields = {result[:4] for result in results}
    assert fields == {("reading rows", 1, "ValueError", "bad row 1")}
    assert len({result[4] for result in results}) == 1
    assert [result[5] for result in results] == [
        "None",
        "ValueError('bad row 1')",
        "None",
        "ValueError('bad row 3')",
    ]


def test_ranks_stay_in_step_after_a_failure() -> None:
    assert run_on_ranks(agree_again_after_a_failure, 2) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("dying_rank", [0, 1])
def test_dead_rank_makes_the_others_raise_within_seconds(dying_rank: int) -> None:
    start = time.monotonic()
    outcomes = outcomes_on_ranks(die_while_others_agree, 4, dying_rank)
    assert outcomes.pop(dying_rank).error_type == "RankDied"
    for outcome in outcomes:
        assert outcome.error_type == "DistributedError"
        assert "contact with the other ranks was lost while writing the shard" in str(outcome.error_message)
    assert time.monotonic() - start < 20.0


def test_dead_rank_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DIE_WHILE_OTHERS_AGREE)
    processes = start_ranks([str(script)], 4)
    assert finish_all(processes, 60.0) == [1, -9, 1, 1]
    for process in (processes[0], processes[2], processes[3]):
        assert "DistributedError: contact with the other ranks was lost while writing the shard" in process.output


def test_own_failure_is_not_hidden_by_a_lost_peer() -> None:
    outcomes = outcomes_on_ranks(fail_while_a_peer_is_dead, 2)
    assert outcomes[1].value == "None OSError('disk full')"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_interrupt_propagates_on_its_rank_and_is_reported_to_the_others(stop: type[BaseException]) -> None:
    other, interrupted = outcomes_on_ranks(leave_by, 2, stop)
    assert (interrupted.error_type, interrupted.error_message) == (stop.__name__, "enough")
    assert other.error_type == "DistributedError"
    assert f"rank 1 failed while waiting for orders: {stop.__name__}: enough" in str(other.error_message)


def test_gather_and_broadcast_reach_every_rank() -> None:
    gathered = [{"rank": rank, "size": 3} for rank in range(3)]
    assert run_on_ranks(exchange, 3) == [(gathered, "from zero", "from two")] * 3


@pytest.mark.parametrize("by_gather", [True, False])
def test_unsendable_value_fails_on_every_rank(by_gather: bool) -> None:
    outcomes = outcomes_on_ranks(exchange_something_unsendable, 3, by_gather)
    assert {outcome.error_type for outcome in outcomes} == {"DistributedError"}
    (message,) = {outcome.error_message for outcome in outcomes}
    assert "rank 1 failed" in str(message)
    assert ("cannot be sent to other ranks" if by_gather else "digits") in str(message)


def test_group_agrees_separately_and_names_global_ranks() -> None:
    assert run_on_ranks(agree_in_pairs, 4) == [None, None, "3: bad row 3", "3: bad row 3"]


def test_group_without_this_rank_is_rejected() -> None:
    assert run_on_ranks(act_in_a_foreign_group, 2) == ["member", "foreign"]


def test_nested_report_keeps_its_origin() -> None:
    for message in run_on_ranks(nest_a_report, 2):
        assert message.startswith("rank 1 failed while reading rows: ValueError: bad row 1")


def test_single_process_agrees_with_itself() -> None:
    peers = Peers.world()
    assert (peers.rank, peers.size) == (0, 1)
    assert peers.gather("x") == ["x"] and peers.broadcast("y") == "y"
    agree(None, "nothing much")
    with (
        pytest.raises(DistributedError, match="rank 0 failed while parsing: ValueError: bad") as caught,
        agreement("parsing"),
    ):
        raise ValueError("bad")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(SystemExit), agreement("parsing"):
        sys.exit(3)


def fail_with_a_hostile_text() -> str:
    try:
        with agreement("reading \x1b[2Jrows"):
            if dist.get_rank() == 1:
                raise ValueError("\x1b[2J" + "long " * 100_000)
    except DistributedError as error:
        return str(error)
    raise AssertionError("no error reached this rank")


def test_text_of_another_rank_is_bounded_and_printable() -> None:
    for text in run_on_ranks(fail_with_a_hostile_text, 2):
        assert "\x1b" not in text and "long long" in text and "Traceback of rank 1" in text
        assert len(text) < 200_000


def test_error_survives_pickling() -> None:
    error = DistributedError("saving", 3, "OSError", "disk full", "Traceback ...\nOSError: disk full")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and vars(copy) == vars(error)
    assert str(error) == (
        "rank 3 failed while saving: OSError: disk full\n\nTraceback of rank 3:\nTraceback ...\nOSError: disk full"
    )
    assert isinstance(error, RuntimeError)
