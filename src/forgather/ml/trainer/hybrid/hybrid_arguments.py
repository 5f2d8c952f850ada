"""Arguments of hybrid training: several pipelines (dp_size) of several ranks each (pp_size).

dp_size x pp_size must equal the number of ranks. `HybridTrainer` takes these arguments.
"""

from dataclasses import dataclass

from forgather.ml.optim.named_optimizers import WHOLE_PARAMETERS
from forgather.ml.trainer.pipeline.pipeline_arguments import PipelineTrainingArguments

DP_STRATEGIES = ("replicate", "shard")


@dataclass(kw_only=True)
class HybridTrainingArguments(PipelineTrainingArguments):
    """Pipeline arguments plus the number of pipelines and the way batches reach them."""

    dp_size: int | None = None
    """Number of pipelines, each with separate batches; None: number of ranks / pp_size."""
    pp_size: int | None = None
    """Ranks per pipeline; None: number of ranks / dp_size."""
    dispatch_batches: bool = True
    """True: rank 0 reads the data for all ranks. False: the first rank of each pipeline reads its own shard."""
    dp_strategy: str = "replicate"
    """Stages of the pipelines: "replicate" keeps a copy of each stage in every pipeline. "shard" divides weights, gradients
    and optimizer state of a stage over the pipelines (FSDP2), and gathers the weights for each step. With mixed_precision,
    shards keep the dtype of the model, and autocast casts the gathered weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dp_strategy not in DP_STRATEGIES:
            raise ValueError(f"dp_strategy={self.dp_strategy!r} is not one of {', '.join(map(repr, DP_STRATEGIES))}.")
        if self.fuse_optim_with_backward:
            raise ValueError(
                "fuse_optim_with_backward=True cannot be combined with several pipelines: a parameter would be updated before "
                "its gradient is summed over all pipelines. Turn it off, or train with one pipeline."
            )
        if self.dp_strategy == "shard":
            self._refuse_with_shards()
        for name, least in (("dp_size", 1), ("pp_size", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} cannot be used: it must be {least} or more.")

    def _refuse_with_shards(self) -> None:
        if self.optim in WHOLE_PARAMETERS:
            raise ValueError(
                f"optim={self.optim!r} cannot be combined with dp_strategy='shard': {WHOLE_PARAMETERS[self.optim]}"
            )
        if self.param_precision != "fp32":
            raise ValueError(
                f"param_precision={self.param_precision!r} cannot be combined with dp_strategy='shard': shards already are the "
                "precise weights. Set mixed_precision='bf16' instead, or dp_strategy='replicate'."
            )
        if self.save_on_each_node:
            raise ValueError(
                "save_on_each_node=True cannot be combined with dp_strategy='shard': each rank needs the files of all ranks "
                "to resume. Turn it off, and use one output_dir for all nodes."
            )

    def sizes(self, world_size: int) -> tuple[int, int]:
        """Return the data-parallel and pipeline-parallel size for `world_size` ranks; raise ValueError if they do not fit."""
        dp_size, pp_size = self.dp_size, self.pp_size
        if dp_size is None and pp_size is None:
            raise ValueError(
                f"Neither dp_size nor pp_size is set, so the layout of the {world_size} ranks is unknown. Set "
                "pp_size to the number of ranks per pipeline."
            )
        if pp_size is None:
            assert dp_size is not None
            pp_size = world_size // dp_size
        if dp_size is None:
            dp_size = world_size // pp_size
        if dp_size * pp_size != world_size or pp_size < 2:
            raise ValueError(
                f"dp_size={self.dp_size} and pp_size={self.pp_size} do not fit the {world_size} ranks of this job: dp_size x "
                "pp_size must equal the number of ranks, with at least two ranks per pipeline. Change one of them, or --nproc."
            )
        return dp_size, pp_size
