"""Pipeline runs that are killed and resumed: `python -m tests.support.pipeline_job <directory>`.

Pipeline counterpart of `train_job`, which covers one device and DDP. All stages have dropout, so random numbers matter
on every rank.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.tiny_models import tiny_llama
from tests.support.train_job import NUM_SAMPLES, USUAL_SETTINGS, Samples, Scenario, facts_of, main, sample

NUM_EVAL_SAMPLES = 7
DROPOUT = 0.2


@dataclass(frozen=True)
class PipelineScenario(Scenario):
    """Scenario of a pipeline run."""

    model: str = "llama"
    schedule: str = "1f1b"
    trainer: str = "pipeline"
    num_ranks: int = 2


class Numbered(Samples):
    """Dataset with the sample number as the first token; the rest is noisy."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = sample(index, self._noisy)
        found["input_ids"][0] = index
        return found


class Noting(Trainer):
    """Trainer that records the sample numbers of each step; batches that only keep ranks in step have none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.samples: dict[int, list[int]] = {}

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        batch = self.window.batches[self.window.number]
        numbers = [] if isinstance(batch, EmptyBatch) else batch["input_ids"][:, 0].tolist()
        self.samples.setdefault(self.state.global_step + 1, []).extend(numbers)
        return super()._forward_backward_step(input_dict, labels)


class NotingPipeline(Noting, PipelineTrainer):
    pass


class NotingHybrid(Noting, HybridTrainer):
    pass


def dropping_gpt2(num_layers: int) -> nn.Module:
    """Build a GPT-2 with dropout; embedding and head are tied."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32,
            n_embd=16,
            n_layer=num_layers,
            n_head=2,
            n_positions=16,
            resid_pdrop=DROPOUT,
            embd_pdrop=DROPOUT,
            attn_pdrop=DROPOUT,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": functools.partial(tiny_llama, None, num_hidden_layers=3, attention_dropout=DROPOUT),
    "gpt2": functools.partial(dropping_gpt2, 4),
}
TRAINERS: dict[str, type[Noting]] = {"pipeline": NotingPipeline, "hybrid": NotingHybrid}


def build_trainer(scenario: PipelineScenario, output_dir: str, callbacks: Sequence[Any]) -> Trainer:
    settings = {
        **USUAL_SETTINGS,
        "output_dir": output_dir,
        # 7 batches per epoch, the last one incomplete: 4 steps.
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        **scenario.settings,
    }
    return TRAINERS[scenario.trainer](
        args=settings,
        pipe_schedule_factory=scenario.schedule,
        model_init=MODELS[scenario.model],
        train_dataset=Numbered(NUM_SAMPLES, noisy=True),
        eval_dataset=Numbered(NUM_EVAL_SAMPLES, noisy=False),
        callbacks=list(callbacks),
        default_callbacks=False,
    )


def facts_with_samples(trainer: Noting) -> dict[str, Any]:
    return {**facts_of(trainer), "samples": trainer.samples}


if __name__ == "__main__":
    main(PipelineScenario, build_trainer, facts_with_samples)
