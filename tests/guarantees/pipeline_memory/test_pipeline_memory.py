"""Memory of pipeline ranks: each rank holds only its own stages, measured in fresh processes with a large model.

Run as a module (`python -m ... DIRECTORY`), this file is the job: it imports modules once, and forks into its ranks.
"""

import ctypes
import functools
import gc
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.pipeline.pipeline_utils import tensors_of
from tests.support.launch import start_ranks
from tests.support.rank_protocol import rank_variables

WORLD_SIZE = 4
NUM_LAYERS = 48
WIDTH = 256
MEGABYTE = 2**20
# Allowance for objects other than tensors: a sixth of the stages of a rank.
SLACK_BYTES = 8 * MEGABYTE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux process statistics")

Report = dict[str, dict[str, int]]

# --- the job


def llama(num_layers: int, width: int) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
        )
    )


class PeakUntilReady:
    """Peak growth of resident memory until a trainer is ready for its first step."""

    def __init__(self) -> None:
        gc.collect()
        # Return freed memory to the system. Otherwise the next model would reuse it unmeasured.
        ctypes.CDLL(None).malloc_trim(0)
        # Reset the peak value (VmHWM).
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _memory("VmRSS")
        self.growth = 0

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.growth = _memory("VmHWM") - self._before


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def train(output_dir: Path, model_init: Any, resume: bool) -> tuple[PipelineTrainer, dict[str, int]]:
    """Train for one step, or resume after it; return the trainer and the memory of its preparation."""
    peak = PeakUntilReady()
    trainer = PipelineTrainer(
        args={
            "output_dir": str(output_dir),
            "use_cpu": True,
            "seed": 0,
            "max_steps": 1,
            "save_strategy": "no",
            "logging_strategy": "no",
            "per_device_train_batch_size": 4,
        },
        model_init=model_init,
        train_dataset=[{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4,
        callbacks=[peak],
        default_callbacks=False,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
    )
    trainer.train(resume_from_checkpoint=resume)
    sizes = {id(tensor): tensor.nbytes for tensor in tensors_of(trainer.pipeline.part).values()}
    return trainer, {"growth": peak.growth, "stages": sum(sizes.values()), "largest": max(sizes.values())}


def build_save_and_resume(output_dir: Path, model_init: Any) -> Report:
    trainer, built = train(output_dir, model_init, resume=False)
    trainer.save_checkpoint()
    sums = {name: float(value.double().sum()) for name, value in trainer.pipeline.part.state_dict().items()}
    del trainer
    trainer, resumed = train(output_dir, model_init, resume=True)
    for name, value in trainer.pipeline.part.state_dict().items():
        assert float(value.double().sum()) == sums[name], name
    return {"built": built, "resumed": resumed}


def run_rank(rank: int, port: int, directory: Path) -> None:
    os.environ.update(rank_variables(rank, WORLD_SIZE, port))
    # A small model first: it loads the code, connections and buffers that a process needs once for any model.
    build_save_and_resume(directory / "small", functools.partial(llama, WORLD_SIZE, 8))
    report = build_save_and_resume(directory / "large", functools.partial(llama, NUM_LAYERS, WIDTH))
    (directory / f"rank_{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    port, directory = int(os.environ["MASTER_PORT"]), Path(sys.argv[1])
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, port, directory)) for rank in range(WORLD_SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


# --- the tests


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    """Measurements of each rank."""
    directory = tmp_path_factory.mktemp("memory")
    job = start_ranks(["-m", __name__, str(directory)], 1)[0]
    assert job.wait(timeout=120.0) == 0, job.output
    return [json.loads((directory / f"rank_{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def _limit(usage: dict[str, int]) -> int:
    return usage["stages"] + usage["largest"] + SLACK_BYTES


def test_model_is_much_larger_than_a_stage_and_a_stage_than_a_tensor(reports: list[Report]) -> None:
    """Otherwise the limits below would prove nothing."""
    stages = [report["built"]["stages"] for report in reports]
    assert sum(stages) > 190 * MEGABYTE
    assert max(stages) < 0.3 * sum(stages)
    assert all(2 * report["built"]["stages"] > _limit(report["built"]) * 1.3 for report in reports)
    assert [report["resumed"]["stages"] for report in reports] == stages


def test_construction_needs_only_own_stages_and_one_tensor(reports: list[Report]) -> None:
    for report in reports[1:]:
        assert report["built"]["growth"] <= _limit(report["built"])
        assert report["built"]["growth"] >= 0.8 * report["built"]["stages"], "the measurement must include the stages"


def test_measurement_shows_the_full_model_on_the_initialising_rank(reports: list[Report]) -> None:
    """Otherwise the measurement could miss a rank that wrongly holds the full model."""
    whole = sum(report["built"]["stages"] for report in reports)
    assert reports[0]["built"]["growth"] >= whole > 2 * _limit(reports[0]["built"])


def test_resume_needs_only_own_stages_and_one_tensor(reports: list[Report]) -> None:
    for report in reports:
        assert report["resumed"]["growth"] <= _limit(report["resumed"])
        assert report["resumed"]["growth"] >= 0.8 * report["resumed"]["stages"], (
            "the measurement must include the stages"
        )


if __name__ == "__main__":
    main()
