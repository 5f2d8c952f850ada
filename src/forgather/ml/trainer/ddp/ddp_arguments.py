"""Arguments of DDP training: options of DistributedDataParallel, post-local SGD and batch dispatch.

Combinations that cannot work raise ValueError when the arguments are created. `DDPTrainer` takes them.
"""

from dataclasses import dataclass, field

from forgather.ml.trainer.arguments.checks import check_shards
from forgather.ml.trainer.arguments.training_arguments import ArgumentGroup, TrainingArguments


@dataclass(kw_only=True)
class DDPArguments(ArgumentGroup):
    """Options of torch's DistributedDataParallel, and of the optimizer step on its ranks."""

    broadcast_buffers: bool = True
    """Broadcast the buffers of rank 0 before each forward pass: all in the first pass, later the changed ones only."""
    init_sync: bool = True
    bucket_cap_mb: float | None = None
    """Size of an all-reduce bucket in MiB; None: torch's default of 25."""
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    """Store gradients as views of the all-reduce buckets, which saves one copy of the gradients."""
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False
    shard_optimizer: bool = False
    """ZeRO-1: each of N ranks keeps the optimizer state of 1/N of the parameters, with the same result."""


@dataclass(kw_only=True)
class PostLocalSGDArguments(ArgumentGroup):
    """Options of post-local SGD: after some steps, ranks update independently and average their weights periodically."""

    enabled: bool = False
    start_step: int = 500
    """Number of initial steps with the usual gradient all-reduce."""
    period: int = 4
    """Steps between two weight averages."""
    post_local_gradient_allreduce: bool = False
    """Continue to all-reduce gradients among the ranks of a node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("start_step", 0), ("period", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"post_local_sgd.{name}={getattr(self, name)!r} cannot be used: it must be {least} or more."
                )


@dataclass(kw_only=True)
class DDPTrainingArguments(TrainingArguments):
    """Training arguments plus batch dispatch and gradient reduction."""

    dispatch_batches: bool = True
    """True: rank 0 reads the data for all ranks. False: every rank reads its own shard."""
    dispatch_eval_batches: bool | None = None
    """The same for evaluation; None: equal to dispatch_batches."""
    ddp: DDPArguments = field(default_factory=DDPArguments)
    post_local_sgd: PostLocalSGDArguments = field(default_factory=PostLocalSGDArguments)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shards(self.data_is_sharded, self.dispatch_batches and self.dispatch_eval_batches is not False)
        if self.post_local_sgd.enabled and self.mixed_precision == "fp16":
            raise ValueError(
                "post_local_sgd.enabled=True cannot be combined with mixed_precision='fp16': ranks overflow independently, "
                "and one rank could skip a step while the others average. Use 'bf16'."
            )
        if self.post_local_sgd.enabled and self.param_precision != "fp32":
            raise ValueError(
                f"param_precision={self.param_precision!r} cannot be combined with post_local_sgd.enabled=True: torch averages "
                "the bfloat16 weights of the ranks, which rounds them again at every average. Turn one of the two off."
            )
        if self.post_local_sgd.enabled and self.replica_check_steps:
            raise ValueError(
                f"replica_check_steps={self.replica_check_steps} cannot be combined with post_local_sgd.enabled=True: between "
                "two averages the replicas differ on purpose. Turn one of the two off."
            )
        if self.ddp.static_graph and self.gradient_accumulation_steps > 1:
            raise ValueError(
                "ddp.static_graph=True cannot be combined with gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}: torch's DDP fails when gradients of a static graph are not reduced in "
                "every pass. Set ddp.static_graph=False or gradient_accumulation_steps=1."
            )
        if self.post_local_sgd.enabled and self.ema_decay is not None:
            raise ValueError(
                f"ema_decay={self.ema_decay} cannot be combined with post_local_sgd.enabled=True: between two averages, ranks "
                "have different weights, so their EMA weights would differ. Turn one of the two off."
            )
        if self.post_local_sgd.enabled and self.nonfinite_grad == "skip":
            raise ValueError(
                "nonfinite_grad='skip' cannot be combined with post_local_sgd.enabled=True: one rank could skip a step while "
                "the others average. Use 'stop'."
            )
        if self.ddp.shard_optimizer:
            self._refuse_sharding()
        if self.fuse_optim_with_backward:
            raise ValueError(
                "fuse_optim_with_backward=True cannot be combined with DDP: a parameter would be updated before its gradient "
                "is reduced over the ranks. Turn it off, or use Trainer on one device."
            )

    def _refuse_sharding(self) -> None:
        if self.post_local_sgd.enabled:
            raise ValueError(
                "ddp.shard_optimizer=True cannot be combined with post_local_sgd.enabled=True: between two averages every rank "
                "updates all weights independently, so it needs all moments. Turn one of the two off."
            )
        if self.ema_decay is not None and self.param_precision == "bf16_master":
            raise ValueError(
                f"ddp.shard_optimizer=True cannot be combined with ema_decay={self.ema_decay} and param_precision="
                "'bf16_master': the EMA averages float32 master weights, and a rank lacks the master weights of the other "
                "ranks. Use param_precision='bf16_stochastic' or 'fp32', or turn one of the three off."
            )
