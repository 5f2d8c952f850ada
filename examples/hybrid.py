"""Trains two pipelines of two stages on four ranks: pipeline parallelism inside, data parallelism between them.

    torchrun --nproc-per-node 4 examples/hybrid.py

Ranks 0 and 1 are one pipeline, ranks 2 and 3 the other. Ranks 0 and 2 hold copies of the first stage. The checkpoint has
one file per stage, and each save compares the copies.
"""

import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from forgather import HybridTrainer, HybridTrainingArguments
from forgather.data.byte_tokenizer import byte_tokenizer
from forgather.data.packed import PackedTokens
from forgather.data.standard_library import standard_library_documents
from forgather.data.token_store import EvaluationShare, tokenize
from forgather.ml.distributed import record_entry_point

tokenizer = byte_tokenizer()
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    intermediate_size=88,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=256,
)


@record_entry_point  # torchrun then shows the error of the rank that failed first.
def main() -> None:
    text = tokenize(standard_library_documents(max_bytes=500_000), tokenizer, EvaluationShare(0.0))["train"]
    args = HybridTrainingArguments(
        output_dir="runs/hybrid",
        pp_size=2,  # Ranks per pipeline. The number of pipelines follows: 4 / 2.
        dp_strategy="replicate",  # "shard" divides each stage over its copies with FSDP2 instead.
        max_steps=40,
        per_device_train_batch_size=4,  # For each pipeline.
        n_microbatches=2,
        learning_rate=3e-3,
        warmup_steps=5,
        max_grad_norm=1.0,
        logging_steps=10,
        save_steps=20,
        seed=1,
    )
    trainer = HybridTrainer(
        args=args,
        model_init=lambda: LlamaForCausalLM(config),
        train_dataset=PackedTokens(text.tokens, text.document_starts, 64),
        processing_class=tokenizer,
        pipe_schedule_factory="1f1b",
    )
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
