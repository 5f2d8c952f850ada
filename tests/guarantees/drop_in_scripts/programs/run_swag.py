"""Script in the style of run_swag: choice of one of four endings, with a custom collator."""

import logging
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForMultipleChoice,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from tests.guarantees.drop_in_scripts.programs.script_parts import (
    DataArguments,
    ModelArguments,
    find_checkpoint,
    first_samples,
    parse,
    publish,
    run_training,
    set_up_logging,
)

logger = logging.getLogger(__name__)
NUM_CHOICES = 4


@dataclass
class ChoiceCollator:
    """Pads the choices of all samples together, and gives them a separate dimension."""

    tokenizer: Any
    padding: bool | str = True

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        label_name = "label" if "label" in features[0] else "labels"
        labels = [feature.pop(label_name) for feature in features]
        flat = [{key: value[i] for key, value in feature.items()} for feature in features for i in range(NUM_CHOICES)]
        padded = self.tokenizer.pad(flat, padding=self.padding, return_tensors="pt")
        batch = {key: value.view(len(features), NUM_CHOICES, -1) for key, value in padded.items()}
        batch["labels"] = torch.tensor(labels, dtype=torch.int64)
        return batch


def prepare_data(raw_datasets: Any, tokenizer: Any, training_args: Any, data_args: DataArguments) -> Any:
    """Tokenise each ending behind the context and its start."""
    endings = [f"ending{number}" for number in range(NUM_CHOICES)]

    def preprocess_function(examples: dict[str, list[Any]]) -> dict[str, Any]:
        contexts = [[context] * NUM_CHOICES for context in examples["sent1"]]
        seconds = [[f"{start} {examples[end][i]}" for end in endings] for i, start in enumerate(examples["sent2"])]
        tokenized = tokenizer(
            list(chain(*contexts)),
            list(chain(*seconds)),
            truncation=True,
            max_length=data_args.max_seq_length,
            padding="max_length" if data_args.pad_to_max_length else False,
        )
        return {
            key: [value[i : i + NUM_CHOICES] for i in range(0, len(value), NUM_CHOICES)]
            for key, value in tokenized.items()
        }

    with training_args.main_process_first(desc="dataset map pre-processing"):
        return raw_datasets.map(preprocess_function, batched=True, desc="Tokenize", **data_args.map_options)


def compute_metrics(eval_predictions: Any) -> dict[str, float]:
    predictions, label_ids = eval_predictions
    preds = np.argmax(predictions, axis=1)
    return {"accuracy": (preds == label_ids).astype(np.float32).mean().item()}


def run_evaluation(trainer: Any, eval_dataset: Any) -> None:
    metrics = trainer.evaluate()
    metrics["eval_samples"] = len(eval_dataset)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parse(parser)
    set_up_logging(logger, training_args)
    checkpoint = find_checkpoint(logger, training_args)
    set_seed(training_args.seed)

    raw_datasets = load_dataset("json", data_files=data_args.data_files, cache_dir=model_args.cache_dir)
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForMultipleChoice.from_pretrained(model_args.model_name_or_path, config=config)
    prepared = prepare_data(raw_datasets, tokenizer, training_args, data_args)
    train_dataset = first_samples(prepared["train"], data_args.max_train_samples)
    eval_dataset = first_samples(prepared["validation"], data_args.max_eval_samples)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else ChoiceCollator(tokenizer),
        compute_metrics=compute_metrics,
    )
    if training_args.do_train:
        run_training(trainer, checkpoint, train_dataset, data_args)
    if training_args.do_eval:
        run_evaluation(trainer, eval_dataset)
    publish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="multiple-choice")


if __name__ == "__main__":
    main()
