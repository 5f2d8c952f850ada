"""Script in the style of run_mlm: a masked language model with masks drawn by the collator."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
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


@dataclass
class MaskArguments(DataArguments):
    """Data of a masked language model."""

    mlm_probability: float = field(default=0.3, metadata={"help": "Share of masked tokens."})
    mask_seed: int | None = field(default=None, metadata={"help": "Seed of the masks."})


def prepare_data(raw_datasets: Any, tokenizer: Any, training_args: Any, data_args: MaskArguments) -> Any:
    """Tokenise line by line, without empty lines."""

    def tokenize_function(examples: dict[str, list[str]]) -> Any:
        lines = [line for line in examples["text"] if line and not line.isspace()]
        return tokenizer(
            lines,
            padding="max_length" if data_args.pad_to_max_length else False,
            truncation=True,
            max_length=min(data_args.max_seq_length, tokenizer.model_max_length),
            return_special_tokens_mask=True,
        )

    with training_args.main_process_first(desc="dataset map tokenization"):
        return raw_datasets.map(
            tokenize_function, batched=True, remove_columns=["text"], desc="Tokenize lines", **data_args.map_options
        )


def preprocess_logits_for_metrics(logits: Any, labels: Any) -> Any:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def compute_metrics(eval_preds: Any) -> dict[str, float]:
    preds, labels = eval_preds
    # Only masked positions count.
    labels, preds = labels.reshape(-1), preds.reshape(-1)
    mask = labels != -100
    return {"accuracy": float((preds[mask] == labels[mask]).mean())}


def run_evaluation(trainer: Any, eval_dataset: Any) -> None:
    metrics = trainer.evaluate()
    metrics["eval_samples"] = len(eval_dataset)
    try:
        perplexity = math.exp(metrics["eval_loss"])
    except OverflowError:
        perplexity = float("inf")
    metrics["perplexity"] = perplexity
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def main() -> None:
    parser = HfArgumentParser((ModelArguments, MaskArguments, TrainingArguments))
    model_args, data_args, training_args = parse(parser)
    set_up_logging(logger, training_args)
    checkpoint = find_checkpoint(logger, training_args)
    set_seed(training_args.seed)

    raw_datasets = load_dataset("text", data_files=data_args.data_files, cache_dir=model_args.cache_dir)
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForMaskedLM.from_pretrained(model_args.model_name_or_path, config=config)
    tokenized = prepare_data(raw_datasets, tokenizer, training_args, data_args)
    train_dataset = first_samples(tokenized["train"], data_args.max_train_samples)
    eval_dataset = first_samples(tokenized["validation"], data_args.max_eval_samples)
    # The collator gets a seed, because the trainers draw different numbers from the global generator.
    data_collator = DataCollatorForLanguageModeling(
        tokenizer=tokenizer, mlm_probability=data_args.mlm_probability, seed=data_args.mask_seed
    )

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=data_collator,
        compute_metrics=compute_metrics if training_args.do_eval else None,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics if training_args.do_eval else None,
    )
    if training_args.do_train:
        run_training(trainer, checkpoint, train_dataset, data_args)
    if training_args.do_eval:
        logger.info("*** Evaluate ***")
        run_evaluation(trainer, eval_dataset)
    publish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="fill-mask")


if __name__ == "__main__":
    main()
