"""Model folders of the scripts, as from_pretrained reads them: two layers of width 32, and a tokenizer of few words.

No model has dropout, because two trainers draw different random numbers.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.guarantees.drop_in_scripts.tiny_texts import IMAGE_PIXELS, WORDS

WIDTH = 32
SPECIAL = {
    "unk_token": "[UNK]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words with the special tokens of BERT; every second word has two tokens."""
    halves = [(word[: len(word) // 2], "##" + word[len(word) // 2 :]) for word in WORDS[::2]]
    pieces = [*SPECIAL.values(), *WORDS[1::2], *(piece for half in halves for piece in half), "?", "."]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    start, end = (("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]")))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[start, end]
    )
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **SPECIAL)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer of bytes with a few merges and one special token."""
    merges = [("t", "h"), ("th", "e"), ("e", "r"), ("o", "w"), ("a", "r"), ("s", "e"), ("v", "e")]
    pieces = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, bos_token="<end>", eos_token="<end>", unk_token="<end>"
    )


def text_to_text_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words that ends each text with an end token."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def bert_config(tokenizer: PreTrainedTokenizerFast, **options: Any) -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )


def save_bert(folder: Path, head: str, num_labels: int = 2) -> None:
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(folder)
    _save(getattr(transformers, f"BertFor{head}")(bert_config(tokenizer, num_labels=num_labels)), folder)


def save_gpt2(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    end = tokenizer.eos_token_id
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
    )
    _save(transformers.GPT2LMHeadModel(config), folder)


def save_t5(folder: Path) -> None:
    tokenizer = text_to_text_tokenizer()
    tokenizer.save_pretrained(folder)
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        d_kv=16,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    _save(transformers.T5ForConditionalGeneration(config), folder)


def save_vit(folder: Path) -> None:
    size = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    transformers.ViTImageProcessorPil(size=size).save_pretrained(folder)
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        image_size=IMAGE_PIXELS,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    _save(transformers.ViTForImageClassification(config), folder)


def _save(model: Any, folder: Path) -> None:
    """Save the model with weights from a seed, large enough to give different predictions."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2, generator=generator)
    model.save_pretrained(folder)


def save_models(folder: Path) -> None:
    """Save a folder for each script, with its head already there, because a missing head would be random."""
    save_gpt2(folder / "run_clm")
    save_bert(folder / "run_mlm", "MaskedLM")
    save_bert(folder / "run_glue", "SequenceClassification")
    save_bert(folder / "run_classification", "SequenceClassification", num_labels=3)
    save_bert(folder / "run_ner", "TokenClassification", num_labels=3)
    save_bert(folder / "run_swag", "MultipleChoice")
    save_bert(folder / "run_qa", "QuestionAnswering")
    save_t5(folder / "run_summarization")
    save_vit(folder / "run_image_classification")
