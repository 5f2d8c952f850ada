"""A script for transformers.Trainer that runs on Forgather: only the import of its names has changed.

    python examples/hf_script.py
    torchrun --nproc-per-node 2 examples/hf_script.py

A small BERT learns to tell comments from code, one line of Python at a time. Run the command again to resume, also with
the other number of ranks.
"""

import random

import numpy as np
from transformers.trainer_utils import get_last_checkpoint

from forgather.data.byte_tokenizer import byte_tokenizer
from forgather.data.standard_library import standard_library_documents
from forgather.hf import (  # Was: from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    set_seed,
)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def main() -> None:
    args = TrainingArguments(
        output_dir="runs/hf_script",
        max_steps=90,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        logging_steps=15,
        eval_strategy="steps",
        eval_steps=30,
        save_steps=30,
        report_to="none",
        disable_tqdm=True,
    )
    set_seed(args.seed)

    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    lines = [line.strip() for text in standard_library_documents(1_000_000) for line in text.splitlines()]
    lines = [line for line in lines if len(line) > 10]
    comments = [line.lstrip("# ") for line in lines if line.startswith("#")][:1200]
    code = [line for line in lines if not line.startswith("#")][: len(comments)]
    samples = [
        {**tokenizer(line, truncation=True, max_length=48), "labels": label}
        for pair in zip(comments, code, strict=True)
        for label, line in enumerate(pair)
    ]
    random.Random(args.seed).shuffle(samples)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=samples[200:],
        eval_dataset=samples[:200],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    checkpoint = get_last_checkpoint(args.output_dir)
    if trainer.is_world_process_zero():
        print(f"resumes from {checkpoint}" if checkpoint else "starts a new run", flush=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
