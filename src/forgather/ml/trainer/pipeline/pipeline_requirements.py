"""Requirements of pipelines: checks that reject arguments, objects, models and optimizers which cannot work.

Each check raises ValueError before the first step, as early as its inputs are known. Called by `PipelineTrainer` and
`StageSetup`.
"""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from forgather.ml.distributed import DistributedEnvInterface
from forgather.ml.distributed.environment import get_world_size
from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.loop.scheduler_state import fits_any_groups
from forgather.ml.trainer.pipeline.pipeline_arguments import PipelineTrainingArguments
from forgather.ml.trainer.pipeline.schedules import ScheduleChoice, check_layout
from forgather.ml.trainer.pipeline.splitters.example_batch import sample_batch
from forgather.ml.trainer.setup.devices import moved
from forgather.ml.trainer.setup.seeding import undisturbed_random_numbers
from forgather.ml.trainer.step_loss.own_loss import compared, reason_for_own_loss
from forgather.ml.trainer.trainer_types import BaseDataset, DataCollatorT, LRSchedulerT, OptimizerT

logger = logging.getLogger(__name__)


def require_builders(owner: str, ready: Mapping[str, object]) -> None:
    """Raise ValueError if the caller passed a model, optimizer or scheduler instead of a function that builds it.

    `ready` maps "model", "optimizer" and "scheduler" to the objects that were passed, or None.
    """
    if ready["model"] is not None:
        raise ValueError(
            f"{owner} does not take a ready model, because every rank builds only its own stages. Pass "
            "model_init, a function without arguments that builds the model, instead of model."
        )
    for name in ("optimizer", "scheduler"):
        if ready[name] is not None:
            raise ValueError(
                f"{owner} does not take a ready {name}, because the parameters of its stages do not exist yet. Pass "
                "optimizer_factory or optimizer_cls_and_kwargs, and lr_scheduler_factory."
            )


def require_schedule(args: PipelineTrainingArguments, schedule: ScheduleChoice) -> None:
    """Raise ValueError for arguments that the schedule cannot run with.

    Checks that depend on the number of ranks run later, in `ScheduleChoice.prepare`.
    """
    traits = schedule.traits
    if traits.splits_backward and args.torch_compile:
        raise ValueError(
            f"torch_compile=True cannot be combined with schedule={traits.name!r}: it computes gradients of inputs and "
            "weights separately, which compiled stages do not support. Turn torch_compile off, or use 1f1b or interleaved1f1b."
        )
    if traits.splits_backward and args.gradient_checkpointing == "selective":
        raise ValueError(
            f"gradient_checkpointing='selective' cannot be combined with schedule={traits.name!r}: it computes gradients of "
            "inputs and weights in two passes, but the kept results serve one pass. Use gradient_checkpointing='full', or "
            "1f1b or interleaved1f1b."
        )
    if traits.splits_backward and args.fuse_optim_with_backward:
        raise ValueError(
            f"fuse_optim_with_backward=True cannot be combined with schedule={traits.name!r}: it computes gradients of "
            "weights separately from the backward pass that would update them. Use gpipe, or turn it off."
        )
    if args.is_multistage and not traits.is_multistage:
        raise ValueError(
            f"is_multistage=True cannot be used with schedule={traits.name!r}, which runs one stage per rank. Remove "
            "is_multistage, or choose another schedule."
        )
    if args.pp_stage_type == "v" and traits.stage_type != "v":
        raise ValueError(
            f"pp_stage_type='v' cannot be used with schedule={traits.name!r}, which assigns stages in a loop. Remove "
            "pp_stage_type, or choose zbv or dualpipev."
        )
    if args.stages_per_rank > 1 and not traits.is_multistage:
        # This always raises, for any number of ranks. Two ranks are only a placeholder in the message.
        check_layout(schedule.schedule_class, 2, args.stages_per_rank, args.n_microbatches)


def require_two_ranks(owner: str, env: DistributedEnvInterface | None) -> None:
    if (get_world_size() if env is None else env.world_size) < 2:
        raise ValueError(
            f"{owner} needs at least two ranks, but this job has one. Start it with forgather train "
            "--nproc 2 (or torchrun --nproc-per-node 2), or use Trainer on one device."
        )


def require_untied_weights(args: PipelineTrainingArguments) -> None:
    """Raise ValueError for arguments that do not work with tied weights; called only if stages share a weight."""
    if args.fuse_optim_with_backward:
        raise ValueError(
            "fuse_optim_with_backward=True cannot be combined with weights that are tied between stages: their gradients "
            "are summed over ranks before an update. Turn it off, or set tie_word_embeddings=False in the model's "
            "configuration."
        )


def require_whole_model(owner: str, model: object, whole: nn.Module) -> None:
    """Raise ValueError if `_wrap` replaced the model: the stages run, and the replacement never would."""
    if model is not whole:
        raise ValueError(
            f"{owner}._wrap replaced self.model by a {type(model).__name__}, which would never run: in a pipeline, self.model "
            "is the full model without memory, and only the stages in self.pipeline_modules run. Change these modules in "
            "_prepare_model, after super()._prepare_model(), or change model_init."
        )


# --- losses


class OwnLossCheck:
    """Check that a model works with the causal loss, for trainers without a loss function of the user."""

    def __init__(
        self, given_loss: object, dataset: BaseDataset | None, collate: DataCollatorT | None, amp: AMPContext
    ) -> None:
        self._is_needed = given_loss is None
        self._dataset = dataset
        self._collate = collate
        self._amp = amp

    def look_at_whole(self, model: nn.Module) -> None:
        """Raise ValueError if class or config show that the model needs its own loss; works on the meta device."""
        reason = reason_for_own_loss(model) if self._is_needed else None
        if reason is not None:
            raise _own_loss_refusal(model, reason)

    def look_at_source(self, source: nn.Module) -> None:
        """Raise ValueError if the loss of a model with values differs from the causal loss on two samples."""
        if not self._is_needed:
            return
        # Datasets and collators may draw random numbers. The check must not change the random state of training.
        with undisturbed_random_numbers():
            sample = sample_batch(source, self._dataset, self._collate, 2)
        device = next((parameter.device for parameter in source.parameters()), torch.device("cpu"))
        inputs = dict(moved(sample, device))
        labels = inputs.pop("labels", None)
        if not isinstance(labels, Tensor):
            return
        with self._amp.autocast():
            comparison = compared(source, inputs, labels)
        if comparison.problem:
            logger.info("Could not check whether the model needs its own loss: %s", comparison.problem)
        if comparison.differs and comparison.causal is not None:
            raise _own_loss_refusal(
                source, f"the loss that it computes from labels is not the causal loss: {comparison}"
            )


def _own_loss_refusal(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} needs its own loss, since {reason}, but a pipeline computes the loss from the "
        "logits of the last stage. Pass compute_loss_func, a function of (logits, labels), or train on one device."
    )


# --- optimizers


def learning_rates(optimizer: OptimizerT) -> list[float | None]:
    """Return the initial learning rate of each parameter group; None for optimizers that compute their own rate."""
    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    return [None if rate is None else float(rate) for rate in rates]


def require_same_rates(rates: Sequence[list[float | None]], lr_scheduler: LRSchedulerT) -> None:
    """Raise ValueError if learning rates differ between ranks and the LR scheduler depends on parameter groups."""
    # The scheduler is saved once for all ranks, so its state must fit the parameter groups of every rank.
    if any(one != rates[0] for one in rates) and not fits_any_groups(lr_scheduler):
        listing = "; ".join(f"rank {rank}: {own}" for rank, own in enumerate(rates))
        raise ValueError(
            f"The optimizers of the stages have parameter groups with different learning rates ({listing}), but "
            f"{type(lr_scheduler).__name__} has one state for all ranks, which would not fit after a resume. "
            "Use optimizer_groups, which gives all ranks the same groups, or set lr_scheduler_type."
        )
