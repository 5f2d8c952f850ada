"""Stacks of threads: the sentry of a rank reads them twice a second, and must not change the memory of training."""

import gc
import threading
import weakref

import torch

from forgather.ml.distributed.watch.stacks import activity_of


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
