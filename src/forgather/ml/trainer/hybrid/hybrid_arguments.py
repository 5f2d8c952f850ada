"""Arguments of several pipelines that train one model."""

from dataclasses import dataclass

from forgather.ml.trainer.pipeline.pipeline_arguments import PipelineTrainingArguments


@dataclass(kw_only=True)
class HybridTrainingArguments(PipelineTrainingArguments):
    """Adds how many pipelines there are, and how batches reach them."""

    dp_size: int | None = None
    """Pipelines, each with batches of its own; None: as many as pp_size makes of the ranks."""
    pp_size: int | None = None
    """Ranks of a pipeline; None: as many as dp_size leaves."""
    dispatch_batches: bool = True
    """Rank 0 reads for all; False: the first rank of each pipeline reads its own part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fuse_optim_with_backward:
            raise ValueError(
                "fuse_optim_with_backward=True cannot be combined with several pipelines: a parameter would be updated before "
                "its gradient is reduced over them. Turn it off, or train with one pipeline."
            )
        for name, least in (("dp_size", 1), ("pp_size", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} cannot be used: it must be {least} or more.")

    def sizes(self, world_size: int) -> tuple[int, int]:
        """Data-parallel and pipeline-parallel size on so many ranks."""
        dp_size, pp_size = self.dp_size, self.pp_size
        if dp_size is None and pp_size is None:
            raise ValueError(
                f"Neither dp_size nor pp_size is set, so that it is unknown how the {world_size} ranks form pipelines. Set "
                "pp_size to the number of ranks over which the model is divided."
            )
        if pp_size is None:
            assert dp_size is not None
            pp_size = world_size // dp_size
        if dp_size is None:
            dp_size = world_size // pp_size
        if dp_size * pp_size != world_size or pp_size < 2:
            raise ValueError(
                f"dp_size={self.dp_size} and pp_size={self.pp_size} do not fit the {world_size} ranks of this job: dp_size x "
                "pp_size must be their number, with at least two ranks to a pipeline. Change one of them, or --nproc."
            )
        return dp_size, pp_size
