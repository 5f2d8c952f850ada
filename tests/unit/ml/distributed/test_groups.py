"""Control groups, barriers, main_process_first, and rank prefixes in log lines."""

import io
import logging
import os
import time
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forgather.ml.distributed import (
    DistributedError,
    Peers,
    get_barrier_fn,
    get_global_process_group,
    get_local_process_group,
    main_process_first,
    null_barrier,
    prefix_logger_rank,
    reset_process_groups,
)
from forgather.ml.distributed.environment import DistributedEnvironment
from forgather.ml.distributed.groups import new_group, new_mesh
from forgather.ml.trainer.ddp.ddp_arguments import PostLocalSGDArguments
from forgather.ml.trainer.ddp.post_local_sgd import PostLocalSGD
from forgather.ml.trainer.pipeline.pipeline_ranks import PipelineRanks
from tests.support.ranks import outcomes_on_ranks, run_on_ranks


def pretend_two_nodes(first_node_size: int) -> None:
    """Give four ranks the variables they would have on two nodes."""
    rank = dist.get_rank()
    local_rank = rank if rank < first_node_size else rank - first_node_size
    os.environ["LOCAL_RANK"] = str(local_rank)


def node_ranks(first_node_size: int) -> list[int]:
    pretend_two_nodes(first_node_size)
    group = get_local_process_group()
    assert group is not None and group is get_local_process_group(), "cached"
    total = torch.tensor([1])
    dist.all_reduce(total, group=group)
    ranks = dist.get_process_group_ranks(group)
    assert len(ranks) == int(total)
    return ranks


def group_caching() -> tuple[bool, bool, bool]:
    node = get_local_process_group()
    reset_process_groups()
    remade = get_local_process_group()
    return get_global_process_group() is dist.group.WORLD, node is remade, remade is get_local_process_group()


def limit_of(group: dist.ProcessGroup) -> float:
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def limits_of_groups(asked: float | None) -> dict[str, list[float]]:
    """Return the timeouts of all kinds of groups that the library makes, in seconds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # another rank may still be connecting
    dist.destroy_process_group()
    reset_process_groups()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    # A limit given to torch itself counts as well.
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size, timeout=timedelta(seconds=45)
    )
    pretend_two_nodes(2)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    env = DistributedEnvironment(no_accelerator=True, timeout=asked)
    mesh = new_mesh("cpu", (2, 2), ("data", "pipeline"))
    assert mesh["pipeline"].mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    total = torch.tensor([rank])
    dist.all_reduce(total, group=mesh.get_group("data"))
    assert int(total) == 2 * (rank % 2) + 2
    control = new_group(backend="gloo")
    sgd = PostLocalSGDArguments(enabled=True, post_local_gradient_allreduce=True)
    local = PostLocalSGD(sgd, mesh.get_group("data"), Peers(control), env)
    pipelines = PipelineRanks(mesh.get_group("pipeline"), mesh.mesh.tolist(), mesh.get_group("data"))
    node = get_local_process_group()
    assert node is not None
    limits = {
        "mesh": [limit_of(group) for group in mesh.get_all_groups()],
        "post-local SGD": [limit_of(local._hook_state.subgroup)],
        "control": [limit_of(control), limit_of(node)],
        "pipeline": [limit_of(pipelines.return_group())],
    }
    # The next job of this worker has no limit.
    DistributedEnvironment(no_accelerator=True)
    return limits


def groups_of_a_mixed_world() -> tuple[str, int]:
    """Return backend and size of the control group of a WORLD that is not plain gloo."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # another rank may still be connecting
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo", rank=rank, world_size=size)
    group = get_global_process_group()
    assert group is not dist.group.WORLD and group is get_global_process_group()
    return dist.get_backend(group), dist.get_world_size(group)


def moments_around_barrier() -> tuple[float, float]:
    barrier = get_barrier_fn()
    time.sleep(0.3 * dist.get_rank())
    before = time.time()
    barrier()
    return before, time.time()


def record_order(directory: str, first_node_size: int) -> bool:
    """Return whether the file of the node's first rank existed when this rank ran the body."""
    pretend_two_nodes(first_node_size)
    done = Path(directory) / f"node{dist.get_rank() - int(os.environ['LOCAL_RANK'])}"
    with main_process_first():
        found = done.exists()
        if os.environ["LOCAL_RANK"] == "0":
            time.sleep(0.3)
            done.touch()
    return found


def fail_first() -> None:
    with main_process_first():
        if dist.get_rank() == 0:
            raise OSError("no space left")
        raise AssertionError("the others must not run the body")


def fail_later() -> None:
    with main_process_first():
        if dist.get_rank() == 1:
            raise OSError("only here")


def log_lines(show_all_ranks: bool) -> str:
    logger = logging.getLogger("forgather.test_groups")
    logger.setLevel(logging.INFO)
    lines = io.StringIO()
    with redirect_stderr(lines):
        prefix_logger_rank(logger)
        prefix_logger_rank(logger, show_all_ranks=show_all_ranks)
        logging.getLogger("forgather.test_groups.child").info("loaded")
        logger.warning("slow")
    return lines.getvalue()


@pytest.mark.parametrize(
    ("first_node_size", "expected"), [(2, [[0, 1], [0, 1], [2, 3], [2, 3]]), (1, [[0]] + [[1, 2, 3]] * 3)]
)
def test_local_group_holds_the_ranks_of_the_node(first_node_size: int, expected: list[list[int]]) -> None:
    assert run_on_ranks(node_ranks, 4, first_node_size) == expected


def test_groups_are_cached_until_reset() -> None:
    assert run_on_ranks(group_caching, 2) == [(True, False, True)] * 2


def test_world_that_is_not_plain_gloo_gets_a_control_group() -> None:
    assert run_on_ranks(groups_of_a_mixed_world, 2) == [("gloo", 2)] * 2


def test_barrier_waits_for_the_last_rank() -> None:
    moments = run_on_ranks(moments_around_barrier, 3)
    assert max(before for before, _ in moments) <= min(after for _, after in moments)


def test_single_process_has_no_groups_and_a_null_barrier() -> None:
    assert get_global_process_group() is None
    assert get_local_process_group() is None
    assert get_barrier_fn() is null_barrier
    null_barrier()
    null_barrier(None, 1)
    with main_process_first():
        pass


def test_main_process_of_each_node_runs_first(tmp_path: Path) -> None:
    assert run_on_ranks(record_order, 4, str(tmp_path), 2) == [False, True, False, True]


def test_failure_of_the_first_process_reaches_the_others_without_a_hang() -> None:
    start = time.monotonic()
    outcomes = outcomes_on_ranks(fail_first, 3)
    assert time.monotonic() - start < 15.0
    assert {outcome.error_type for outcome in outcomes} == {DistributedError.__name__}
    assert len({outcome.error_message for outcome in outcomes}) == 1
    assert "OSError: no space left" in str(outcomes[2].error_message)


def test_failure_of_a_later_process_stays_on_its_rank() -> None:
    fine, failed = outcomes_on_ranks(fail_later, 2)
    assert not fine.failed
    assert (failed.error_type, failed.error_message) == ("OSError", "only here")


def test_log_lines_have_a_rank_prefix_and_only_rank_0_logs_info() -> None:
    rank0, rank1 = run_on_ranks(log_lines, 2, False)
    assert rank0 == "[rank 0] INFO:forgather.test_groups.child: loaded\n[rank 0] WARNING:forgather.test_groups: slow\n"
    assert rank1 == "[rank 1] WARNING:forgather.test_groups: slow\n"
    assert "[rank 1] INFO:forgather.test_groups.child: loaded\n" in run_on_ranks(log_lines, 2, True)[1]


def lines_of_chosen_ranks() -> str:
    lines = io.StringIO()
    with redirect_stderr(lines):
        logger = prefix_logger_rank(
            logging.getLogger("forgather.test_groups.chosen"),
            filter=lambda rank: rank == 1,
            format="%(rank)s|%(message)s",
        )
        logger.setLevel(logging.INFO)
        logger.info("keep %s", "this")
        logger.error("and that")
    return lines.getvalue()


def test_log_format_and_rank_filter_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("forgather.test_groups.own")
    assert prefix_logger_rank(logger, filter=lambda rank: rank == 0, format="%(rank)s|%(message)s") is logger
    logger.error("keep %s", "this")
    prefix_logger_rank(logger, filter=lambda rank: rank > 0)
    logger.error("drop that")
    assert capsys.readouterr().err == "0|keep this\n"
    assert run_on_ranks(lines_of_chosen_ranks, 2) == ["", "1|keep this\n1|and that\n"]


def test_logging_filter_is_rejected_as_a_rank_filter() -> None:
    with pytest.raises(TypeError, match=r"returns whether a rank logs.*addFilter"):
        prefix_logger_rank(logging.getLogger("forgather.test_groups.own"), filter=logging.Filter())  # type: ignore[arg-type]


def test_barrier_without_a_process_group_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"barrier of 2 ranks.*not initialised.*DistributedEnvironment"):
        get_barrier_fn()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert get_barrier_fn() is null_barrier


@pytest.mark.parametrize(("asked", "seconds"), [(60.0, 60.0), (None, 45.0)])
def test_every_group_has_the_timeout_of_the_job(asked: float | None, seconds: float) -> None:
    for limits in run_on_ranks(limits_of_groups, 4, asked):
        assert limits == {name: [seconds] * len(found) for name, found in limits.items()}
        assert len(limits["mesh"]) == 2
