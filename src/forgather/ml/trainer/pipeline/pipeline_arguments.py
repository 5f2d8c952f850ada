"""Arguments of pipeline-parallel training: micro-batches, stages per rank and debug logs.

`PipelineTrainer` takes them, and `HybridTrainingArguments` extends them. Combinations that cannot work raise ValueError
when the arguments are created.
"""

from dataclasses import dataclass

from forgather.ml.trainer.arguments.checks import check_shards
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.pipeline.pipeline_utils import STAGE_TYPES


@dataclass(kw_only=True)
class PipelineTrainingArguments(TrainingArguments):
    """Training arguments plus the division of batches into micro-batches and of the model into stages."""

    n_microbatches: int = 4
    """Micro-batches per batch; per_device_train_batch_size must be divisible by it."""
    stages_per_rank: int = 1
    """Stages per rank; schedules that need several use at least two."""
    pp_stage_type: str = "loop"
    """Stages of a rank: "loop" (r, r+p, ...) or "v" (r, n-1-r). The schedule decides; "v" raises unless it agrees."""
    is_multistage: bool = False
    """True raises ValueError unless the schedule runs several stages per rank; False accepts any schedule."""
    record_schedule_step: int = 3
    """Step after each start whose computations are timed for `forgather report`, from 1; 0 times none."""
    debug_pipeline: bool = False
    """Log the actions of the schedule on each rank (level DEBUG of torch.distributed.pipelining)."""
    debug_split_model: bool = False
    """Log the modules of each stage."""
    debug_model_params: bool = False
    """Log the parameters of each rank."""
    debug_model_init: bool = False
    """Log how many initial tensors rank 0 distributes to the ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shards(self.data_is_sharded, getattr(self, "dispatch_batches", True))
        if self.pp_stage_type not in STAGE_TYPES:
            raise ValueError(f"pp_stage_type={self.pp_stage_type!r} is not one of {', '.join(map(repr, STAGE_TYPES))}.")
        for name in ("n_microbatches", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} cannot be used: it must be 1 or more.")
        if self.record_schedule_step < 0:
            raise ValueError(f"record_schedule_step={self.record_schedule_step} is negative. Set 0 to time no step.")
        if self.per_device_train_batch_size % self.n_microbatches:
            raise ValueError(
                f"per_device_train_batch_size={self.per_device_train_batch_size} is not divisible by n_microbatches="
                f"{self.n_microbatches}: a pipeline divides every batch into equal micro-batches. Make the batch size a "
                "multiple of n_microbatches, or change n_microbatches."
            )
        if self.mixed_precision == "fp16":
            raise ValueError(
                "mixed_precision='fp16' cannot be combined with a pipeline: stages would have to synchronise the loss scale "
                "in the middle of a backward pass. Use 'bf16'."
            )
        if self.fuse_optim_with_backward and self.n_microbatches > 1:
            raise ValueError(
                f"fuse_optim_with_backward=True cannot be combined with n_microbatches={self.n_microbatches}: a parameter "
                "would be updated after the first micro-batch, before the others. Set n_microbatches=1, or turn it off."
            )

    @property
    def micro_batch_size(self) -> int:
        """Rows of a micro-batch in training."""
        return self.per_device_train_batch_size // self.n_microbatches

    @property
    def eval_micro_batch_size(self) -> int:
        """Rows of a micro-batch in evaluation; the last batch may have fewer micro-batches."""
        # Rounded up: evaluation batches do not have to be divisible, because they are padded to full micro-batches.
        return -(-self.per_device_eval_batch_size // self.n_microbatches)
