"""Custom training loop that declares its state, saves, verifies and retains checkpoints, and resumes exactly."""

import torch

import forgather.ml.checkpoint as ckpt
from forgather.ml.distributed import from_env


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30)

    def get_state_components(self) -> list[ckpt.StateComponent]:
        return [
            ckpt.StateComponent("model", self.model, ckpt.SharingPattern.GLOBAL),
            ckpt.StateComponent("optimizer", self.optimizer, ckpt.SharingPattern.GLOBAL),
            ckpt.StateComponent("scheduler", self.scheduler, ckpt.SharingPattern.GLOBAL),
            ckpt.StateComponent("rng", ckpt.RNGState(), ckpt.SharingPattern.PER_RANK),
        ]


loop = Loop()
config = ckpt.CheckpointConfig(output_dir="own_loop", save_total_limit=None)
manager = ckpt.CheckpointManager(config, from_env(), loop, loop.model, retention=ckpt.LatestN(2) | ckpt.EveryNSteps(10))
print("resumed from", manager.load_checkpoint())  # The newest intact checkpoint; None on a fresh start.
for step in range(loop.scheduler.last_epoch + 1, 31):
    batch = torch.randn(16, 8)
    loss = (loop.model(batch) - batch.flip(1)).square().mean()
    loop.optimizer.zero_grad()
    loss.backward()
    loop.optimizer.step()
    loop.scheduler.step()
    if step % 4 == 0 or step == 30:
        assert ckpt.verify_checkpoint(manager.save_checkpoint(checkpoint_id=step)) == []
    print(step, loss.item(), flush=True)
manager.close()
