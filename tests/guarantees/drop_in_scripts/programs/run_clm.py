"""Script in the style of run_clm: a causal language model on lines of text."""

import logging
import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
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


@dataclass
class BlockArguments(DataArguments):
    """Data of a language model."""

    block_size: int = field(default=16, metadata={"help": "Tokens of a training sample."})


def load_model(model_args: ModelArguments) -> tuple[Any, Any]:
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, cache_dir=model_args.cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path, cache_dir=model_args.cache_dir, use_fast=model_args.use_fast_tokenizer
    )
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path, from_tf=False, config=config, cache_dir=model_args.cache_dir
    )
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def prepare_data(raw_datasets: Any, tokenizer: Any, training_args: Any, data_args: BlockArguments) -> Any:
    """Tokenise the lines, join them, and cut them into blocks; the rest is dropped."""
    block_size = min(data_args.block_size, tokenizer.model_max_length)

    def tokenize_function(examples: dict[str, list[str]]) -> Any:
        return tokenizer(examples["text"])

    def group_texts(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {key: list(chain(*examples[key])) for key in examples}
        total_length = (len(joined["input_ids"]) // block_size) * block_size
        starts = range(0, total_length, block_size)
        result = {key: [tokens[i : i + block_size] for i in starts] for key, tokens in joined.items()}
        result["labels"] = [block.copy() for block in result["input_ids"]]
        return result

    with training_args.main_process_first(desc="dataset map tokenization"):
        tokenized = raw_datasets.map(
            tokenize_function, batched=True, remove_columns=["text"], desc="Tokenize", **data_args.map_options
        )
    with training_args.main_process_first(desc="grouping texts together"):
        return tokenized.map(group_texts, batched=True, desc="Group texts", **data_args.map_options)


def preprocess_logits_for_metrics(logits: Any, labels: Any) -> Any:
    if isinstance(logits, tuple):
        # Some models return more than logits, such as past key values.
        logits = logits[0]
    return logits.argmax(dim=-1)


def compute_metrics(eval_preds: Any) -> dict[str, float]:
    preds, labels = eval_preds
    # The predictions are already argmaxed; the labels are one position ahead.
    labels = labels[:, 1:].reshape(-1)
    preds = preds[:, :-1].reshape(-1)
    return {"accuracy": float((preds == labels).mean())}


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
    parser = HfArgumentParser((ModelArguments, BlockArguments, TrainingArguments))
    model_args, data_args, training_args = parse(parser)
    set_up_logging(logger, training_args)
    checkpoint = find_checkpoint(logger, training_args)
    set_seed(training_args.seed)

    raw_datasets = load_dataset("text", data_files=data_args.data_files, cache_dir=model_args.cache_dir)
    model, tokenizer = load_model(model_args)
    lm_datasets = prepare_data(raw_datasets, tokenizer, training_args, data_args)
    train_dataset = first_samples(lm_datasets["train"], data_args.max_train_samples)
    eval_dataset = first_samples(lm_datasets["validation"], data_args.max_eval_samples)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics if training_args.do_eval else None,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics if training_args.do_eval else None,
    )
    if training_args.do_train:
        run_training(trainer, checkpoint, train_dataset, data_args)
    if training_args.do_eval:
        logger.info("*** Evaluate ***")
        run_evaluation(trainer, eval_dataset)
    publish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="text-generation")


if __name__ == "__main__":
    main()
