"""Peak memory of the process."""

from pathlib import Path

from forgather.ml.trainer.callbacks import PeakMemory
from tests.unit.ml.trainer.callbacks.run import Run


def test_peak_of_this_process_is_plausible(tmp_path: Path) -> None:
    # Importing torch alone takes more than 0.1 GiB.
    assert 0.05 < Run(tmp_path, PeakMemory()).log(loss=1.0)["peak_memory_gib"] < 1000


def test_peak_does_not_fall(tmp_path: Path) -> None:
    run = Run(tmp_path, PeakMemory())
    first = run.log(loss=1.0)["peak_memory_gib"]
    ballast = bytearray(100 * 1024**2)
    ballast[:] = b"x" * len(ballast)
    del ballast
    assert run.log(loss=1.0)["peak_memory_gib"] >= first
