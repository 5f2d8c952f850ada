"""Pipeline parallelism by torch.distributed.pipelining."""

from typing import TYPE_CHECKING

from forgather.lazy_imports import lazily

if TYPE_CHECKING:
    from forgather.ml.trainer.pipeline.automatic_splitter import create_automatic_splitter
    from forgather.ml.trainer.pipeline.causal_lm_splitter import (
        create_causal_lm_splitter,
        create_manual_causal_lm_splitter,
    )
    from forgather.ml.trainer.pipeline.pipeline_arguments import PipelineTrainingArguments
    from forgather.ml.trainer.pipeline.pipeline_trainer import PipelineTrainer
    from forgather.ml.trainer.pipeline.splitting import ModelSplitter

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
        "ModelSplitter": "splitting",
        "PipelineTrainer": "pipeline_trainer",
        "PipelineTrainingArguments": "pipeline_arguments",
        "create_automatic_splitter": "automatic_splitter",
        "create_causal_lm_splitter": "causal_lm_splitter",
        "create_manual_causal_lm_splitter": "causal_lm_splitter",
    },
)
