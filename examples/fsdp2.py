"""Trains on two ranks with FSDP2: weights, gradients and optimizer state are sharded over the ranks.

    torchrun --nproc-per-node 2 examples/fsdp2.py

No rank ever holds the full model. The checkpoint contains full tensors by name, so `from_pretrained` reads it, and any
other trainer resumes from it on any number of ranks.
"""

import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from forgather import FSDP2Trainer, FSDP2TrainingArguments
from forgather.data.byte_tokenizer import byte_tokenizer
from forgather.data.packed import PackedTokens
from forgather.data.standard_library import standard_library_documents
from forgather.data.token_store import EvaluationShare, tokenize
from forgather.ml.distributed import record_entry_point
from forgather.ml.trainer.fsdp2.fsdp2_trainer import FSDP2Arguments

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
    args = FSDP2TrainingArguments(
        output_dir="runs/fsdp2",
        max_steps=60,
        per_device_train_batch_size=4,
        mixed_precision="bf16",  # Gathered weights in bfloat16, shards and gradient sums in float32.
        fsdp2=FSDP2Arguments(reshard_after_forward=True),
        learning_rate=3e-3,
        warmup_steps=10,
        max_grad_norm=1.0,
        logging_steps=20,
        save_steps=30,
        seed=1,
    )
    trainer = FSDP2Trainer(
        args=args,
        model_init=lambda: LlamaForCausalLM(config),  # A function: the model is built on the meta device.
        train_dataset=PackedTokens(text.tokens, text.document_starts, 64),
        processing_class=tokenizer,
    )
    trainer.train()
    parameter = next(iter(trainer.unwrapped_model().parameters()))
    if dist.get_rank() == 0:
        print(f"rank 0 holds {tuple(parameter.to_local().shape)} of {tuple(parameter.shape)} of the embedding")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
