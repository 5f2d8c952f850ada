"""A tokenizer that needs no training and no download: one token per byte, and one for the end of a document."""

import functools

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_DOCUMENT = "<|endoftext|>"
NUM_BYTES = 256
_MARK = "byte_level_without_merges"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer whose token ids are the bytes of the UTF-8 text, and 256 for the end of a document.

    Checkpoints hold it as `tokenizer.json`, from which `AutoTokenizer` loads it without this module.
    """
    characters = _characters_of_bytes()
    vocabulary = {characters[byte]: byte for byte in range(NUM_BYTES)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_DOCUMENT, normalized=False, special=True)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END_OF_DOCUMENT, clean_up_tokenization_spaces=False
    )
    setattr(tokenizer, _MARK, True)
    return tokenizer


def is_byte_tokenizer(tokenizer: object) -> bool:
    """Whether tokens are bytes, so that encoding is a copy."""
    return bool(getattr(tokenizer, _MARK, False))


def encode_bytes(text: str) -> np.ndarray:
    """What `byte_tokenizer` makes of a text, without going through its parts one by one."""
    # Lone surrogates, which bad JSON escapes make, are no UTF-8: they become question marks.
    return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)


@functools.cache
def _characters_of_bytes() -> dict[int, str]:
    """The printable character that stands for each byte, by the convention of byte-level vocabularies since GPT-2."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters.update({byte: chr(NUM_BYTES + number) for number, byte in enumerate(others)})
    return characters
