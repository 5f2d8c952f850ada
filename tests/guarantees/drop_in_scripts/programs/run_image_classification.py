"""Script in the style of run_image_classification: pixels are made when a sample is read, and a function collates them."""

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from tests.guarantees.drop_in_scripts.programs.script_parts import (
    DataArguments,
    ModelArguments,
    find_checkpoint,
    parse,
    publish,
    run_training,
    set_up_logging,
)

logger = logging.getLogger(__name__)


@dataclass
class ImageArguments(DataArguments):
    """Folders with one subfolder of images for each label."""

    train_dir: str | None = field(default=None, metadata={"help": "Folder with training images."})
    validation_dir: str | None = field(default=None, metadata={"help": "Folder with evaluation images."})
    image_column_name: str = field(default="image", metadata={"help": "Column with images."})
    label_column_name: str = field(default="label", metadata={"help": "Column with labels."})


def collate_fn(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    labels = torch.tensor([example["label"] for example in examples])
    return {"pixel_values": pixel_values, "labels": labels}


def compute_metrics(p: Any) -> dict[str, float]:
    guesses = np.argmax(p.predictions, axis=1)
    return {"accuracy": float((guesses == p.label_ids).mean())}


def load_images(model_args: ModelArguments, data_args: ImageArguments) -> Any:
    folders = {"train": f"{data_args.train_dir}/**", "validation": f"{data_args.validation_dir}/**"}
    return load_dataset("imagefolder", data_files=folders, cache_dir=model_args.cache_dir)


def run_evaluation(trainer: Any) -> None:
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def main() -> None:
    parser = HfArgumentParser((ModelArguments, ImageArguments, TrainingArguments))
    model_args, data_args, training_args = parse(parser)
    set_up_logging(logger, training_args)
    checkpoint = find_checkpoint(logger, training_args)
    set_seed(training_args.seed)

    dataset = load_images(model_args, data_args)
    labels = dataset["train"].features[data_args.label_column_name].names
    label2id = {label: str(number) for number, label in enumerate(labels)}
    id2label = {str(number): label for number, label in enumerate(labels)}
    config = AutoConfig.from_pretrained(
        model_args.model_name_or_path, num_labels=len(labels), label2id=label2id, id2label=id2label
    )
    model = AutoModelForImageClassification.from_pretrained(model_args.model_name_or_path, config=config)
    image_processor = AutoImageProcessor.from_pretrained(model_args.model_name_or_path)

    def transform(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        images = [image.convert("RGB") for image in batch[data_args.image_column_name]]
        batch["pixel_values"] = list(image_processor(images, return_tensors="pt")["pixel_values"])
        return batch

    if training_args.do_train:
        dataset["train"].set_transform(transform)
    if training_args.do_eval:
        dataset["validation"].set_transform(transform)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"] if training_args.do_train else None,
        eval_dataset=dataset["validation"] if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=image_processor,
        data_collator=collate_fn,
    )
    if training_args.do_train:
        run_training(trainer, checkpoint, dataset["train"], data_args)
    if training_args.do_eval:
        run_evaluation(trainer)
    publish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="image-classification")


if __name__ == "__main__":
    main()
