"""Scripts of the drop-in that run on one rank and on two: loaders, generated tokens, uploads and changed labels."""

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from forgather.hf import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from forgather.ml.distributed import get_rank
from tests.guarantees.drop_in.programs import RankAwareLoss, arguments, collate, made, rows
from tests.support.tiny_models import tiny_llama
from tests.support.tiny_parallel import captured_logs

FIRST_TOKENS = [row["input_ids"][0] for row in rows()]


def raised_by_upload(output_dir: str, offline: bool) -> str:
    """Return the error of a construction with push_to_hub, with a network that fails on rank 0 only."""
    import huggingface_hub

    def no_network(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    before = huggingface_hub.constants.HF_HUB_OFFLINE, huggingface_hub.create_repo
    huggingface_hub.constants.HF_HUB_OFFLINE = offline and get_rank() == 0
    huggingface_hub.create_repo = no_network
    try:
        made(Trainer, output_dir, push_to_hub=True, hub_model_id="mine")
    except Exception as error:  # noqa: BLE001 - the test compares the errors of the ranks
        return str(error)
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE, huggingface_hub.create_repo = before
    return ""


class UnequalLengths(transformers.T5ForConditionalGeneration):
    """Model that generates as many tokens as the first token of the longest sample says."""

    def generate(self, input_ids: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        length = 2 + int(input_ids[:, 0].max()) % 5
        return input_ids[:, :1].repeat(1, length)


def generated(output_dir: str) -> tuple[Any, Any, float]:
    """Return predictions and labels of seven samples, with unequal lengths between batches and ranks."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    args = Seq2SeqTrainingArguments(
        output_dir, predict_with_generate=True, use_cpu=True, per_device_eval_batch_size=1, disable_tqdm=True
    )
    trainer = Seq2SeqTrainer(UnequalLengths(config), args, collate, rows(), rows(7))
    trainer.model.generation_config.max_length = None
    output = trainer.predict(rows(7))
    return output.predictions, output.label_ids, output.metrics["test_loss"]


class PlainEvalLoader(Trainer):
    """Override that returns a plain loader of torch, and notes the samples that this rank predicts."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return DataLoader(rows(7), 2, collate_fn=collate)

    def prediction_step(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), *inputs["input_ids"][:, 0].tolist()]
        return super().prediction_step(model, inputs, *rest, **options)


def evaluated_by_loader(output_dir: str) -> tuple[list[int], list[int], float]:
    """Return the samples of this rank, the samples in compute_metrics, and the loss."""
    found: list[int] = []

    def note_samples(prediction: Any) -> dict[str, float]:
        found.extend(prediction.label_ids[:, 0].tolist())
        return {"number": len(prediction.label_ids)}

    trainer = PlainEvalLoader(tiny_llama(), arguments(output_dir), collate, rows(), compute_metrics=note_samples)
    metrics = trainer.evaluate()
    assert metrics["eval_number"] == 7
    return trainer.seen, found, metrics["eval_loss"]


class OwnSampler(Trainer):
    """Override with a loader that is divided between ranks already."""

    def get_train_dataloader(self) -> Any:
        ranks = {"num_replicas": self.args.world_size, "rank": self.args.process_index}
        sampler: DistributedSampler[Any] = DistributedSampler(rows(), shuffle=False, **ranks)
        return DataLoader(rows(), self.args.train_batch_size, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), *inputs["input_ids"][:, 0].tolist()]
        return super().compute_loss(model, inputs, *rest, **options)


def trained_by_sampler(output_dir: str, batch_size: int) -> tuple[list[int], list[float]]:
    """Return the samples of this rank and the losses."""
    settings = {"per_device_train_batch_size": batch_size, "max_steps": -1, "num_train_epochs": 2}
    trainer = made(OwnSampler, output_dir, **settings)
    assert isinstance(trainer, OwnSampler)
    trainer.train()
    return trainer.seen, [record["loss"] for record in trainer.state.log_history if "loss" in record]


class ShorterLabels(Trainer):
    """Override of _prepare_inputs that removes targets."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        labels = inputs["labels"].clone()
        labels[:, 4:] = -100
        return {**inputs, "labels": labels}


class ShorterStep(ShorterLabels):
    """The same with an overridden training_step."""

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Tensor:
        return super().training_step(model, inputs, *rest)


def notes_of_processes(output_dir: str) -> list[str]:
    """Return the log lines about the number of processes."""
    from forgather.hf.engine import micro_step

    micro_step._has_warned.clear()
    with captured_logs() as records:
        made(RankAwareLoss, output_dir).train()
    return [record for record in records if "num_processes" in record]


def raised_by_changed_labels(output_dir: str) -> str:
    try:
        made(ShorterLabels, output_dir).train()
    except ValueError as error:
        return str(error)
    return ""
