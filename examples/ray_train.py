"""Trains on two workers of Ray Train with DDP: the trainer inside the training function needs no change.

    python examples/ray_train.py

Ray starts the workers, connects their ranks, and starts them again after a failure. The trainer resumes from its newest
checkpoint. RayReportCallback reports metrics and checkpoints to Ray. Run the command again to resume.
"""

import os

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import LlamaConfig, LlamaForCausalLM

from forgather import DDPTrainer, DDPTrainingArguments
from forgather.data.byte_tokenizer import byte_tokenizer
from forgather.data.packed import PackedTokens
from forgather.data.standard_library import standard_library_documents
from forgather.data.token_store import EvaluationShare, tokenize
from forgather.ml.trainer.callbacks import RayReportCallback


def train(settings: dict[str, str]) -> None:
    """Train on one worker; Ray calls it on every worker, also after a failure."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    text = tokenize(standard_library_documents(max_bytes=500_000), tokenizer, EvaluationShare(0.0))["train"]
    args = DDPTrainingArguments(
        output_dir=settings["output_dir"],
        max_steps=100,
        global_batch_size=8,  # The same batches on any number of workers.
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
        callbacks=[RayReportCallback()],
    )
    trainer.train()


def main() -> None:
    ray.init(address="local", num_cpus=2)  # Starts Ray on this machine; `ray.init()` connects to a running cluster.
    trainer = TorchTrainer(
        train,
        # Workers run in a folder of Ray, so the path is absolute. On a cluster it is on a disk that all nodes share.
        train_loop_config={"output_dir": os.path.abspath("runs/ray_train")},
        scaling_config=ScalingConfig(num_workers=2),  # (1, 2) trains on one worker while there is no room for two.
        run_config=RunConfig(
            name="forgather", storage_path=os.path.abspath("runs/ray"), failure_config=FailureConfig(max_failures=3)
        ),
    )
    result = trainer.fit()
    print(
        f"Ray has step {result.metrics['step']}, loss {result.metrics['loss']:.4f}, {result.metrics['checkpoint_path']}"
    )


if __name__ == "__main__":
    main()
