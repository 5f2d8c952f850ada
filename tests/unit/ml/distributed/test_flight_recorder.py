"""NCCL flight recorder: environment variables, and files of traces."""

import pickle
from pathlib import Path

from torch._C._distributed_c10d import _dump_fr_trace

from forgather.ml.distributed import flight_recorder


def test_the_recorder_is_on_with_nccl_only() -> None:
    environ: dict[str, str] = {}
    flight_recorder.enable("gloo", environ)
    assert environ == {}
    flight_recorder.enable("cpu:gloo,cuda:nccl", environ)
    assert environ == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def test_user_settings_are_kept() -> None:
    environ = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    flight_recorder.enable("nccl", environ)
    assert environ == {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


def test_a_trace_is_written_for_torchfrtrace(tmp_path: Path) -> None:
    path = flight_recorder.write_dump(_dump_fr_trace, str(tmp_path / "run" / flight_recorder.FILE_PREFIX), 3)
    assert path == str(tmp_path / "run" / "nccl_trace_rank_3")
    assert "version" in pickle.loads(Path(path).read_bytes())


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert flight_recorder.write_dump(_dump_fr_trace, str(tmp_path / "file" / "trace_"), 0) is None


def test_nothing_is_written_without_nccl(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    flight_recorder.direct_traces(str(tmp_path / "run"), environ)
    assert flight_recorder.write_trace(str(tmp_path / "run"), 0) is None
    assert environ == {} and not (tmp_path / "run").exists()
