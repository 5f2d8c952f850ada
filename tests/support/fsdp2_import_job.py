"""FSDP2 job with a model_init that imports transformers first: `python -m tests.support.fsdp2_import_job DIRECTORY`.

Prints a digest of the weights at the start, and of the weights that one device would have.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather.ml.trainer.fsdp2 import FSDP2Trainer
from forgather.ml.trainer.setup.seeding import seed_everything

SEED = 5


def model_init() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    # Large enough for tensors with deferred values.
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


class Noting:
    """Callback that keeps the weights before the first step."""

    changes_control = False

    def on_train_begin(self, args: Any, state: Any, control: Any, trainer: Any, **_: Any) -> None:
        weights = trainer.unwrapped_model().state_dict()
        self.weights: dict[str, Tensor] = {name: tensor.full_tensor() for name, tensor in weights.items()}


def main(directory: str) -> None:
    torch.set_num_threads(1)
    assert "transformers" not in sys.modules, "this job is about the first import"
    noting = Noting()
    FSDP2Trainer(
        args={"output_dir": directory, "use_cpu": True, "max_steps": 1, "seed": SEED, "save_strategy": "no"},
        model_init=model_init,
        train_dataset=[{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 4,
        callbacks=[noting],
        default_callbacks=False,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
    ).train()
    seed_everything(SEED)
    expected = model_init().state_dict()
    equal = expected.keys() == noting.weights.keys() and all(
        torch.equal(noting.weights[name], tensor) for name, tensor in expected.items()
    )
    print(f"equal: {equal}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
