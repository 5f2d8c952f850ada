"""Script in the style of run_classification: several labels for each text, from CSV files."""

import logging
import os
from dataclasses import dataclass, field
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
class ColumnArguments(DataArguments):
    """Columns of the data."""

    text_column_names: str = field(default="title,body", metadata={"help": "Columns that make up the text."})
    label_column_name: str = field(default="topics", metadata={"help": "Column with labels, joined by +."})


def join_text(raw_datasets: Any, data_args: ColumnArguments) -> Any:
    """Join the text columns into the column `sentence`, and split the labels."""
    columns = data_args.text_column_names.split(",")

    def join(example: dict[str, Any]) -> dict[str, Any]:
        labels = example[data_args.label_column_name].split("+")
        return {"sentence": " ".join(example[column] for column in columns), "label": labels}

    return raw_datasets.map(join, desc="Join columns")


def labels_of(raw_datasets: Any) -> list[str]:
    return sorted({label for labels in raw_datasets["train"]["label"] for label in labels})


def prepare_data(
    raw_datasets: Any, tokenizer: Any, label_to_id: dict[str, int], training_args: Any, data_args: ColumnArguments
) -> Any:
    def preprocess_function(examples: dict[str, list[Any]]) -> Any:
        result = tokenizer(examples["sentence"], max_length=data_args.max_seq_length, truncation=True)
        # The loss with several labels needs floats.
        rows = [[float(label in labels) for label in label_to_id] for labels in examples["label"]]
        result["label"] = rows
        return result

    with training_args.main_process_first(desc="dataset map pre-processing"):
        return raw_datasets.map(preprocess_function, batched=True, desc="Tokenize", **data_args.map_options)


def compute_metrics(p: EvalPrediction) -> dict[str, float]:
    preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
    chosen, wanted = preds > 0, np.asarray(p.label_ids) > 0
    num_right = float((chosen & wanted).sum())
    return {"f1": 2 * num_right / max(float(chosen.sum() + wanted.sum()), 1.0), "chosen": float(chosen.mean())}


def run_prediction(trainer: Any, predict_dataset: Any, label_list: list[str], output_dir: str) -> None:
    predict_dataset = predict_dataset.remove_columns("label")
    predictions = trainer.predict(predict_dataset, metric_key_prefix="predict").predictions
    chosen = [[label_list[index] for index in np.flatnonzero(row > 0)] for row in predictions]
    if trainer.is_world_process_zero():
        with open(os.path.join(output_dir, "predict_results.txt"), "w") as writer:
            writer.write("index\tprediction\n")
            writer.writelines(f"{index}\t{labels}\n" for index, labels in enumerate(chosen))


def run_evaluation(trainer: Any, eval_dataset: Any) -> None:
    metrics = trainer.evaluate(eval_dataset=eval_dataset)
    metrics["eval_samples"] = len(eval_dataset)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def main() -> None:
    parser = HfArgumentParser((ModelArguments, ColumnArguments, TrainingArguments))
    model_args, data_args, training_args = parse(parser)
    set_up_logging(logger, training_args)
    checkpoint = find_checkpoint(logger, training_args)
    set_seed(training_args.seed)

    raw_datasets = load_dataset("csv", data_files=data_args.data_files, cache_dir=model_args.cache_dir)
    raw_datasets = join_text(raw_datasets, data_args)
    label_list = labels_of(raw_datasets)
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, num_labels=len(label_list))
    config.problem_type = "multi_label_classification"
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path, config=config)
    label_to_id = {label: number for number, label in enumerate(label_list)}
    model.config.label2id = label_to_id
    model.config.id2label = dict(enumerate(label_list))
    prepared = prepare_data(raw_datasets, tokenizer, label_to_id, training_args, data_args)
    train_dataset = first_samples(prepared["train"].shuffle(seed=training_args.seed), data_args.max_train_samples)
    eval_dataset = first_samples(prepared["validation"], data_args.max_eval_samples)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
    )
    if training_args.do_train:
        run_training(trainer, checkpoint, train_dataset, data_args)
    if training_args.do_eval:
        run_evaluation(trainer, eval_dataset)
    if training_args.do_predict:
        run_prediction(trainer, prepared["test"], label_list, training_args.output_dir)
    publish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="text-classification")


if __name__ == "__main__":
    main()
