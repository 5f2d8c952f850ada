"""Script in the style of run_glue: classification of sentence pairs, with predictions for unlabelled data."""

import logging
import os
from typing import Any

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
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


def prepare_data(raw_datasets: Any, tokenizer: Any, training_args: Any, data_args: DataArguments) -> Any:
    padding = "max_length" if data_args.pad_to_max_length else False

    def preprocess_function(examples: dict[str, list[Any]]) -> Any:
        pairs = (examples["sentence1"], examples["sentence2"])
        return tokenizer(*pairs, padding=padding, max_length=data_args.max_seq_length, truncation=True)

    with training_args.main_process_first(desc="dataset map pre-processing"):
        return raw_datasets.map(preprocess_function, batched=True, desc="Tokenize", **data_args.map_options)


def compute_metrics(p: EvalPrediction) -> dict[str, float]:
    preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
    preds = np.argmax(preds, axis=1)
    result = {"accuracy": float((preds == p.label_ids).mean()), "positive": float(preds.mean())}
    result["combined_score"] = float(np.mean(list(result.values())))
    return result


def choose_collator(tokenizer: Any, training_args: Any, data_args: DataArguments) -> Any:
    if data_args.pad_to_max_length:
        return default_data_collator
    return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8) if training_args.fp16 else None


def run_evaluation(trainer: Any, eval_dataset: Any, data_args: DataArguments) -> None:
    metrics = trainer.evaluate(eval_dataset=eval_dataset)
    limit = data_args.max_eval_samples
    max_eval_samples = limit if limit is not None else len(eval_dataset)
    metrics["eval_samples"] = min(max_eval_samples, len(eval_dataset))
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def run_prediction(trainer: Any, predict_dataset: Any, label_list: list[str], output_dir: str) -> None:
    # The labels of test data are placeholders, and a trainer must not use them.
    predict_dataset = predict_dataset.remove_columns("label")
    predictions = trainer.predict(predict_dataset, metric_key_prefix="predict").predictions
    predictions = np.argmax(predictions, axis=1)
    if trainer.is_world_process_zero():
        with open(os.path.join(output_dir, "predict_results.txt"), "w") as writer:
            writer.write("index\tprediction\n")
            for index, item in enumerate(predictions):
                writer.write(f"{index}\t{label_list[item]}\n")


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parse(parser)
    set_up_logging(logger, training_args)
    checkpoint = find_checkpoint(logger, training_args)
    set_seed(training_args.seed)

    raw_datasets = load_dataset("json", data_files=data_args.data_files, cache_dir=model_args.cache_dir)
    label_list = ["unrelated", "related"]
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, num_labels=len(label_list))
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path, config=config)
    model.config.label2id = {label: number for number, label in enumerate(label_list)}
    model.config.id2label = dict(enumerate(label_list))
    prepared = prepare_data(raw_datasets, tokenizer, training_args, data_args)
    train_dataset = first_samples(prepared["train"], data_args.max_train_samples)
    eval_dataset = first_samples(prepared["validation"], data_args.max_eval_samples)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=choose_collator(tokenizer, training_args, data_args),
    )
    if training_args.do_train:
        run_training(trainer, checkpoint, train_dataset, data_args)
    if training_args.do_eval:
        run_evaluation(trainer, eval_dataset, data_args)
    if training_args.do_predict:
        run_prediction(trainer, prepared["test"], label_list, training_args.output_dir)
    publish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="text-classification")


if __name__ == "__main__":
    main()
