"""Trains on two ranks with DDP: each rank holds the model and trains on its part of every batch.

    torchrun --nproc-per-node 2 examples/ddp.py

Two ranks with batches of 4 train like one device with batches of 8. Run the command again to resume, on any number of
ranks: the position in the data is global.
"""

import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from forgather import DDPTrainer, DDPTrainingArguments
from forgather.data.byte_tokenizer import byte_tokenizer
from forgather.data.packed import PackedTokens
from forgather.data.standard_library import standard_library_documents
from forgather.data.token_store import EvaluationShare, tokenize
from forgather.ml.distributed import record_entry_point

tokenizer = byte_tokenizer()
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
)


@record_entry_point  # torchrun then shows the error of the rank that failed first.
def main() -> None:
    text = tokenize(standard_library_documents(max_bytes=500_000), tokenizer, EvaluationShare(0.0))["train"]
    args = DDPTrainingArguments(
        output_dir="runs/ddp",
        max_steps=100,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        warmup_steps=10,
        max_grad_norm=1.0,
        logging_steps=25,
        save_steps=50,
        seed=1,
    )
    trainer = DDPTrainer(
        args=args,
        model_init=lambda: LlamaForCausalLM(config),
        train_dataset=PackedTokens(text.tokens, text.document_starts, 64),
        processing_class=tokenizer,
    )
    trainer.train()  # Rank 0 prints. Every save compares the replicas of all ranks bit for bit.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
