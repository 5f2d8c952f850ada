"""Arguments of data-parallel training."""

from dataclasses import dataclass, field

from forgather.ml.trainer.arguments.training_arguments import ArgumentGroup, TrainingArguments


@dataclass(kw_only=True)
class DDPArguments(ArgumentGroup):
    """Passed on to torch's DistributedDataParallel."""

    broadcast_buffers: bool = True
    """Give all ranks rank 0's buffers before each forward pass."""
    init_sync: bool = True
    bucket_cap_mb: float | None = None
    """The size of a reduction; None is torch's 25."""
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    """Gradients live in the memory that is reduced: one copy of them less."""
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False


@dataclass(kw_only=True)
class PostLocalSGDArguments(ArgumentGroup):
    """Ranks that step on their own after a while, and average their weights only now and then."""

    enabled: bool = False
    start_step: int = 500
    """So many steps first, with gradients reduced as usual."""
    period: int = 4
    """Steps between two averages."""
    post_local_gradient_allreduce: bool = False
    """Go on reducing gradients among the ranks of a node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("start_step", 0), ("period", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"post_local_sgd.{name}={getattr(self, name)!r} cannot be used: it must be {least} or more."
                )


@dataclass(kw_only=True)
class DDPTrainingArguments(TrainingArguments):
    """Adds how batches reach the ranks, and how gradients are reduced."""

    dispatch_batches: bool = True
    """Rank 0 reads for all; False: every rank reads its own part."""
    dispatch_eval_batches: bool | None = None
    """The same for evaluation; None: as dispatch_batches."""
    ddp: DDPArguments = field(default_factory=DDPArguments)
    post_local_sgd: PostLocalSGDArguments = field(default_factory=PostLocalSGDArguments)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.post_local_sgd.enabled and self.mixed_precision == "fp16":
            raise ValueError(
                "post_local_sgd.enabled=True cannot be combined with mixed_precision='fp16': ranks that step on their own "
                "overflow on their own too, and one would leave out a step in which the others average. Use 'bf16'."
            )
        if self.ddp.static_graph and self.gradient_accumulation_steps > 1:
            raise ValueError(
                "ddp.static_graph=True cannot be combined with gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}: torch's DDP fails when gradients of a static graph are not reduced in "
                "every pass. Set one of them back."
            )
        if self.post_local_sgd.enabled and self.ema_decay is not None:
            raise ValueError(
                f"ema_decay={self.ema_decay} cannot be combined with post_local_sgd.enabled=True: between two averages ranks "
                "have different weights, and would keep different averages of them over time. Turn one of the two off."
            )
        if self.post_local_sgd.enabled and self.nonfinite_grad == "skip":
            raise ValueError(
                "nonfinite_grad='skip' cannot be combined with post_local_sgd.enabled=True: ranks that step on their own would "
                "leave out a step in which the others average. Use 'stop'."
            )
        if self.fuse_optim_with_backward:
            raise ValueError(
                "fuse_optim_with_backward=True cannot be combined with DDP: a parameter would be updated before its gradient "
                "is reduced over the ranks. Turn it off, or train with the trainer for one device."
            )
