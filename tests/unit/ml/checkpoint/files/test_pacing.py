"""Pace of a background save: budget of processor time, and its end when training waits."""

import os
import threading

from forgather.ml.checkpoint.files import pacing
from forgather.ml.checkpoint.files.hashed_io import BUFFER_BYTES, HashingWriter
from forgather.ml.checkpoint.files.pacing import Pace, paced


class _Clocks:
    def __init__(self) -> None:
        self.cpu = self.now = 5.0

    def pace(self, is_lifted: threading.Event, share: float = 0.1) -> Pace:
        return Pace(is_lifted, share, cpu_time=lambda: self.cpu, clock=lambda: self.now)


def test_delay_brings_the_thread_back_to_its_share_of_a_core() -> None:
    clocks = _Clocks()
    pace = clocks.pace(threading.Event())
    assert pace.delay() == 0
    clocks.cpu += 0.2
    clocks.now += 0.5
    assert abs(pace.delay() - 1.5) < 1e-9
    clocks.now += 1.5
    assert pace.delay() < 1e-9


def test_lifted_pace_neither_delays_nor_waits() -> None:
    clocks, is_lifted = _Clocks(), threading.Event()
    pace = clocks.pace(is_lifted)
    clocks.cpu += 1000.0
    assert pace.delay() > 9000
    is_lifted.set()
    assert pace.delay() == 0
    pace.pause()


def test_writer_pauses_after_each_full_buffer_of_a_paced_thread_only(tmp_path) -> None:
    class Counting(Pace):
        num_pauses = 0

        def pause(self) -> None:
            self.num_pauses += 1

    pace = Counting(threading.Event())
    data = os.urandom(BUFFER_BYTES) * 2 + b"rest"
    with paced(pace), HashingWriter(str(tmp_path / "paced")) as writer:
        writer.write(data)
    assert pace.num_pauses == 2
    with HashingWriter(str(tmp_path / "free")) as other:
        other.write(data)
    assert pace.num_pauses == 2
    assert (tmp_path / "paced").read_bytes() == (tmp_path / "free").read_bytes() == data
    assert writer.checksum == other.checksum


def test_pause_without_a_pace_returns_at_once() -> None:
    pacing.pause()
