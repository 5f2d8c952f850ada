"""Expandable segments: requested on Linux, unless the user configures the allocator."""

import pytest

from forgather._allocator import request_expandable_segments


def test_expandable_segments_are_requested() -> None:
    environ: dict[str, str] = {}
    assert request_expandable_segments(environ, "linux")
    assert environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert not request_expandable_segments({}, "win32")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_user_settings_are_kept(name: str) -> None:
    environ = {name: "backend:cudaMallocAsync"}
    assert not request_expandable_segments(environ, "linux")
    assert environ == {name: "backend:cudaMallocAsync"}
