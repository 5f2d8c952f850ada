"""Pipeline parallelism with torch.distributed.pipelining: trainer, arguments and model splitters.

Names are imported on first use.
"""

from typing import TYPE_CHECKING

from forgather._lazy import lazily

if TYPE_CHECKING:
    from forgather.ml.trainer.pipeline.model_splitter import ModelSplitter
    from forgather.ml.trainer.pipeline.pipeline_arguments import PipelineTrainingArguments
    from forgather.ml.trainer.pipeline.pipeline_trainer import PipelineTrainer
    from forgather.ml.trainer.pipeline.splitters.automatic import create_automatic_splitter
    from forgather.ml.trainer.pipeline.splitters.causal_lm import (
        create_causal_lm_splitter,
        create_manual_causal_lm_splitter,
    )

__all__ = [
    "ModelSplitter",
    "PipelineTrainer",
    "PipelineTrainingArguments",
    "create_automatic_splitter",
    "create_causal_lm_splitter",
    "create_manual_causal_lm_splitter",
]

__getattr__ = lazily(
    __name__,
    {
        "ModelSplitter": "model_splitter",
        "PipelineTrainer": "pipeline_trainer",
        "PipelineTrainingArguments": "pipeline_arguments",
        "create_automatic_splitter": "splitters.automatic",
        "create_causal_lm_splitter": "splitters.causal_lm",
        "create_manual_causal_lm_splitter": "splitters.causal_lm",
    },
)
