"""Script in the style of run_ner: classification of words, with labels on the first token of each word."""

import logging
import os
from typing import Any

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
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


def labels_of(word_labels: list[list[str]]) -> list[str]:
    return sorted({label for labels in word_labels for label in labels})


def prepare_data(
    raw_datasets: Any, tokenizer: Any, label_to_id: dict[str, int], training_args: Any, data_args: DataArguments
) -> Any:
    """Tokenise words; tokens after the first of a word, and special tokens, get the label -100."""

    def tokenize_and_align_labels(examples: dict[str, list[Any]]) -> Any:
        tokenized = tokenizer(
            examples["tokens"], truncation=True, max_length=data_args.max_seq_length, is_split_into_words=True
        )
        labels = []
        for i, word_labels in enumerate(examples["ner_tags"]):
            words = tokenized.word_ids(batch_index=i)
            is_first = [
                word is not None and word != before for before, word in zip([None, *words], words, strict=False)
            ]
            labels.append(
                [label_to_id[word_labels[word]] if first else -100 for word, first in zip(words, is_first, strict=True)]
            )
        tokenized["labels"] = labels
        return tokenized

    with training_args.main_process_first(desc="dataset map pre-processing"):
        return raw_datasets.map(tokenize_and_align_labels, batched=True, desc="Tokenize", **data_args.map_options)


def make_metrics(label_list: list[str]) -> Any:
    def compute_metrics(p: Any) -> dict[str, float]:
        predictions, labels = p
        predictions = np.argmax(predictions, axis=2)
        pairs = [
            (label_list[guess], label_list[label])
            for row, wanted in zip(predictions, labels, strict=True)
            for guess, label in zip(row, wanted, strict=True)
            if label != -100
        ]
        num_right = sum(guess == label != "O" for guess, label in pairs)
        num_guessed = sum(guess != "O" for guess, _ in pairs)
        num_wanted = sum(label != "O" for _, label in pairs)
        return {
            "precision": num_right / max(num_guessed, 1),
            "recall": num_right / max(num_wanted, 1),
            "accuracy": sum(guess == label for guess, label in pairs) / len(pairs),
        }

    return compute_metrics


def run_evaluation(trainer: Any, eval_dataset: Any) -> None:
    metrics = trainer.evaluate()
    metrics["eval_samples"] = len(eval_dataset)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def run_prediction(trainer: Any, predict_dataset: Any, label_list: list[str], output_dir: str) -> None:
    predictions, labels, metrics = trainer.predict(predict_dataset, metric_key_prefix="predict")
    predictions = np.argmax(predictions, axis=2)
    true_predictions = [
        [label_list[p] for p, label in zip(prediction, row, strict=True) if label != -100]
        for prediction, row in zip(predictions, labels, strict=True)
    ]
    trainer.log_metrics("predict", metrics)
    trainer.save_metrics("predict", metrics)
    if trainer.is_world_process_zero():
        with open(os.path.join(output_dir, "predictions.txt"), "w") as writer:
            writer.writelines(" ".join(prediction) + "\n" for prediction in true_predictions)


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parse(parser)
    set_up_logging(logger, training_args)
    checkpoint = find_checkpoint(logger, training_args)
    set_seed(training_args.seed)

    raw_datasets = load_dataset("json", data_files=data_args.data_files, cache_dir=model_args.cache_dir)
    label_list = labels_of(raw_datasets["train"]["ner_tags"])
    label_to_id = {label: number for number, label in enumerate(label_list)}
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, num_labels=len(label_list))
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForTokenClassification.from_pretrained(model_args.model_name_or_path, config=config)
    model.config.label2id = label_to_id
    model.config.id2label = dict(enumerate(label_list))
    prepared = prepare_data(raw_datasets, tokenizer, label_to_id, training_args, data_args)
    train_dataset = first_samples(prepared["train"], data_args.max_train_samples)
    eval_dataset = first_samples(prepared["validation"], data_args.max_eval_samples)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=make_metrics(label_list),
    )
    if training_args.do_train:
        run_training(trainer, checkpoint, train_dataset, data_args)
    if training_args.do_eval:
        run_evaluation(trainer, eval_dataset)
    if training_args.do_predict:
        run_prediction(trainer, prepared["test"], label_list, training_args.output_dir)
    publish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="token-classification")


if __name__ == "__main__":
    main()
