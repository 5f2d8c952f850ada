"""Byte-level tokenizer that needs no training and no download: one token per byte and an end-of-document token.

The default tokenizer of the command line. Checkpoints store it as an ordinary Hugging Face tokenizer.
"""

import functools

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_DOCUMENT = "<|endoftext|>"
NUM_BYTES = 256
_MARK = "byte_level_without_merges"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a Hugging Face tokenizer with one token per UTF-8 byte (ids 0 to 255) and 256 for the end of a document.

    Checkpoints store it as `tokenizer.json`, which `AutoTokenizer` loads without this module.
    """
    characters = _characters_of_bytes()
    vocabulary = {characters[byte]: byte for byte in range(NUM_BYTES)}
    # BPE without merges leaves every byte a token.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_DOCUMENT, normalized=False, special=True)])
    # No clean-up of spaces: decoding must return the original text.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END_OF_DOCUMENT, clean_up_tokenization_spaces=False
    )
    # Saving and loading the tokenizer loses the mark; encoding is then only slower.
    setattr(tokenizer, _MARK, True)
    return tokenizer


def is_byte_tokenizer(tokenizer: object) -> bool:
    """Return whether tokens are bytes, so that encoding is a copy."""
    return bool(getattr(tokenizer, _MARK, False))


def encode_bytes(text: str) -> np.ndarray:
    """Return the token ids that `byte_tokenizer` gives, without the slow BPE path."""
    # Lone surrogates, which come from bad JSON escapes, are not valid UTF-8: they become question marks.
    return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)


@functools.cache
def _characters_of_bytes() -> dict[int, str]:
    """Return the printable character for each byte, as in byte-level vocabularies since GPT-2."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters.update({byte: chr(NUM_BYTES + number) for number, byte in enumerate(others)})
    return characters
