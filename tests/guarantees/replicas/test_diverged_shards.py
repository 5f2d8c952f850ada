"""HSDP: a save compares the shards of all replicas, and reports a difference on every rank."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.coordinator import ReplicationError
from forgather.ml.checkpoint.manifest import read_manifest
from tests.support.data_parallel import fsdp2_trainer
from tests.support.ranks import run_on_ranks
from tests.support.sampling import sampled
from tests.support.tiny_models import Recorder, saved_steps, tiny_llama, token_samples
from tests.support.tiny_parallel import captured_logs

NAME = "model.layers.1.mlp.up_proj.weight"
PLACES = {
    "weight": ("model", NAME),
    "moment": ("optimizer", f"state.{NAME}.momentum_buffer"),
    "average": ("ema", f"averages.{NAME}"),
}


def change_shard(trainer: Any, place: str) -> None:
    """Change one element of this rank's shard by the smallest step of its dtype."""
    parameter = trainer.unwrapped_model().get_parameter(NAME)
    state = {
        "weight": lambda: parameter,
        "moment": lambda: trainer.optimizer.state[parameter]["momentum_buffer"],
        "average": lambda: trainer.recipes.average.state_dict()["averages"][NAME],
    }[place]()
    with torch.no_grad():
        state.to_local().view(-1)[5:6].view(torch.int32).add_(1)


def save_diverged(output_dir: Path, culprit: int) -> dict[str, list[str]]:
    """Save well at step 2, and with a difference at step 4; return the reports by place of the difference."""
    reports = {}
    for place in PLACES:

        def spoil(state: Any, trainer: Any, place: str = place, **_: Any) -> None:
            if state.global_step == 4 and dist.get_rank() == culprit:
                change_shard(trainer, place)

        trainer = fsdp2_trainer(
            output_dir / place,
            tiny_llama,
            token_samples(40),
            Recorder(on_step_end=spoil),
            save_strategy="steps",
            save_steps=2,
            momentum=0.9,
            max_steps=4,
            ema_decay=0.5,
            fsdp2={"replicate_size": 2},
        )
        with (
            captured_logs() as lines,
            pytest.raises(ReplicationError) if place == "weight" else nullcontext() as failure,
        ):
            trainer.train()
        reports[place] = [line for line in lines if "Replication" in line] if failure is None else [str(failure.value)]
    return reports


CULPRITS = [(2, "rank 2 differs from rank 0"), (1, "rank 3 differs from rank 1")]


# Ranks 0 and 2 hold copies of the first shard, ranks 1 and 3 of the second. With two copies, the lower rank counts as right.
@pytest.mark.parametrize(("culprit", "told"), sampled(CULPRITS, CULPRITS[1:]))
def test_changed_shard_of_one_replica_is_reported_on_every_rank(culprit: int, told: str, tmp_path: Path) -> None:
    results = run_on_ranks(save_diverged, 4, tmp_path, culprit)
    for place, (key, name) in PLACES.items():
        for result in results:
            (message,) = result[place]
            assert f"Replication validation failed: the copies of component {key!r} differ between ranks" in message
            assert f"{name}: {told}" in message and message.count("differs") == 1
        folder = tmp_path / place / "checkpoints"
        if place == "weight":
            assert saved_steps(tmp_path / place) == [2], "weights are required, so the save fails"
            assert store.verify_checkpoint(str(folder / "checkpoint-2")) == []
        else:
            assert read_manifest(str(folder / "checkpoint-4")).components[key].metadata["replication"] == "diverged"
