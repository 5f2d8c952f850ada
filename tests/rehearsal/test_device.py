"""The rehearsal device itself: it counts host waits, finds hazards, and rejects the same calls as CUDA and NCCL."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.ranks import RankFailure, run_on_ranks
from tests.support.rehearsal import find_deadlocks, load_traces, save_trace, tracing, watching
from tests.support.rehearsal.order import main as print_order
from tests.support.rehearsal.ranks import use_device


def device_vector(length: int = 4) -> Tensor:
    return torch.arange(float(length), device="cuda")


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda tensor: tensor.sum().item(),
    "condition": lambda tensor: bool((tensor > 1).any()),
    "to the host": lambda tensor: tensor.cpu(),
    "from the host": lambda tensor: torch.tensor([1.0], device="cuda"),
    "nonzero": lambda tensor: tensor.nonzero(),
    "masked read": lambda tensor: tensor[tensor > 1],
    "masked write": lambda tensor: tensor.clone().index_put_((tensor > 1,), tensor.new_zeros(2)),
    "index on the host": lambda tensor: tensor[torch.tensor([0, 1])],
    "equal": lambda tensor: torch.equal(tensor, tensor),
    "unique": lambda tensor: tensor.unique(),
    "repeats": lambda tensor: tensor.repeat_interleave(torch.ones(4, dtype=torch.long, device="cuda")),
    "synchronize": lambda tensor: torch.cuda.synchronize(),
    "event": lambda tensor: torch.cuda.current_stream().record_event().synchronize(),
    "large pageable copy": lambda tensor: torch.zeros(1 << 17).to("cuda", non_blocking=True),
}


@pytest.mark.parametrize("name", WAITS)
def test_host_waits_are_counted_with_their_line(name: str) -> None:
    tensor = device_vector()
    with watching() as record:
        WAITS[name](tensor)
    places = [place for kind, _, place in record.summary() if kind == "sync"]
    assert record.count("sync") >= 1 and all(Path(__file__).name in place for place in places), record.summary()


def test_arithmetic_does_not_wait() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 2)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = torch.randn(3, 4).pin_memory()
    with watching() as record:
        for _ in range(2):
            loss = model(batch.to("cuda", non_blocking=True)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert record.count("sync") == 0 and record.count("hazard") == 0, record.summary()
    assert record.count("h2d") == 2


def test_arithmetic_equals_the_cpu() -> None:
    host = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    device = host.detach().cuda().requires_grad_()
    for tensor in (host, device):
        heads = tensor.view(1, 1, 5, 5)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        (attended.softmax(-1) @ tensor.t()).tril().sum().backward()
    assert device.grad is not None and host.grad is not None and device.grad.is_cuda
    torch.testing.assert_close(device.grad.cpu(), host.grad)


def test_fresh_memory_is_nan() -> None:
    assert torch.empty(3, device="cuda").isnan().all()
    assert torch.empty_like(device_vector(), dtype=torch.bfloat16).isnan().all()


MIXTURES: dict[str, Callable[[Tensor], Any]] = {
    "host and device": lambda tensor: tensor + torch.ones(4),
    "two devices": lambda tensor: tensor + tensor.to("cuda:1"),
    "weights on the host": lambda tensor: nn.Linear(4, 4)(tensor),
    "list": lambda tensor: torch.cat([tensor, torch.ones(4)]),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_operation_on_two_devices_raises(name: str) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        MIXTURES[name](device_vector())


def test_host_scalars_work_in_device_operations() -> None:
    assert (device_vector() * torch.tensor(2.0)).tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_copy_to_pinned_memory_arrives_when_the_host_waits() -> None:
    target = torch.zeros(4).pin_memory()
    with watching() as record:
        target.copy_(device_vector(), non_blocking=True)
        event = torch.cuda.current_stream().record_event()
        assert record.count("sync") == 0 and target.isnan().all()
    event.synchronize()
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_waiting_for_another_stream_does_not_deliver_a_copy() -> None:
    target, side_stream = torch.zeros(4).pin_memory(), torch.cuda.Stream()
    source = device_vector()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        target.copy_(source, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert target.isnan().all()
    side_stream.synchronize()
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]


def change_pinned_source() -> None:
    source = torch.ones(4).pin_memory()
    source.to("cuda", non_blocking=True)
    source.zero_()
    torch.cuda.synchronize()


def read_without_waiting() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        result = device_vector() * 2
    result + 1


def write_without_waiting() -> None:
    tensor, side_stream = device_vector(), torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        tensor * 2
    tensor.zero_()


def free_too_early() -> None:
    side_stream = torch.cuda.Stream()
    with torch.cuda.stream(side_stream):
        tensor = device_vector()
    torch.cuda.current_stream().wait_stream(side_stream)
    tensor + 1


HAZARDS = {
    "pinned source of an asynchronous copy": change_pinned_source,
    "reads a result of stream": read_without_waiting,
    "overwrites memory of stream": write_without_waiting,
    "memory freed while another stream": free_too_early,
}


@pytest.mark.parametrize("message", HAZARDS)
def test_hazards_are_found(message: str) -> None:
    with watching() as record:
        HAZARDS[message]()
    assert [name for kind, name, _ in record.summary() if kind == "hazard" and message in name], record.summary()


def test_ordered_streams_are_no_hazard() -> None:
    side_stream, source = torch.cuda.Stream(), torch.ones(4).pin_memory()
    with watching() as record:
        with torch.cuda.stream(side_stream):
            tensor = source.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(side_stream)
        tensor.record_stream(torch.cuda.current_stream())
        result = tensor * 2
        torch.cuda.synchronize()
        source.zero_()
        del tensor, result
    assert record.count("hazard") == 0, record.summary()


def test_each_device_has_its_own_random_numbers() -> None:
    torch.manual_seed(3)
    states = torch.cuda.get_rng_state_all()
    first = [torch.rand(4, device=f"cuda:{index}") for index in range(2)]
    host = torch.rand(4)
    nn.functional.dropout(torch.ones(4, device="cuda:0"))
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), host), "the device does not draw from the generator of the host"
    torch.rand(4, device="cuda:1")
    torch.cuda.set_rng_state_all(states)
    assert all(torch.equal(torch.rand(4, device=f"cuda:{index}"), first[index]) for index in range(2))
    generator = torch.Generator("cuda").manual_seed(5)
    assert not torch.equal(torch.rand(4, device="cuda", generator=generator), first[0])
    assert generator.get_state().numel() == 16


def test_each_device_has_memory_statistics() -> None:
    before = torch.cuda.memory_allocated(2)
    tensor = torch.empty(1000, device="cuda:2")
    assert torch.cuda.memory_allocated(2) == before + 4000
    del tensor
    assert torch.cuda.memory_allocated(2) == before and torch.cuda.max_memory_allocated(2) >= before + 4000
    torch.cuda.reset_peak_memory_stats(2)
    assert torch.cuda.max_memory_allocated(2) == before
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total


def test_device_count_follows_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert torch._C._cuda_getDeviceCount() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert torch._C._cuda_getDeviceCount() == 0


def test_device_storages_can_be_saved_loaded_and_resized(tmp_path: Path) -> None:
    tensor = device_vector(6)[2:]
    torch.save({"tensor": tensor}, tmp_path / "file")
    loaded = torch.load(tmp_path / "file")["tensor"]
    assert loaded.is_cuda and torch.equal(loaded, tensor)
    loaded.untyped_storage().resize_(0)
    assert loaded.untyped_storage().nbytes() == 0


# --- NCCL


def talk() -> dict[str, Any]:
    rank = use_device()
    with watching() as record, tracing() as trace:
        total = torch.full((3,), rank + 1.0, device="cuda")
        dist.all_reduce(total)
        average = torch.full((3,), float(rank), device="cuda")
        dist.all_reduce(average, op=dist.ReduceOp.AVG)
        received = torch.empty(3, device="cuda")
        messages = [dist.P2POp(dist.isend, total + rank, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        gathered = torch.empty(6, device="cuda")
        dist.all_gather_into_tensor(gathered, average + rank)
        num_waits = record.count("sync")
    return {
        "values": [total.tolist(), average.tolist(), received.tolist(), gathered.tolist()],
        "num_waits": num_waits,
        "num_hazards": record.count("hazard"),
        "trace": trace,
    }


def test_nccl_computes_without_host_waits() -> None:
    results = run_on_ranks(talk, 2)
    for rank, result in enumerate(results):
        received = [3.0 + 1 - rank] * 3
        assert result["values"] == [[3.0] * 3, [0.5] * 3, received, [0.5] * 3 + [1.5] * 3]
        assert result["num_waits"] == result["num_hazards"] == 0
    assert find_deadlocks([result["trace"] for result in results]) == []


def break_a_rule(name: str) -> str:
    rank = use_device()
    try:
        if name == "host tensor":
            world: Any = dist.group.WORLD
            world._get_backend(torch.device("cuda")).allreduce([torch.ones(2)])
        elif name == "not contiguous":
            dist.all_reduce(torch.ones(4, 4, device="cuda")[:, :2])
        elif name == "two devices":
            dist.all_reduce(torch.ones(2, device="cuda"))
            dist.all_reduce(torch.ones(2, device=f"cuda:{rank + 2}"))
    except RuntimeError as error:
        return str(error)
    return ""


RULES = {
    "host tensor": "NCCL cannot allreduce a tensor on cpu",
    "not contiguous": "Tensors must be contiguous",
    "two devices": "uses cuda:0, but allreduce got a tensor on cuda:2",
}


@pytest.mark.parametrize("name", RULES)
def test_nccl_rejects_invalid_calls(name: str) -> None:
    assert RULES[name] in run_on_ranks(break_a_rule, 2, name)[0]


def test_nccl_rejects_two_ranks_on_one_device() -> None:
    # One of the ranks sees the other's claim. The other then waits for it until the test ends it.
    with pytest.raises(RankFailure, match="Duplicate GPU detected"):
        run_on_ranks(share_a_device, 2)


def share_a_device() -> None:
    use_device()
    dist.all_reduce(torch.ones(2, device="cuda:0"))


def use_before_waiting() -> list[str]:
    use_device()
    with watching() as record:
        tensor = torch.ones(3, device="cuda")
        work = dist.all_reduce(tensor, async_op=True)
        tensor + 1
        work.wait()
        tensor + 1
    return [name for kind, name, _ in record.summary() if kind == "hazard"]


def test_a_result_of_nccl_used_before_its_wait_is_a_hazard() -> None:
    for hazards in run_on_ranks(use_before_waiting, 2):
        (hazard,) = hazards
        assert "reads a result of stream" in hazard


# --- order of NCCL


def launch(
    operation: str, work: int, peer: int = -1, group: str = "0", batch: int = 0, size: int = 8
) -> dict[str, Any]:
    return {
        "event": "launch",
        "work": work,
        "group": group,
        "members": [0, 1],
        "operation": operation,
        "peer": peer,
        "bytes": size,
        "batch": batch,
    }


def wait(work: int) -> dict[str, Any]:
    return {"event": "wait", "work": work}


def collectives(*groups: str) -> list[dict[str, Any]]:
    """Build a trace of all-reduces in these groups, with a wait after each."""
    return [
        entry for work, group in enumerate(groups) for entry in (launch("allreduce", work, group=group), wait(work))
    ]


def both_send_first(rank: int, batch: int = 0) -> list[dict[str, Any]]:
    second = 1 if batch else 2
    return [
        launch("send", 1, peer=1 - rank, batch=batch),
        launch("recv", second, peer=1 - rank, batch=batch),
        wait(1),
        wait(second),
    ]


def test_deadlock_by_the_order_of_groups_is_found() -> None:
    problems = find_deadlocks([collectives("a", "b"), collectives("b", "a")])
    assert problems[0] == "rank 0 waits forever for allreduce of 8 bytes in group 'a'"
    assert problems[1] == "rank 1 waits forever for allreduce of 8 bytes in group 'b'"
    assert find_deadlocks([collectives("a", "b"), collectives("a", "b")]) == []


def test_launches_without_waits_do_not_deadlock() -> None:
    ahead = [launch("allreduce", 1, group="a"), launch("allreduce", 2, group="b"), wait(1), wait(2)]
    behind = [launch("allreduce", 1, group="b"), launch("allreduce", 2, group="a"), wait(1), wait(2)]
    assert find_deadlocks([ahead, behind]) == []


def test_crossing_messages_need_a_batch() -> None:
    assert len(find_deadlocks([both_send_first(0), both_send_first(1)])) == 4
    assert find_deadlocks([both_send_first(0, batch=1), both_send_first(1, batch=1)]) == []


def test_mismatched_collectives_are_named() -> None:
    (problem,) = find_deadlocks([[launch("allreduce", 1)], [launch("broadcast", 1)]])
    assert "rank 0 runs allreduce" in problem and "rank 1 runs broadcast" in problem
    (problem,) = find_deadlocks([[launch("allreduce", 1)], [launch("allreduce", 1, size=16)]])
    assert "8 bytes" in problem and "16 bytes" in problem


def test_message_without_a_receiver_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, trace in enumerate([[launch("send", 1, peer=1)], []]):
        save_trace(tmp_path, rank, trace)
    assert find_deadlocks(load_traces(tmp_path)) == ["rank 0 never completes send rank 1 (8 bytes) in group '0'"]
    assert print_order(str(tmp_path)) == 1
    assert "2 ranks, 1 launches: DEADLOCK" in capsys.readouterr().out


def test_forked_processes_cannot_use_the_device() -> None:
    device_vector()
    child = os.fork()
    if child == 0:
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
