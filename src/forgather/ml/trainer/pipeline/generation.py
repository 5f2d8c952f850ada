"""Text generation through the stages of a pipeline, with the same tokens as `generate` of transformers on one device.

Every rank keeps the sequences and receives each new token, so all ranks build the same inputs and stop together. Only
the rank with the last stage has logits; it chooses the tokens and draws the random numbers. Called by
`PipelineTrainer.pipeline_generate`.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

Run = Callable[[Tensor, Mapping[str, Any], Mapping[int, Mapping[str, Any]]], Tensor | None]
ShareTokens = Callable[[Tensor | None], Tensor]


@dataclass(frozen=True)
class GenerationOptions:
    """Options for sampling and stopping, with the same meaning as in transformers."""

    max_new_tokens: int
    eos_token_id: int | Sequence[int] | None = None
    """Token or tokens that end a row; None continues to max_new_tokens."""
    pad_token_id: int | None = None
    """Token that fills a row after its end; None: the first eos_token_id."""
    do_sample: bool = True
    temperature: float = 1.0
    """Only used with do_sample, like top_k."""
    top_k: int = 0
    """0 keeps all tokens."""
    repetition_penalty: float = 1.0
    use_cache: bool = True
    top_p: float = 1.0
    """Keeps the most probable tokens with this total probability; 1.0 keeps all tokens. Only used with do_sample."""

    def __post_init__(self) -> None:
        _check_count("max_new_tokens", self.max_new_tokens, "0 returns the prompt as it is")
        _check_count("top_k", self.top_k, "0 keeps all tokens")
        _check_positive("repetition_penalty", self.repetition_penalty, "1.0 is no penalty")
        if self.do_sample:
            _check_positive("temperature", self.temperature, "for the most probable token, set do_sample=False")
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"generation needs top_p to be above 0 and at most 1, not {self.top_p!r}; 1 keeps all tokens"
            )
        for token in self.eos_tokens:
            _check_count("eos_token_id", token, "for a model without such a token, pass None")
        if self.pad_token_id is not None:
            _check_count("pad_token_id", self.pad_token_id, "for a tokenizer without padding, pass None")

    def with_tokens_of(self, model: nn.Module) -> "GenerationOptions":
        """Return options with missing eos and pad tokens taken from the model's generation config."""
        defaults = getattr(model, "generation_config", None)
        eos, pad = (getattr(defaults, name, None) for name in ("eos_token_id", "pad_token_id"))
        return replace(
            self,
            eos_token_id=eos if self.eos_token_id is None else self.eos_token_id,
            pad_token_id=pad if self.pad_token_id is None else self.pad_token_id,
        )

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id)

    @property
    def pad_token(self) -> int:
        return self.pad_token_id if self.pad_token_id is not None else next(iter(self.eos_tokens), 0)


def _check_count(name: str, value: object, advice: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"generation needs {name} to be a whole number of at least 0, not {value!r}; {advice}")


def _check_positive(name: str, value: float, advice: str) -> None:
    # Written so that NaN fails as well.
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(
            f"generation needs {name} to be a finite number above 0, not {value!r}: logits are divided by it; {advice}"
        )


def supports_cache(stages: Mapping[int, nn.Module]) -> bool:
    """Return whether all stages of this rank support a KV cache; it is used only if the stages of all ranks do."""
    return all(callable(getattr(stage, "make_cache", None)) for stage in stages.values())


def generate(
    run: Run,
    stages: Mapping[int, nn.Module],
    share_tokens: ShareTokens,
    input_ids: Tensor,
    options: GenerationOptions,
    attention_mask: Tensor | None = None,
    *,
    can_cache: bool,
) -> Tensor:
    """Return the prompts and their continuations as int64 (batch, positions), on every rank.

    `run(inputs, keywords, stage_keywords)` is one forward pass over all ranks. It returns the logits of at least the
    last position on the rank with the last stage, and None elsewhere. `share_tokens` broadcasts the tokens of the rank
    with the last stage. `can_cache` is the result of `supports_cache` over all ranks.

    Prompts of different lengths are padded on the left. Without an attention mask, tokens equal to `pad_token_id` count
    as padding, unless it is an eos_token_id as well.
    """
    ids = input_ids.long()
    for sequences in generated(run, stages, share_tokens, input_ids, options, attention_mask, can_cache=can_cache):
        ids = sequences
    # `ids` is a view of a tensor with room for max_new_tokens.
    return ids.clone()


def generated(
    run: Run,
    stages: Mapping[int, nn.Module],
    share_tokens: ShareTokens,
    input_ids: Tensor,
    options: GenerationOptions,
    attention_mask: Tensor | None = None,
    *,
    can_cache: bool,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the prompts and their continuations after each new token, as a view; the arguments are those of `generate`.

    Without a `generator`, the tokens are drawn from torch's global random state.
    """
    sequences = _Sequences(input_ids, options, attention_mask)
    use_cache = options.use_cache and can_cache
    stage_keywords = _cache_keywords(stages, use_cache)
    while not sequences.is_complete():
        inputs, keywords = sequences.next_inputs(use_cache)
        # No variable holds the logits, so that the logits of a long prompt are freed before the next pass.
        tokens = _choose_on_last_stage(run(inputs, keywords, stage_keywords), sequences.ids, options, generator)
        sequences.append(share_tokens(tokens))
        yield sequences.ids


def _cache_keywords(stages: Mapping[int, nn.Module], use_cache: bool) -> dict[int, dict[str, Any]]:
    """Return the cache keywords of each stage; stages without a cache get none."""
    # Created once for all passes: each pass adds its keys and values to the same cache objects.
    if use_cache:
        return {
            index: {"past_key_values": stage.make_cache(), "use_cache": True}  # type: ignore[operator]
            for index, stage in stages.items()
        }
    return {index: {"use_cache": False} for index, stage in stages.items() if supports_cache({index: stage})}


class _Sequences:
    """Tokens so far, finished rows, and the inputs of the next pass.

    Tokens, mask and positions are allocated at full length in advance: only the token values are unknown.
    """

    def __init__(self, input_ids: Tensor, options: GenerationOptions, attention_mask: Tensor | None) -> None:
        _check_prompts(input_ids, attention_mask)
        batch_size, self._length = input_ids.shape
        self._options = options
        self._ids = _extended(input_ids.long(), options.max_new_tokens, options.pad_token)
        self._eos_tokens = self._ids.new_tensor(options.eos_tokens)
        self._finished = torch.zeros(batch_size, dtype=torch.bool, device=input_ids.device)
        mask = _prompt_mask(input_ids, options, attention_mask)
        self._positions = _positions(mask, options.max_new_tokens)
        # Without padding there is no mask: this is faster, and models without an attention_mask argument can generate.
        self._mask = None if bool(mask.all()) else _extended(mask, options.max_new_tokens, 1)
        self._num_seen = 0

    @property
    def ids(self) -> Tensor:
        return self._ids[:, : self._length]

    def is_complete(self) -> bool:
        if self._length == self._ids.shape[1]:
            return True
        # Without eos tokens no row ends early. This saves bool(), which waits for the device.
        return len(self._eos_tokens) > 0 and bool(self._finished.all())

    def next_inputs(self, use_cache: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the tokens that the stages have not seen (all tokens without a cache), and keywords for every stage."""
        new = slice(self._num_seen if use_cache else 0, self._length)
        self._num_seen = self._length
        keywords = {}
        if self._mask is not None:
            keywords["attention_mask"] = self._mask[:, : self._length].contiguous()
        # By default, models count positions from the first input token: wrong after a cache or left padding.
        if use_cache or self._mask is not None:
            keywords["position_ids"] = self._positions[:, new].contiguous()
        return self._ids[:, new].contiguous(), keywords

    def append(self, tokens: Tensor) -> None:
        # Rows that have ended still run, because all rows of a batch have the same length.
        tokens = tokens.to(self._ids.device).masked_fill(self._finished, self._options.pad_token)
        self._ids[:, self._length] = tokens
        self._length += 1
        self._finished |= torch.isin(tokens, self._eos_tokens)


def _check_prompts(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    if input_ids.dim() != 2 or input_ids.numel() == 0 or input_ids.is_floating_point():
        raise ValueError(
            f"generation needs integer input_ids of shape (batch, positions) with at least one token per row, "
            f"not {input_ids.dtype} of shape {tuple(input_ids.shape)}. Start an empty prompt with a bos token. "
            "For a single prompt, pass input_ids[None]"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"the attention_mask of shape {tuple(attention_mask.shape)} does not fit input_ids of shape "
            f"{tuple(input_ids.shape)}; pass a mask with 1 for each token of the prompts and 0 for padding"
        )


def _prompt_mask(input_ids: Tensor, options: GenerationOptions, attention_mask: Tensor | None) -> Tensor:
    """Return 1 for tokens and 0 for padding, from the attention mask if passed, else from the pad token."""
    if attention_mask is not None:
        mask = (attention_mask != 0).to(input_ids.device, torch.int64)
    # If padding equals an eos token, it cannot be told from the end of a text inside the prompt.
    elif options.pad_token_id is None or options.pad_token_id in options.eos_tokens:
        mask = torch.ones_like(input_ids, dtype=torch.int64)
    else:
        mask = (input_ids != options.pad_token_id).long()
    if not bool(mask[:, -1].all()):
        logger.warning(
            "a prompt ends with padding, which degrades the generated text; pad on the left "
            "(padding_side='left' of the tokenizer)"
        )
    return mask


def _positions(mask: Tensor, num_new: int) -> Tensor:
    """Return position ids: padding is at 0 and does not count; new tokens continue after the last prompt token."""
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    new_positions = positions[:, -1:] + torch.arange(1, num_new + 1, device=mask.device)
    return torch.cat([positions, new_positions], dim=1)


def _extended(rows: Tensor, num_new: int, value: int) -> Tensor:
    return torch.cat([rows, rows.new_full((rows.shape[0], num_new), value)], dim=1)


def _choose_on_last_stage(
    logits: Tensor | None, ids: Tensor, options: GenerationOptions, generator: torch.Generator | None
) -> Tensor | None:
    return None if logits is None else choose_tokens(logits[:, -1], ids, options, generator)


def choose_tokens(
    logits: Tensor, ids: Tensor, options: GenerationOptions, generator: torch.Generator | None = None
) -> Tensor:
    """Return the next token of each row, from its logits (batch, vocabulary) and previous tokens.

    NaN becomes the lowest finite number, so that it is chosen only as a last resort. Infinities become the largest or
    lowest finite number.
    """
    scores = _penalised(logits.float(), ids.to(logits.device), options.repetition_penalty)
    if options.do_sample:
        scores = scores / options.temperature
    # After the divisions, because these can make a large number infinite again.
    scores = torch.nan_to_num(scores, nan=torch.finfo(scores.dtype).min)
    if not options.do_sample:
        return scores.argmax(dim=-1)
    probabilities = _without_tail(_without_improbable(scores, options.top_k), options.top_p).softmax(dim=-1)
    return torch.multinomial(probabilities, num_samples=1, generator=generator).squeeze(1)


def _penalised(scores: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Lower the scores of tokens that a row already contains, padding included; repeated tokens are penalised once."""
    if penalty == 1.0:
        return scores
    batch_size, vocabulary = scores.shape
    # The embedding can have more tokens than the head predicts. Such ids go to one extra column.
    seen = torch.zeros(batch_size, vocabulary + 1, dtype=torch.bool, device=scores.device)
    seen.scatter_(1, ids.clamp(max=vocabulary), True)
    lower = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(seen[:, :vocabulary], lower, scores)


def _without_improbable(scores: Tensor, top_k: int) -> Tensor:
    """Set scores below the top_k highest to minus infinity; scores equal to the lowest kept score stay."""
    if top_k == 0:
        return scores
    lowest_kept = scores.topk(min(top_k, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(scores < lowest_kept, -math.inf)


def _without_tail(scores: Tensor, top_p: float) -> Tensor:
    """Set scores to minus infinity, except for the most probable tokens that together reach the probability top_p."""
    if top_p == 1.0:
        return scores
    ascending, order = scores.sort(dim=-1)
    is_tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    # One token always stays, whatever the rounding of the sum.
    is_tail[:, -1] = False
    return scores.masked_fill(is_tail.scatter(1, order, is_tail), -math.inf)
