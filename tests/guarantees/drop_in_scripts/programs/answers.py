"""Features and answers of extractive question answering: long contexts in overlapping windows, best span per example."""

from typing import Any

import numpy as np

MAX_ANSWER_TOKENS = 6


def windows(tokenizer: Any, examples: dict[str, list[Any]], max_length: int) -> Any:
    """Tokenise questions with their contexts; a long context gives several features."""
    return tokenizer(
        examples["question"],
        examples["context"],
        truncation="only_second",
        max_length=max_length,
        stride=4,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding="max_length",
    )


def training_features(tokenizer: Any, examples: dict[str, list[Any]], max_length: int) -> Any:
    """Add the token positions of the answer; windows without the answer point to the first token."""
    tokenized = windows(tokenizer, examples, max_length)
    samples = tokenized.pop("overflow_to_sample_mapping")
    spans = [
        _token_span(
            offsets, tokenized.sequence_ids(i), examples["answer_start"][samples[i]], examples["answer"][samples[i]]
        )
        for i, offsets in enumerate(tokenized.pop("offset_mapping"))
    ]
    tokenized["start_positions"] = [start for start, _ in spans]
    tokenized["end_positions"] = [end for _, end in spans]
    return tokenized


def _token_span(
    offsets: list[tuple[int, int]], sequences: list[int | None], answer_start: int, answer: str
) -> tuple[int, int]:
    answer_end = answer_start + len(answer)
    context = [index for index, sequence in enumerate(sequences) if sequence == 1]
    starts = [index for index in context if offsets[index][0] == answer_start]
    ends = [index for index in context if offsets[index][1] == answer_end]
    return (starts[0], ends[0]) if starts and ends else (0, 0)


def evaluation_features(tokenizer: Any, examples: dict[str, list[Any]], max_length: int) -> Any:
    """Keep the offsets of context tokens and the id of the example, because answers need them."""
    tokenized = windows(tokenizer, examples, max_length)
    samples = tokenized.pop("overflow_to_sample_mapping")
    tokenized["example_id"] = [examples["id"][sample] for sample in samples]
    tokenized["offset_mapping"] = [
        [offset if sequence == 1 else None for offset, sequence in zip(offsets, tokenized.sequence_ids(i), strict=True)]
        for i, offsets in enumerate(tokenized["offset_mapping"])
    ]
    return tokenized


def best_answers(examples: Any, features: Any, predictions: tuple[Any, Any]) -> dict[str, str]:
    """Return the text of the best span of each example; predictions must be in the order of the features."""
    all_starts, all_ends = predictions
    assert len(all_starts) == len(features), (len(all_starts), len(features))
    contexts = dict(zip(examples["id"], examples["context"], strict=True))
    best: dict[str, tuple[float, str]] = {}
    for feature, starts, ends in zip(features, all_starts, all_ends, strict=True):
        score, text = _best_span(contexts[feature["example_id"]], feature["offset_mapping"], starts, ends)
        if score > best.get(feature["example_id"], (-np.inf, ""))[0]:
            best[feature["example_id"]] = (score, text)
    return {example_id: text for example_id, (_, text) in best.items()}


def _best_span(context: str, offsets: list[Any], starts: Any, ends: Any) -> tuple[float, str]:
    candidates = [
        (float(starts[start] + ends[end]), context[offsets[start][0] : offsets[end][1]])
        for start in range(len(offsets))
        for end in range(start, min(start + MAX_ANSWER_TOKENS, len(offsets)))
        if offsets[start] is not None and offsets[end] is not None
    ]
    return max(candidates)
