"""One rank of the checkpoint section of the FSDP2 benchmark: memory of the state, time of saves and loads of one strategy.

    python benchmarks/fsdp2_checkpoint_rank.py DIRECTORY KIND MEGABYTES REPEATS

The trainer takes two steps, then saves and loads its state. Rank 0 writes the results to the directory.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fsdp2_contenders import LAYERS
from local_ranks import RESULT_FILE
from rank_runner import TIMEOUT, gather
from step_contenders import Decoder, Size, Task
from torch import Tensor, nn

from forgather import DDPTrainer, DDPTrainingArguments, Trainer, TrainingArguments
from forgather.ml.checkpoint.sharding.sharded_tensors import local_part
from forgather.ml.trainer.fsdp2 import FSDP2Trainer, FSDP2TrainingArguments

KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "Trainer": (Trainer, TrainingArguments, 1),
    "DDPTrainer": (DDPTrainer, DDPTrainingArguments, 2),
    "FSDP2Trainer": (FSDP2Trainer, partial(FSDP2TrainingArguments, fsdp2=LAYERS), 2),
}
"""Trainer, arguments and number of ranks of each strategy."""
_WIDTH = 512
_BYTES_PER_PARAMETER = 3 * 4


def size_of(num_megabytes: int) -> Size:
    """Return a model with weights and two moments of about this size together."""
    num_parameters = num_megabytes * 1e6 / _BYTES_PER_PARAMETER
    return Size("saved", _WIDTH, max(1, round(num_parameters / (12 * _WIDTH**2))), 1, 16)


def _make_trainer(kind: str, directory: str, size: Size) -> Any:
    trainer, arguments, _ = KINDS[kind]
    task = Task(Size("data", 16, 1, size.batch_size, size.sequence_length), directory)
    args = arguments(
        output_dir=directory,
        max_steps=2,
        per_device_train_batch_size=size.batch_size,
        save_strategy="no",
        logging_strategy="no",
        max_grad_norm=1.0,
        use_cpu=True,
    )
    return trainer(
        args=args,
        model_init=lambda: Decoder(size),
        train_dataset=task.dataset,
        data_collator=task.collate,
        default_callbacks=False,
    )


def _held_bytes(model: nn.Module, optimizer: Any) -> int:
    """Return the bytes of weights and moments on this rank."""
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    parts = [local_part(tensor.detach()) for tensor in (*model.parameters(), *moments)]
    return sum(part.numel() * part.element_size() for part in parts)


def _timed(work: Callable[[], Any], num_ranks: int) -> float:
    """Return the seconds until the slowest rank has finished."""
    if num_ranks > 1:
        dist.barrier()
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    return seconds if num_ranks == 1 else max(gather(seconds, dist.group.WORLD))


def main() -> None:
    directory, kind, megabytes, repeats = sys.argv[1:]
    num_ranks = KINDS[kind][2]
    if num_ranks > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    output = str(Path(directory, "run"))
    trainer = _make_trainer(kind, output, size_of(int(megabytes)))
    trainer.train()
    model = trainer.unwrapped_model()
    saves = [_timed(trainer.save_checkpoint, num_ranks) for _ in range(int(repeats))]
    loads = [_timed(trainer.load_checkpoint, num_ranks) for _ in range(int(repeats))]
    path = Path(trainer.save_checkpoint())
    is_first = num_ranks == 1 or dist.get_rank() == 0
    if is_first:
        files = [file for file in path.iterdir() if file.suffix in (".safetensors", ".pt")]
        result = {
            "num_bytes": sum(file.stat().st_size for file in files),
            "saves": saves,
            "loads": loads,
            "held": _held_bytes(model, trainer.optimizer),
        }
        Path(directory, RESULT_FILE).write_text(json.dumps(result))
    if num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    if is_first:
        shutil.rmtree(output)


if __name__ == "__main__":
    main()
