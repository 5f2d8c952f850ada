"""Training loops that the pipeline benchmark compares, all with the same stages, batches and fused AdamW."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from step_contenders import LEARNING_RATE, LOGGING_STEPS, Contenders, Size, Task
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from forgather.ml.trainer.pipeline import PipelineTrainer, PipelineTrainingArguments, create_causal_lm_splitter
from forgather.ml.trainer.pipeline.pipeline_utils import pipeline_stage_indices
from forgather.ml.trainer.pipeline.schedules import SCHEDULES, find_schedule, traits_of

NUM_RANKS = 2
NUM_MICROBATCHES = 4
SIZES = (Size("1M", 128, 4, 8, 128), Size("10M", 384, 6, 8, 128))
# Zero-bubble schedules detach stage outputs, and the plain stages of the bare loop do not support that.
SCHEDULE_NAMES = tuple(traits.name for traits in SCHEDULES.values() if not traits.splits_backward)
_NUM_STEPS = 1_000_000
_VOCABULARY = 1024
_HEAD_WIDTH = 32


def make_model(size: Size) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=size.width,
            intermediate_size=size.width * 5 // 2,
            num_hidden_layers=size.num_blocks,
            num_attention_heads=size.width // _HEAD_WIDTH,
            max_position_embeddings=size.sequence_length,
        )
    )


@dataclass
class PipelineTask(Task):
    """Task of a contender on each rank; a batch is for the full pipeline."""

    schedule: str = "gpipe"
    model: Any = field(init=False)
    parameters: dict[str, nn.Parameter] = field(init=False, default_factory=dict)
    """Parameters that this rank trains, by FQN in the full model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        torch.manual_seed(0)
        self.model = make_model(self.size)

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        input_ids = torch.stack(samples)
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def ordered_loader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, self.size.batch_size, collate_fn=self.collate)

    def adamw(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
        """Return an optimizer that calls `on_step` after each step."""
        self.parameters = dict(named_parameters)
        optimizer = torch.optim.AdamW(self.parameters.items(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        optimizer.register_step_post_hook(lambda *_: self.on_step())
        return optimizer


def _stages(task: PipelineTask) -> list[PipelineStage]:
    """Return the stages of this rank, split as by `PipelineTrainer`, with static shapes."""
    traits = traits_of(find_schedule(task.schedule))
    num_stages = NUM_RANKS * traits.default_stages_per_rank
    indices = pipeline_stage_indices(NUM_RANKS, num_stages, traits.stage_type)
    device, rank, group = torch.device("cpu"), dist.get_rank(), dist.group.WORLD
    assert group is not None, "each rank calls init_process_group first"
    shape = (task.size.batch_size // NUM_MICROBATCHES, task.size.sequence_length)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    hidden = torch.empty((*shape, task.size.width), device="meta", requires_grad=True)
    logits = torch.empty((*shape, _VOCABULARY), device="meta", requires_grad=True)
    between = [tokens, *[hidden] * (num_stages - 1), logits]
    modules, *_ = create_causal_lm_splitter()(
        task.model, (tokens,), {}, indices, True, device=device, rank=rank, pp_group=group
    )
    return [
        PipelineStage(modules[i], i, num_stages, device, between[i], between[i + 1], group=group) for i in indices[rank]
    ]


def _train_bare(task: PipelineTask, *, measures_norm: bool = False) -> None:
    num_targets = task.size.batch_size * (task.size.sequence_length - 1)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        targets = functional.pad(labels, (0, 1), value=-100)[..., 1:]
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / num_targets

    stages = _stages(task)
    schedule_class = find_schedule(task.schedule)
    own = stages if traits_of(schedule_class).is_multistage else stages[0]
    schedule = schedule_class(own, n_microbatches=NUM_MICROBATCHES, loss_fn=loss_fn, scale_grads=False)
    optimizer = task.adamw(pair for stage in stages for pair in stage.submod.named_parameters())
    parameters = list(task.parameters.values())
    has_first, has_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    for batch in task.ordered_loader():
        inputs = (batch["input_ids"],) if has_first else ()
        schedule.step(*inputs, target=batch["labels"] if has_last else None, losses=[], return_outputs=False)
        if measures_norm:
            square = nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None]) ** 2
            dist.all_reduce(square)
            square.sqrt()
        optimizer.step()
        optimizer.zero_grad()


def _bare_with_norm(task: PipelineTask) -> None:
    _train_bare(task, measures_norm=True)


def _ours(task: PipelineTask) -> None:
    args = PipelineTrainingArguments(
        output_dir=task.directory,
        per_device_train_batch_size=task.size.batch_size,
        n_microbatches=NUM_MICROBATCHES,
        learning_rate=LEARNING_RATE,
        max_steps=_NUM_STEPS,
        logging_steps=LOGGING_STEPS,
        save_strategy="no",
        shuffle=False,
        use_cpu=True,
        seed=0,
    )
    PipelineTrainer(
        args=args,
        model_init=lambda: make_model(task.size),
        train_dataset=task.dataset,
        data_collator=task.collate,
        pipe_schedule_factory=task.schedule,
        optimizer_factory=task.adamw,
        default_callbacks=False,
    ).train()


BARE = "bare schedule loop"
BARE_WITH_NORM = "bare loop with gradient norm"
OURS = "Forgather"
CONTENDERS: Contenders[PipelineTask] = {
    BARE: (_train_bare, "torch"),
    BARE_WITH_NORM: (_bare_with_norm, "torch"),
    OURS: (_ours, "forgather"),
}
