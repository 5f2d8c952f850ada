"""Memory of FSDP2 ranks: no rank ever holds the whole model, in initialisation, save or load."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.fsdp2_memory_job import NUM_LAYERS, VOCABULARY, WIDTH
from tests.support.warm_ranks import run_warm_ranks

WORLD_SIZE = 4
MODEL_BYTES = 4 * WIDTH * (NUM_LAYERS * WIDTH + 2 * VOCABULARY)
ALLOWANCE_BYTES = 64 * 2**20

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not os.access("/proc/self/clear_refs", os.W_OK), reason="resets the peak of Linux"
)


def test_peak_growth_is_the_shard_and_a_fixed_allowance(tmp_path: Path) -> None:
    jobs = {"job": (WORLD_SIZE, [str(tmp_path)])}
    ranks = run_warm_ranks("tests.support.fsdp2_memory_job", jobs, timeout=240)["job"]
    assert [rank.code for rank in ranks] == [0] * WORLD_SIZE, "\n".join(rank.output for rank in ranks)
    for number, rank in enumerate(ranks):
        figures = json.loads(rank.output.strip().splitlines()[-1])["figures"]
        assert figures["initialisation"][2] == MODEL_BYTES / WORLD_SIZE
        assert figures["load"][2] == 3 * MODEL_BYTES / WORLD_SIZE, "weights and two moments"
        for phase, (resident, anonymous, shard) in figures.items():
            sizes = [f"{size / 2**20:.0f} MiB" for size in (resident, anonymous, shard)]
            print(f"rank {number}, {phase}: {sizes[0]} resident, {sizes[1]} without mapped files, shard {sizes[2]}")
            # A save holds slices of other ranks on their way to the file: more on a busy machine, never a second shard.
            shard = max(shard, MODEL_BYTES / WORLD_SIZE)
            assert anonymous < shard + ALLOWANCE_BYTES, phase
            # A load maps the saved moments of this rank.
            mapped = 2 * MODEL_BYTES / WORLD_SIZE if phase == "load" else 0
            assert resident < shard + mapped + ALLOWANCE_BYTES, phase
