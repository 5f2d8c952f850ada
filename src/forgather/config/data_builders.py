"""Builders of the datasets of a run: packed token sequences, or the datasets that a callable returns.

Called by `work/train.py` and by the evaluation of `forgather finalize`. All ranks build the same datasets. Tokens of
files are cached on disk: the first rank of a node writes them, the others only map them.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forgather.config import class_paths
from forgather.config.errors import UsageError
from forgather.config.schema import DataSection
from forgather.data.documents import find_files, is_compressed, read_documents, read_saved_dataset
from forgather.data.packed import PackedTokens
from forgather.data.token_store import (
    EvaluationShare,
    TextTokenizer,
    TokenArray,
    file_identity,
    split_by_tokens,
    tokenize,
    tokenize_to_files,
)
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Datasets:
    """Training dataset and optional evaluation dataset."""

    train: object
    eval: Any | None


def build_datasets(
    section: DataSection,
    tokenizer: TextTokenizer,
    args: TrainingArguments,
    *,
    scratch: str | None = None,
    may_tokenize: bool = True,
) -> Datasets:
    """Return datasets of packed sequences, or the datasets that the callable of the section returns.

    Tokens that are not cached yet are written below `scratch`, if it is given, and the cache is only read.
    `may_tokenize=False` raises FileNotFoundError if documents would have to be read, because no tokens are cached.
    """
    wants_evaluation = args.eval_strategy != "no" or args.eval_on_save
    ways = {"files": bool(section.files), "dataset": section.dataset is not None, "class_path": section.class_path}
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) != 1:
        said = f"it has {' and '.join(given)}" if given else "it has none of them"
        raise UsageError(f"The data needs exactly one of {', '.join(f'data.{name}' for name in ways)}; {said}.")
    _refuse_unused(section, given[0])
    if section.class_path is not None:
        made = class_paths.call(section.class_path, section.init_args, "data")
        if isinstance(made, Mapping):
            return _ready_datasets(made)
        _refuse_tokenizing(may_tokenize, "data.class_path")
        # In memory: the documents of a callable have no identity that a cache could use as its key.
        tokens = tokenize(made, tokenizer, _share(section))
    elif section.dataset is not None:
        _refuse_tokenizing(may_tokenize, "data.dataset")
        tokens = _from_saved_dataset(section, section.dataset, tokenizer)
    else:
        folder = section.cache_dir or os.path.join(args.output_dir, "tokens")
        if section.cache_dir is None and os.path.islink(folder):
            raise UsageError(f"{folder} is a link out of the run. To keep tokens elsewhere, set data.cache_dir.")
        tokens = _from_files(section, tokenizer, folder, scratch, may_tokenize)
    if not section.eval_files and section.eval_split is None:
        tokens = _with_both_splits(tokens, section, wants_evaluation)
    return _packed(tokens, section, tokenizer)


def _refuse_tokenizing(may_tokenize: bool, key: str) -> None:
    if not may_tokenize:
        raise FileNotFoundError(f"The tokens of {key} are not cached on disk.")


def _refuse_unused(section: DataSection, way: str) -> None:
    """Raise UsageError for evaluation settings that do not apply to the chosen source of training data."""
    for name, needed in (("eval_files", "files"), ("eval_split", "dataset")):
        value = getattr(section, name)
        if value and way != needed:
            raise UsageError(
                f"data.{name}={value!r} has no effect with data.{way}: it belongs to data.{needed}. Remove it: "
                "data.eval_fraction of the documents are then kept for evaluation."
            )
    if section.eval_split == "train":
        raise UsageError(
            "data.eval_split='train' would evaluate on the training data. Set another split, or remove it: "
            "data.eval_fraction of the documents are then kept for evaluation."
        )


def _with_both_splits(
    tokens: dict[str, TokenArray], section: DataSection, wants_evaluation: bool
) -> dict[str, TokenArray]:
    """Return both splits; if there are too few documents to fill both, split by tokens instead."""
    train, evaluation = tokens["train"], tokens["eval"]
    lacks_train, lacks_eval = not train.num_documents, not evaluation.num_documents
    if lacks_train == lacks_eval or section.eval_fraction == 0 or (lacks_eval and not wants_evaluation):
        return tokens
    whole = evaluation if lacks_train else train
    # The hash has put all documents into the evaluation split; without evaluations they are for training.
    if not wants_evaluation:
        return {"train": whole, "eval": train}
    logger.info(
        "data.eval_fraction=%g of %d document(s) would leave nothing to %s on. The last %g%% of the tokens are used for "
        "evaluation instead.",
        section.eval_fraction,
        whole.num_documents,
        "train" if lacks_train else "evaluate",
        100 * section.eval_fraction,
    )
    return split_by_tokens(whole, section.eval_fraction)


def _share(section: DataSection, fraction: float | None = None) -> EvaluationShare:
    return EvaluationShare(section.eval_fraction if fraction is None else fraction, section.seed)


def _from_files(
    section: DataSection, tokenizer: TextTokenizer, folder: str, scratch: str | None, may_tokenize: bool
) -> dict[str, TokenArray]:
    def tokens_of(files: list[str], share: EvaluationShare) -> dict[str, TokenArray]:
        sources = [section.text_field, *map(_identity, files)]
        documents = read_documents(files, section.text_field)
        return tokenize_to_files(documents, tokenizer, share, folder, sources, scratch=scratch, may_write=may_tokenize)

    files = find_files(section.files)
    if not section.eval_files:
        return tokens_of(files, _share(section))
    # With separate evaluation files, no training document is withheld.
    eval_files, everything = find_files(section.eval_files), _share(section, 0.0)
    _warn_of_shared(files, eval_files)
    return {"train": tokens_of(files, everything)["train"], "eval": tokens_of(eval_files, everything)["train"]}


def _identity(path: str) -> str:
    """Return a cache key for a file that changes with its content."""
    # Earlier versions tokenised compressed files without decompressing them; the suffix invalidates such caches.
    return f"{file_identity(path)} decompressed" if is_compressed(path) else file_identity(path)


def _warn_of_shared(files: list[str], eval_files: list[str]) -> None:
    places = {os.path.realpath(path) for path in files}
    shared = [path for path in eval_files if os.path.realpath(path) in places]
    if shared:
        logger.warning(
            "%d of %d files of data.eval_files are also in data.files (such as %s): evaluation uses text that the model is "
            "trained on.",
            len(shared),
            len(eval_files),
            shared[0],
        )


def _from_saved_dataset(section: DataSection, path: str, tokenizer: TextTokenizer) -> dict[str, TokenArray]:
    def tokens_of(split: str, share: EvaluationShare) -> dict[str, TokenArray]:
        return tokenize(read_saved_dataset(path, section.text_field, split), tokenizer, share)

    if section.eval_split is None:
        return tokens_of("train", _share(section))
    everything = _share(section, 0.0)
    # The evaluation split first: if it does not exist, the error comes before the training split is tokenised.
    evaluation = tokens_of(section.eval_split, everything)
    return {"train": tokens_of("train", everything)["train"], "eval": evaluation["train"]}


def _packed(tokens: Mapping[str, TokenArray], section: DataSection, tokenizer: TextTokenizer) -> Datasets:
    # Padded positions have the label -100, so any valid id will do.
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0

    def packed(split: str) -> PackedTokens:
        one = tokens[split]
        return PackedTokens(one.tokens, one.document_starts, section.sequence_length, padding, one.sources)

    train, evaluation = packed("train"), packed("eval")
    if len(train) == 0:
        raise ValueError("There is no text to train on: the documents are empty, or there are none.")
    return Datasets(train, evaluation if len(evaluation) else None)


def _ready_datasets(made: Mapping[str, Any]) -> Datasets:
    if "train" not in made or set(made) - {"train", "eval"}:
        raise ValueError(f'data.class_path returned a dict of {list(made)}; expected "train" and, optionally, "eval".')
    return Datasets(made["train"], made.get("eval"))


def describe_data(dataset: object) -> str | None:
    """Return the size of packed tokens in words, or None for datasets of other classes."""
    if not isinstance(dataset, PackedTokens):
        return None
    from forgather.ml.trainer.callbacks.display import format_count

    num_documents = len(dataset.document_starts)
    documents = f"{num_documents:,} document{'s' * (num_documents != 1)}"
    return f"{format_count(len(dataset.tokens))} tokens of {documents}, in sequences of {dataset.sequence_length}"
