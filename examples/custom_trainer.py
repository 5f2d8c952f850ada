"""Custom trainer with state of its own: each half of the ranks trains on one kind of text and tracks its loss.

    torchrun --nproc-per-node 4 examples/custom_trainer.py

The running loss is the same on all ranks of a half and differs between the halves: the pattern PER_GROUP. The trainer
only declares that. One rank of each half then writes it, every save compares its copies, and a resume restores it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather import DDPTrainer, DDPTrainingArguments, DistributedEnvironment, SharingPattern, StateComponent
from forgather.data.standard_library import standard_library_documents
from forgather.ml.distributed import record_entry_point

KINDS = ("code", "numbers")


class RunningLoss:
    """Exponential mean of a loss. Any object with `state_dict` and `load_state_dict` can be a component."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value = state["value"]


class TwoKindsTrainer(DDPTrainer[DDPTrainingArguments]):
    def _init_distributed(self) -> None:
        super()._init_distributed()
        mesh = dist.init_device_mesh("cpu", (len(KINDS), dist.get_world_size() // 2), mesh_dim_names=("kind", "half"))
        self.half, self.kind = mesh.get_group("half"), KINDS[mesh.get_local_rank("kind")]
        self.running_loss = RunningLoss()

    def get_process_groups(self) -> dict[str, dist.ProcessGroup]:
        return {**super().get_process_groups(), "half": self.half}

    def get_state_components(self) -> list[StateComponent]:
        own = StateComponent(
            "running_loss",
            self.running_loss,
            SharingPattern.PER_GROUP,
            process_group_name="half",  # The groups with identical copies.
            validate_replication=True,
        )
        return [*super().get_state_components(), own]

    def _forward_backward_step(self, input_dict: dict[str, Tensor], labels: Tensor) -> Tensor:
        loss = super()._forward_backward_step(input_dict, labels)
        mean = loss / dist.get_world_size(self.half)
        dist.all_reduce(mean, group=self.half)
        self.running_loss.value = 0.9 * self.running_loss.value + 0.1 * mean
        return loss


@record_entry_point
def main() -> None:
    env = DistributedEnvironment()
    size_of_half = env.world_size // 2
    half, place = divmod(env.rank, size_of_half)
    text = "".join(standard_library_documents(300_000)) if half == 0 else " ".join(map(str, range(60_000)))
    rows = torch.tensor(list(text.encode()[: 32 * 4000])).view(-1, 32)[place::size_of_half]
    args = DDPTrainingArguments(
        output_dir="runs/custom_trainer",
        max_steps=60,
        dispatch_batches=False,
        data_is_sharded=True,  # Each rank reads its own shard.
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=20,
        save_steps=30,
        seed=1,
    )
    trainer = TwoKindsTrainer(
        args=args,
        distributed_env=env,
        model_init=lambda: nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 256)),
        train_dataset=[{"input": row, "labels": row} for row in rows],
    )
    trainer.train()
    means = [None] * dist.get_world_size()
    dist.all_gather_object(means, f"{trainer.kind} {trainer.running_loss.value.item():.3f}")
    if dist.get_rank() == 0:
        print("running loss by rank:", ", ".join(map(str, means)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
