"""Training loops that the step benchmark compares, all with the same model, data, fused AdamW and linear schedule.

    python benchmarks/step_contenders.py NAME

The command runs one loop up to its first optimizer step, and prints the CPU time of the process. This module imports
only torch. Each contender imports its packages when it runs, since imports are part of the time to the first step.
"""

import contextlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

LOGGING_STEPS = 10
_NUM_STEPS = 1_000_000
LEARNING_RATE = 1e-4
# Large enough that no measurement reaches the end of an epoch, since its cost differs between loops.
_NUM_SAMPLES = 2**19
_VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """Model dimensions and batch shape."""

    name: str
    width: int
    num_blocks: int
    batch_size: int
    sequence_length: int


SIZES = (Size("nano", 32, 2, 4, 32), Size("1M", 144, 4, 4, 64), Size("10M", 384, 6, 2, 64))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = width // 16
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(-2))
        return hidden + self.down(functional.silu(self.up(self.mlp_norm(hidden))))


class Decoder(nn.Module):
    """Small language model that computes its loss if labels are passed."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, size.width)
        self.blocks = nn.ModuleList(_Block(size.width) for _ in range(size.num_blocks))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, _VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        if labels is None:
            return {"logits": logits}
        targets = functional.pad(labels, (0, 1), value=-100)[..., 1:]
        return {"loss": functional.cross_entropy(logits.flatten(0, -2), targets.flatten()), "logits": logits}


class _Samples(Dataset[Tensor]):
    """Samples that are slices of one random byte sequence."""

    def __init__(self, sequence_length: int) -> None:
        self._length = sequence_length
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(_VOCABULARY, (2**16,), generator=generator)

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        start = index % (len(self._tokens) - self._length)
        return self._tokens[start : start + self._length]


@dataclass
class Task:
    """Input of a contender, which trains until something raises."""

    size: Size
    directory: str
    """Output directory of the contender."""
    on_step: Callable[[], None] = lambda: None
    """Called once per step, at the same point of every step: here when a batch is collated, in every loop."""
    model: Decoder = field(init=False)
    dataset: _Samples = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Decoder(self.size)
        self.dataset = _Samples(self.size.sequence_length)

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        self.on_step()
        input_ids = torch.stack(samples)
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, self.size.batch_size, shuffle=True, collate_fn=self.collate)

    def optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / _NUM_STEPS))


def measure_norm(parameters: Sequence[nn.Parameter]) -> None:
    torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])


def train_bare(
    task: Task,
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    after_backward: Callable[[Sequence[nn.Parameter]], None] = lambda parameters: None,
) -> None:
    optimizer = task.optimizer()
    scheduler = task.scheduler(optimizer)
    parameters = list(model.parameters())
    model.train()
    for step, batch in enumerate(batches, start=1):
        loss = model(**batch)["loss"]
        loss.backward()
        after_backward(parameters)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % LOGGING_STEPS == 0:
            print(step, loss.item(), scheduler.get_last_lr()[0])


def _bare(task: Task) -> None:
    train_bare(task, task.model, task.loader())


def _bare_with_norm(task: Task) -> None:
    train_bare(task, task.model, task.loader(), after_backward=measure_norm)


def train_ours(task: Task, trainer: Callable[..., Any], arguments: Callable[..., Any], **settings: Any) -> None:
    args = arguments(
        output_dir=task.directory,
        per_device_train_batch_size=task.size.batch_size,
        learning_rate=LEARNING_RATE,
        max_steps=_NUM_STEPS,
        logging_steps=LOGGING_STEPS,
        save_strategy="no",
        use_cpu=True,
        seed=0,
        **settings,
    )
    trainer(args=args, model=task.model, train_dataset=task.dataset, data_collator=task.collate).train()


def _ours(task: Task) -> None:
    from forgather.ml.trainer.trainer import Trainer, TrainingArguments

    train_ours(task, Trainer, TrainingArguments)


def train_transformers(task: Task, **settings: Any) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=task.directory,
        per_device_train_batch_size=task.size.batch_size,
        learning_rate=LEARNING_RATE,
        max_steps=_NUM_STEPS,
        logging_steps=LOGGING_STEPS,
        optim="adamw_torch_fused",
        lr_scheduler_type="linear",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        use_cpu=True,
        **settings,
    )
    Trainer(args=arguments, model=task.model, train_dataset=task.dataset, data_collator=task.collate).train()


def train_accelerate(task: Task) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = task.optimizer()
    model, optimizer, loader, scheduler = accelerator.prepare(task.model, plain, task.loader(), task.scheduler(plain))
    model.train()
    for step, batch in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step % LOGGING_STEPS == 0:
            accelerator.print(step, loss.item(), scheduler.get_last_lr()[0])


def train_lightning(task: Task, *, devices: int = 1, strategy: str = "auto") -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = self.model(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = task.optimizer()
            return [optimizer], [{"scheduler": task.scheduler(optimizer), "interval": "step"}]

    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=_NUM_STEPS,
        max_epochs=-1,
        logger=CSVLogger(task.directory),
        log_every_n_steps=LOGGING_STEPS,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=task.directory,
    )
    trainer.fit(Module(), task.loader())


def train_fabric(task: Task, *, devices: int = 1, strategy: str = "auto") -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    plain = task.optimizer()
    scheduler = task.scheduler(plain)
    model, optimizer = fabric.setup(task.model, plain)
    model.train()
    for step, batch in enumerate(fabric.setup_dataloaders(task.loader()), start=1):
        loss = model(**batch)["loss"]
        fabric.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % LOGGING_STEPS == 0:
            fabric.print(step, loss.item(), scheduler.get_last_lr()[0])


BARE = "bare loop"
BARE_WITH_NORM = "bare loop with gradient norm"
OURS = "Forgather Trainer"
_T = TypeVar("_T", bound=Task)
Contenders = Mapping[str, tuple[Callable[[_T], None], str]]
"""Training function of each contender, and the module that it requires."""
_CONTENDERS: Contenders[Task] = {
    BARE: (_bare, "torch"),
    BARE_WITH_NORM: (_bare_with_norm, "torch"),
    OURS: (_ours, "forgather"),
    "Lightning Fabric": (train_fabric, "lightning"),
    "accelerate": (train_accelerate, "accelerate"),
    "transformers.Trainer": (train_transformers, "transformers"),
    "Lightning Trainer": (train_lightning, "lightning"),
}


def installed(contenders: Contenders[Any] = _CONTENDERS) -> Iterator[str]:
    """Yield the names of contenders with an installed module."""
    for name, (_, module) in contenders.items():
        if importlib.util.find_spec(module) is not None:
            yield name


def run(name: str, task: Task, contenders: Contenders[Any] = _CONTENDERS) -> None:
    """Train until something raises."""
    contenders[name][0](task)
    raise RuntimeError(f"{name} ended too early, after {_NUM_STEPS} steps or an epoch.")


class _FirstStepDone(BaseException):
    """Raised inside a training loop to end it. It is not an Exception, since loops may catch those."""


def _run_to_first_step(name: str) -> None:
    output = sys.stdout
    # The output of the contender must not mix with the result.
    sys.stdout = sys.stderr

    def end(*_: Any) -> None:
        print(time.process_time(), file=output, flush=True)
        raise _FirstStepDone

    register_optimizer_step_post_hook(end)
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(_FirstStepDone):
        run(name, Task(SIZES[0], directory))


if __name__ == "__main__":
    _run_to_first_step(sys.argv[1])
