"""Stacks of threads: the sentry of a rank reads them, and must neither change the memory of training nor crash it."""

import gc
import threading
import time
import weakref

import torch

from forgather._watch.judge import IN_COLLECTIVE, RUNNING
from forgather.ml.distributed.watch.stacks import activity_of, all_stacks


def test_look_at_stacks_keeps_no_tensor_alive() -> None:
    """A frame keeps the local variables of its function alive, and with them the memory of a step."""
    begins, ends = threading.Event(), threading.Event()
    dead = threading.Event()

    def step() -> None:
        tensor = torch.ones(1)
        weakref.finalize(tensor, dead.set)
        begins.set()
        ends.wait(10)

    thread = threading.Thread(target=step)
    thread.start()
    assert begins.wait(10) and thread.ident is not None
    gc.disable()
    try:
        activity_of(thread.ident)
        ends.set()
        thread.join(10)
        assert dead.is_set()
    finally:
        gc.enable()


def test_stacks_show_thread_names_and_source_innermost_last() -> None:
    begins, ends = threading.Event(), threading.Event()

    def wait_for_the_end() -> None:
        begins.set()
        ends.wait(10)  # place of the thread

    thread = threading.Thread(target=wait_for_the_end, name="waiting thread")
    thread.start()
    assert begins.wait(10) and thread.ident is not None
    try:
        own = all_stacks().split("Thread waiting thread:")[1].split("\n\n")[0]
        assert activity_of(thread.ident) == RUNNING
    finally:
        ends.set()
        thread.join()
    outer, inner = own.index("in wait_for_the_end"), own.index("in wait\n")
    assert outer < own.index("ends.wait(10)  # place of the thread") < inner


def test_wait_for_a_store_counts_as_a_collective() -> None:
    from forgather.ml.distributed.rank_links import __file__ as file

    begins, ends = threading.Event(), threading.Event()
    # A function that lies in a file of the distributed package.
    code = compile("def wait(begins, ends):\n    begins.set()\n    while not ends.is_set(): pass\n", file, "exec")
    found: dict[str, object] = {}
    exec(code, found)
    thread = threading.Thread(target=found["wait"], args=(begins, ends))  # type: ignore[arg-type]
    thread.start()
    assert begins.wait(10) and thread.ident is not None
    try:
        # The innermost call may be `is_set` of the threading module.
        deadline = time.monotonic() + 30
        while activity_of(thread.ident) != IN_COLLECTIVE:
            assert time.monotonic() < deadline, "the wait was never seen as a collective"
    finally:
        ends.set()
        thread.join()


def test_look_at_a_thread_that_enters_and_leaves_calls_does_not_crash() -> None:
    """The stack of a running thread changes at any time, also while tensors are freed without the GIL."""
    ends = threading.Event()

    def step(depth: int) -> torch.Tensor:
        tensor = torch.ones(64, requires_grad=True)
        return (tensor * tensor).sum() if depth == 0 else step(depth - 1) + tensor.sum()

    def train() -> None:
        while not ends.is_set():
            step(20).backward()

    thread = threading.Thread(target=train)
    thread.start()
    assert thread.ident is not None
    try:
        for _ in range(200):
            activity_of(thread.ident)
    finally:
        ends.set()
        thread.join()
