"""Continued pre-training: loads a pretrained model and trains it on your own text.

    python examples/continued_pretraining.py --model path/to/model --files 'notes/**/*.md'
    python examples/continued_pretraining.py

`--model` is a Hugging Face directory with a tokenizer. `--files` are text, JSON lines or parquet files. Without options
the example makes a small model of Python code first, and continues on English text: the documentation in `pydoc`.
"""

import argparse
import pydoc_data
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from forgather import Trainer, TrainingArguments
from forgather.data.byte_tokenizer import byte_tokenizer
from forgather.data.documents import find_files, read_documents
from forgather.data.packed import PackedTokens
from forgather.data.standard_library import standard_library_documents
from forgather.data.token_store import EvaluationShare, split_by_tokens, tokenize

OUTPUT = Path("runs/continued_pretraining")
OWN_TEXT = str(Path(pydoc_data.__path__[0]) / "topics.py")
COMMON = {"per_device_train_batch_size": 8, "max_grad_norm": 1.0, "seed": 1, "logging_steps": 20, "save_steps": 30}


def pretrain(path: Path) -> None:
    """Make a base model, in place of a model that you have downloaded. Resumes like every run."""
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = tokenize(standard_library_documents(1_000_000), tokenizer, EvaluationShare(0.0))["train"]
    trainer = Trainer(
        args=TrainingArguments(output_dir=str(OUTPUT / "pretraining"), max_steps=100, learning_rate=3e-3, **COMMON),
        model_init=lambda: LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)),
        train_dataset=PackedTokens(text.tokens, text.document_starts, 64),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=OUTPUT / "base", help="directory of the pretrained model")
    parser.add_argument("--files", nargs="+", default=[OWN_TEXT], help="paths or globs of your text")
    options = parser.parse_args()
    if options.model == OUTPUT / "base" and not options.model.exists():
        pretrain(options.model)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    own_text = tokenize(read_documents(find_files(options.files)), tokenizer, EvaluationShare(0.0))["train"]
    parts = split_by_tokens(own_text, 0.05)  # The last 5% are for evaluation.
    data = {split: PackedTokens(part.tokens, part.document_starts, 64) for split, part in parts.items()}
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(OUTPUT / "run"),
            max_steps=60,
            learning_rate=1e-3,  # Lower than in pre-training, with a warm-up: the model should not forget.
            warmup_steps=5,
            lr_scheduler_type="cosine",
            eval_strategy="steps",
            eval_steps=30,
            eval_on_start=True,  # The loss of the pretrained model on your text.
            **COMMON,
        ),
        model_init=lambda: AutoModelForCausalLM.from_pretrained(options.model),
        train_dataset=data["train"],
        eval_dataset=data["eval"],
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(OUTPUT / "final"))


if __name__ == "__main__":
    main()
