"""Script in the style of run_summarization: an encoder-decoder that generates texts for evaluation."""

import logging
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
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
class SummaryArguments(DataArguments):
    """Data and generation of summaries."""

    max_target_length: int = field(default=8, metadata={"help": "Longest summary in training, in tokens."})
    val_max_target_length: int | None = field(default=None, metadata={"help": "Longest summary in evaluation."})
    num_beams: int | None = field(default=None, metadata={"help": "Beams of generation."})
    ignore_pad_token_for_loss: bool = field(default=True, metadata={"help": "Give padding the label -100."})
    source_prefix: str = field(default="", metadata={"help": "Text before each source."})

    def __post_init__(self) -> None:
        if self.val_max_target_length is None:
            self.val_max_target_length = self.max_target_length


def prepare_data(raw_datasets: Any, tokenizer: Any, training_args: Any, data_args: SummaryArguments) -> Any:
    def preprocess_function(examples: dict[str, list[str]]) -> Any:
        inputs = [data_args.source_prefix + text for text in examples["document"]]
        model_inputs = tokenizer(inputs, max_length=data_args.max_seq_length, truncation=True)
        labels = tokenizer(text_target=examples["summary"], max_length=data_args.max_target_length, truncation=True)
        model_inputs["labels"] = labels["input_ids"]
        return model_inputs

    columns = raw_datasets["train"].column_names
    with training_args.main_process_first(desc="dataset map pre-processing"):
        return raw_datasets.map(
            preprocess_function, batched=True, remove_columns=columns, desc="Tokenize", **data_args.map_options
        )


def make_metrics(tokenizer: Any) -> Any:
    def compute_metrics(eval_preds: Any) -> dict[str, float]:
        preds, labels = eval_preds
        preds = preds[0] if isinstance(preds, tuple) else preds
        # Padding of different batches is -100, which cannot be decoded.
        preds = np.where(preds != -100, preds, tokenizer.pad_token_id)
        decoded = tokenizer.batch_decode(preds, skip_special_tokens=True)
        labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
        wanted = tokenizer.batch_decode(labels, skip_special_tokens=True)
        pairs = [(set(a.split()), set(b.split())) for a, b in zip(decoded, wanted, strict=True)]
        lengths = [np.count_nonzero(pred != tokenizer.pad_token_id) for pred in preds]
        overlap = np.mean([len(a & b) / max(len(a | b), 1) for a, b in pairs])
        return {"overlap": round(float(overlap), 4), "gen_len": float(np.mean(lengths))}

    return compute_metrics


def run_evaluation(trainer: Any, eval_dataset: Any) -> None:
    metrics = trainer.evaluate(metric_key_prefix="eval")
    metrics["eval_samples"] = len(eval_dataset)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def run_prediction(trainer: Any, predict_dataset: Any, tokenizer: Any, training_args: Any) -> None:
    results = trainer.predict(predict_dataset, metric_key_prefix="predict")
    metrics = results.metrics
    metrics["predict_samples"] = len(predict_dataset)
    trainer.log_metrics("predict", metrics)
    trainer.save_metrics("predict", metrics)
    if trainer.is_world_process_zero() and training_args.predict_with_generate:
        predictions = np.where(results.predictions != -100, results.predictions, tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(predictions, skip_special_tokens=True, clean_up_tokenization_spaces=True)
        with open(os.path.join(training_args.output_dir, "generated_predictions.txt"), "w") as writer:
            writer.write("\n".join(text.strip() for text in texts))


def main() -> None:
    parser = HfArgumentParser((ModelArguments, SummaryArguments, Seq2SeqTrainingArguments))
    model_args, data_args, training_args = parse(parser)
    set_up_logging(logger, training_args)
    checkpoint = find_checkpoint(logger, training_args)
    set_seed(training_args.seed)

    raw_datasets = load_dataset("json", data_files=data_args.data_files, cache_dir=model_args.cache_dir)
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_args.model_name_or_path, config=config)
    if model.config.decoder_start_token_id is None:
        raise ValueError("the configuration of the model needs decoder_start_token_id; set it and start again")
    prepared = prepare_data(raw_datasets, tokenizer, training_args, data_args)
    train_dataset = first_samples(prepared["train"], data_args.max_train_samples)
    eval_dataset = first_samples(prepared["validation"], data_args.max_eval_samples)
    label_pad_token_id = -100 if data_args.ignore_pad_token_for_loss else tokenizer.pad_token_id
    data_collator = DataCollatorForSeq2Seq(
        tokenizer,
        model=model,
        label_pad_token_id=label_pad_token_id,
        pad_to_multiple_of=8 if training_args.fp16 else None,
    )
    if training_args.generation_max_length is None:
        training_args.generation_max_length = data_args.val_max_target_length
    if data_args.num_beams is not None:
        training_args.generation_num_beams = data_args.num_beams

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=data_collator,
        compute_metrics=make_metrics(tokenizer) if training_args.predict_with_generate else None,
    )
    if training_args.do_train:
        run_training(trainer, checkpoint, train_dataset, data_args)
    if training_args.do_eval:
        run_evaluation(trainer, eval_dataset)
    if training_args.do_predict:
        run_prediction(trainer, prepared["test"], tokenizer, training_args)
    publish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="summarization")


if __name__ == "__main__":
    main()
