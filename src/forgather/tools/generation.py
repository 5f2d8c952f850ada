"""Text generation with the model of a checkpoint, token by token.

A checkpoint is data: its model and tokenizer are built by classes of transformers, and code that it names never runs.
`forgather generate` prints the results.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.finalize import (
    ModelInitT,
    best_device,
    is_exported,
    load_finalized,
    load_model,
    resolve_checkpoint,
)
from forgather.ml.trainer.pipeline.generation import GenerationOptions, generated
from forgather.ml.trainer.setup.devices import require_device
from forgather.ml.trainer.step_loss.model_outputs import logits_from_outputs

_TOKENIZER_CONFIG = "tokenizer_config.json"
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class GenerationTokenizer(Protocol):
    """Methods of a Hugging Face tokenizer that generation needs."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def __call__(self, text: str) -> Mapping[str, Any]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token; the names and meanings are those of `generate` in transformers."""

    max_new_tokens: int = 128
    do_sample: bool = True
    """False chooses the most probable token, and ignores temperature, top_k, top_p and seed."""
    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    seed: int = 0
    """The same seed gives the same text on the same device; different checkpoints can so be compared."""

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"generation needs a seed of 64 bits, from -2**63 to 2**64 - 1, not {self.seed}")
        self._options(None)

    def _options(self, eos_token_ids: Sequence[int] | None) -> GenerationOptions:
        return GenerationOptions(
            self.max_new_tokens,
            eos_token_ids,
            do_sample=self.do_sample,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )


@dataclass(frozen=True)
class GeneratedText:
    """Continuation of a prompt."""

    checkpoint: str
    step: int | None
    prompt: str
    sample: int
    """Number of the sample of this prompt, from 0."""
    seed: int
    text: str
    """Continuation, without the prompt."""
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str
    """"end" (the model ended the text), "length" (max_new_tokens) or "context" (the model has no more positions)."""


class TextGenerator:
    """Model and tokenizer of a checkpoint."""

    def __init__(
        self, model: nn.Module, tokenizer: GenerationTokenizer, checkpoint: str = "", step: int | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.checkpoint = checkpoint
        self.step = step
        self._stage = _WholeModel(model)
        _refuse_encoder_decoder(model)

    def stream(self, prompt: str, sampling: Sampling | None = None) -> "TextStream":
        """Return an iterator over the pieces of the continuation; each piece has complete characters."""
        return TextStream(self, prompt, sampling or Sampling())

    def generate(self, prompt: str, sampling: Sampling | None = None, sample: int = 0) -> GeneratedText:
        """Return a continuation of the prompt. Sample n is drawn with seed + n."""
        stream = self.stream(prompt, with_sample(sampling or Sampling(), sample))
        text = "".join(stream)
        return stream.result(text, sample)

    def new_ids(self, ids: list[int], sampling: Sampling, num_new: int) -> Iterator[int]:
        """Yield the new tokens after a prompt of token ids; an end-of-text token is the last one."""
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        options = replace(sampling._options(self.end_tokens), max_new_tokens=num_new)
        steps = generated(
            self._stage.run,
            {0: self._stage},
            _known,
            torch.tensor([ids], device=device),
            options,
            can_cache=self._stage.can_cache,
            generator=torch.Generator(device).manual_seed(sampling.seed),
        )
        for sequences in steps:
            yield int(sequences[0, -1])

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end a text: those of the tokenizer and of the model's generation config."""
        stored = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ids = [self.tokenizer.eos_token_id, *(stored if isinstance(stored, (list, tuple)) else [stored])]
        return sorted({one for one in ids if isinstance(one, int) and one >= 0})

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt. An empty prompt starts a new text."""
        # Lone surrogates come from arguments that are not valid UTF-8.
        text = prompt.encode("utf-8", errors="replace").decode()
        ids = [int(one) for one in self.tokenizer(text)["input_ids"]] if text else []
        if not ids:
            start = next(
                (one for one in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id) if one is not None), None
            )
            if start is None:
                raise ValueError(
                    "The prompt is empty, and the tokenizer has no token that begins a text. Give a prompt."
                )
            ids = [start]
        self._check_ids(ids)
        return ids

    def _check_ids(self, ids: Sequence[int]) -> None:
        find = getattr(self.model, "get_input_embeddings", None)
        size = getattr(find() if callable(find) else None, "num_embeddings", None)
        if isinstance(size, int) and max(ids) >= size:
            raise ValueError(
                f"The tokenizer gives the token {max(ids)}, but the model has only {size} tokens: they do not belong together."
            )

    @property
    def context_length(self) -> int | None:
        """Number of positions of the model; None if it does not tell."""
        config = getattr(self.model, "config", None)
        length = getattr(config, "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None


class TextStream(Iterator[str]):
    """Iterator over the pieces of a continuation, as they are generated."""

    def __init__(self, generator: TextGenerator, prompt: str, sampling: Sampling) -> None:
        self._generator = generator
        self._prompt = prompt
        self._sampling = sampling
        self._ids = generator.encode(prompt)
        self._num_new = _room(len(self._ids), sampling.max_new_tokens, generator.context_length)
        self._new: list[int] = []
        self._pieces = self._stream()

    def __next__(self) -> str:
        return next(self._pieces)

    def result(self, text: str, sample: int = 0) -> GeneratedText:
        """Return the description of the text so far."""
        return GeneratedText(
            checkpoint=self._generator.checkpoint,
            step=self._generator.step,
            prompt=self._prompt,
            sample=sample,
            seed=self._sampling.seed,
            text=text,
            num_prompt_tokens=len(self._ids),
            num_tokens=len(self._new),
            finish_reason=self.finish_reason,
        )

    @property
    def finish_reason(self) -> str:
        """Why the text ended, see `GeneratedText`."""
        if self._new and self._new[-1] in self._generator.end_tokens:
            return "end"
        return "length" if self._num_new == self._sampling.max_new_tokens else "context"

    def _stream(self) -> Iterator[str]:
        decoder = _IncrementalDecoder(self._generator.tokenizer, self._ids)
        for token in self._generator.new_ids(self._ids, self._sampling, self._num_new):
            self._new.append(token)
            piece = decoder.push(token)
            if piece:
                yield piece
        rest = decoder.flush()
        if rest:
            yield rest


def load_generator(
    path: str,
    *,
    model_init: ModelInitT | None = None,
    tokenizer: GenerationTokenizer | None = None,
    ema: bool = False,
    device: torch.device | str | None = None,
) -> TextGenerator:
    """Load model and tokenizer of a checkpoint, or of the newest complete checkpoint of an output directory.

    `path` may also be an exported model, from `forgather finalize`, `forgather checkpoint export` or `save_pretrained`.
    `model_init` builds the model if it is not a transformers model. `tokenizer` replaces the stored one. `ema=True` loads
    the averaged weights.
    """
    require_device(device)
    if is_exported(path):
        checkpoint, step, model = path, None, _exported_model(path, model_init, ema)
    else:
        checkpoint = resolve_checkpoint(path)
        # The model first: its files are verified before the tokenizer is read.
        step, model = read_manifest(checkpoint).step, load_model(checkpoint, model_init, ema)
    model = model.to(device or best_device())
    return TextGenerator(model, tokenizer or _stored_tokenizer(checkpoint), checkpoint, step)


def generate_text(
    path: str,
    prompts: str | Sequence[str],
    *,
    sampling: Sampling | None = None,
    num_samples: int = 1,
    model_init: ModelInitT | None = None,
    tokenizer: GenerationTokenizer | None = None,
    ema: bool = False,
    device: torch.device | str | None = None,
) -> list[GeneratedText]:
    """Return `num_samples` continuations of each prompt by the model of a checkpoint, in the order of the prompts."""
    generator = load_generator(path, model_init=model_init, tokenizer=tokenizer, ema=ema, device=device)
    texts = [prompts] if isinstance(prompts, str) else prompts
    return [generator.generate(prompt, sampling, sample) for prompt in texts for sample in range(num_samples)]


def with_sample(sampling: Sampling, sample: int) -> Sampling:
    """Return the sampling of one of several samples: each has its own seed."""
    return replace(sampling, seed=sampling.seed + sample)


class _WholeModel(nn.Module):
    """Model as the only stage of `generated`, with a KV cache if transformers supports one for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        supports = getattr(model, "_supports_default_dynamic_cache", None)
        self.can_cache = bool(callable(supports) and supports())
        # Models of transformers return a cache that generation without one does not need.
        self._keywords = {"use_cache": False} if callable(supports) else {}

    def make_cache(self) -> object:
        from transformers import DynamicCache

        config: Any = self.model.config
        return DynamicCache(config=config.get_text_config(decoder=True))

    @torch.no_grad()
    def run(self, inputs: Tensor, keywords: Mapping[str, Any], stages: Mapping[int, Mapping[str, Any]]) -> Tensor:
        """Return the logits of a forward pass."""
        outputs = self.model(inputs, **{**self._keywords, **keywords, **(stages[0] if self.can_cache else {})})
        logits = logits_from_outputs(outputs)
        if logits.ndim != 3:
            raise ValueError(
                f"{type(self.model).__name__} returns logits of shape {tuple(logits.shape)}, and text needs one prediction per "
                "position: (batch, positions, vocabulary). The model cannot generate text."
            )
        return logits


class _IncrementalDecoder:
    """Decoder of tokens that come one by one; holds back the bytes of incomplete UTF-8 characters."""

    def __init__(self, tokenizer: GenerationTokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # The last prompt token is context: some tokenizers drop the space of the first token that they decode.
        self._ids = list(prompt[-1:])
        self._num_shown = len(self._decoded())

    def push(self, token: int) -> str:
        """Return the new text, without a character that later tokens may complete."""
        self._ids.append(token)
        text = self._decoded()
        # Only the last replacement character can be the beginning of a character: what follows the others ended them.
        is_complete = not text.endswith(_INCOMPLETE)
        piece = self._take(text if is_complete else text[:-1])
        if is_complete and piece:
            # Decode only the newest token again, so that the time per token does not grow.
            self._ids = self._ids[-1:]
            self._num_shown = len(self._decoded())
        return piece

    def flush(self) -> str:
        """Return what is left; bytes without a character become replacement characters."""
        return self._take(self._decoded())

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)

    def _take(self, text: str) -> str:
        piece = text[self._num_shown :]
        self._num_shown += len(piece)
        return piece


def _known(tokens: Tensor | None) -> Tensor:
    assert tokens is not None, "the whole model has logits"
    return tokens


def _room(num_prompt_tokens: int, max_new_tokens: int, context_length: int | None) -> int:
    """Return the number of tokens that can be generated."""
    if context_length is None:
        return max_new_tokens
    room = context_length - num_prompt_tokens
    if room <= 0:
        raise ValueError(
            f"The prompt has {num_prompt_tokens} tokens, but the model has only {context_length} positions. Shorten the prompt."
        )
    return min(max_new_tokens, room)


def _exported_model(path: str, model_init: ModelInitT | None, ema: bool) -> nn.Module:
    if ema:
        raise CheckpointLoadError(
            f"{path} is an exported model, which has one set of weights. Give the checkpoint, or export its averaged weights "
            "with forgather finalize --ema."
        )
    return load_finalized(path, model_init)


def _stored_tokenizer(checkpoint: str) -> GenerationTokenizer:
    if not os.path.exists(os.path.join(checkpoint, _TOKENIZER_CONFIG)):
        raise CheckpointLoadError(
            f"{checkpoint} has no tokenizer. Pass a tokenizer; on the command line, --config with a tokenizer section."
        )
    from transformers import AutoTokenizer

    found: Any = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    tokenizer: GenerationTokenizer = found
    return tokenizer


def _refuse_encoder_decoder(model: nn.Module) -> None:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model, and only models that continue a text are supported. Export "
            "the checkpoint with forgather finalize, and call generate of transformers."
        )
