"""Trains a small Llama on one device: evaluation, checkpoints, resume, and a Hugging Face directory at the end.

    python examples/single_device.py

Kill it at any time and run the same command again: it continues at its newest checkpoint.
"""

from transformers import LlamaConfig, LlamaForCausalLM

from forgather import Trainer, TrainingArguments
from forgather.data.byte_tokenizer import byte_tokenizer
from forgather.data.packed import PackedTokens
from forgather.data.standard_library import standard_library_documents
from forgather.data.token_store import EvaluationShare, tokenize

tokenizer = byte_tokenizer()
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
)
# Any dataset of dicts of tensors works. The source of Python's standard library is text that every machine has.
text = tokenize(standard_library_documents(max_bytes=2_000_000), tokenizer, EvaluationShare(0.05))
train, evaluation = (PackedTokens(text[split].tokens, text[split].document_starts, 64) for split in ("train", "eval"))

trainer = Trainer(
    args=TrainingArguments(
        output_dir="runs/single_device",
        max_steps=200,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_grad_norm=1.0,
        logging_steps=25,
        eval_strategy="steps",
        eval_steps=100,
        save_steps=50,
        seed=1,
    ),
    model_init=lambda: LlamaForCausalLM(config),
    train_dataset=train,
    eval_dataset=evaluation,
    processing_class=tokenizer,
)
trainer.train()  # Resumes if the output directory contains a checkpoint.
trainer.save_model("runs/single_device/final")  # For AutoModelForCausalLM.from_pretrained.
