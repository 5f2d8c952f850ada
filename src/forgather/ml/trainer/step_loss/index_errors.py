"""Errors for token ids and labels out of range that name the batch key, the value and the allowed range.

Successful steps cost nothing: `better_error` inspects the frames of the traceback after a step has raised. Only the
batches of the first step on an accelerator are checked beforehand. `StepRunner` and the evaluator call this module.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forgather.ml.distributed import DistributedError
from forgather.ml.trainer.step_loss.token_weighting import IGNORE_INDEX

logger = logging.getLogger(__name__)

_LOSS_FRAMES = {
    "cross_entropy": ("input", "target"),
    "nll_loss": ("input", "target"),
    "cross_entropy_in_place": ("scores", "targets"),
}
"""Loss functions over classes, with the names of their arguments for scores and labels."""
_WORDS = ("out of range", "out of bounds", "device-side assert")
_TOKENIZER_REMEDY = (
    "The tokenizer does not fit the model. Use the tokenizer of this model, or enlarge the embedding: call "
    "model.resize_token_embeddings(len(tokenizer)), or set a larger vocab_size in the config."
)

_TOKEN_KEYS = ("input_ids", "decoder_input_ids", "labels")

Batches = Sequence[Mapping[str, Any]]


def better_error(error: Exception, model: Callable[[], nn.Module], batches: Batches) -> Exception | None:
    """Return an error that names the batch key and the remedy if an index was out of range; otherwise None."""
    if not isinstance(error, (IndexError, RuntimeError, ValueError)) or isinstance(error, DistributedError):
        return None
    return _better_error(error, model(), batches)


class explaining_indices:
    """Context manager that replaces an index error by an error with the batch key and the remedy."""

    __slots__ = ("_batches", "_model")

    def __init__(self, model: nn.Module, batches: Batches) -> None:
        """Keep references: the caller may fill `batches` while the step runs."""
        self._model = model
        self._batches = batches

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, (IndexError, RuntimeError, ValueError)) or isinstance(error, DistributedError):
            return
        better = _better_error(error, self._model, self._batches)
        if better is not None:
            raise better from error


def warn_of_large_ids(model: nn.Module, batches: Batches) -> None:
    """Warn about token ids and labels of a CPU batch that exceed the vocabulary."""
    # On an accelerator such an id ends in a device-side assert without any name. This is only a warning, because a model
    # may map its ids before the embedding.
    found = next(_suspects(model, batches), None)
    if found is not None:
        logger.warning("%s", found)


def _better_error(error: Exception, model: nn.Module, batches: Batches) -> Exception | None:
    is_about_index = any(word in str(error) for word in _WORDS)
    if "device-side assert" not in str(error):
        # Innermost frame first: it holds the tensors of the failed call as local variables.
        frames = list(_frames(error.__traceback__))
        for frame in reversed(frames):
            better = _error_of_frame(frame, is_about_index, model, batches)
            if better is not None:
                return better
        found = next(_suspects(model, batches), None) if is_about_index else None
        return None if found is None else IndexError(found)
    # After a device-side assert every read from the device fails, and the traceback may point to a later call. Only the
    # batches on the CPU can still be checked.
    found = next(_suspects(model, batches), None)
    return RuntimeError(found or _assert_message(str(error)))


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _error_of_frame(frame: FrameType, is_about_index: bool, model: nn.Module, batches: Batches) -> Exception | None:
    name, values = frame.f_code.co_name, frame.f_locals
    if name == "embedding" and isinstance(values.get("weight"), Tensor) and isinstance(values.get("input"), Tensor):
        call = _Lookup(values["input"], values["weight"], model, batches)
        if call.ids.is_floating_point():
            return TypeError(call.float_message())
        return IndexError(call.range_message()) if is_about_index else None
    if name in _LOSS_FRAMES:
        scores, labels = (values.get(one) for one in _LOSS_FRAMES[name])
        if isinstance(scores, Tensor) and isinstance(labels, Tensor) and scores.ndim > 0:
            return _label_error(scores, labels, values.get("ignore_index", IGNORE_INDEX), is_about_index, batches)
    return None


class _Lookup(NamedTuple):
    """Failed embedding lookup: the ids, the weight, and the model and batches to name them by."""

    ids: Tensor
    weight: Tensor
    model: nn.Module
    batches: Batches

    def range_message(self) -> str:
        num_rows = self.weight.shape[0]
        wrong = _worst(self.ids, num_rows)
        if wrong is None:
            wrong = int(self.ids.max())
        key = _key_of_ids(self.ids, self.batches)
        if key is None:
            return self._computed_message(wrong, num_rows)
        rows = _rows(self._embedding(), num_rows, key)
        if wrong < 0:
            return (
                f"{key!r} of a batch holds the id {wrong}, but {rows}. Negative values such as {IGNORE_INDEX} are allowed "
                "in 'labels' only. Pad the ids with the tokenizer's pad_token_id."
            )
        return f"{key!r} of a batch holds the id {wrong}, its largest, but {rows}. {_remedy_for(key)}"

    def _computed_message(self, wrong: int, num_rows: int) -> str:
        shapes = _shapes(self.batches)
        return (
            f"The model requested row {wrong} of {self._embedding()}, which has {num_rows} rows. The model computed this "
            f"index: it is in no key of the batch ({shapes}). Usually it is a position, and the sequences are longer than "
            f"the model allows. Truncate them in the tokenizer (truncation=True, max_length={num_rows}), or build the "
            "model for longer sequences."
        )

    def float_message(self) -> str:
        key = next((name for name, value in _tensors(self.batches) if value.dtype == self.ids.dtype), None)
        which = f"{key!r} of a batch has" if key is not None else "The token ids have"
        return (
            f"{which} dtype {self.ids.dtype}, but {self._embedding()} needs integer ids. Convert them, such as with "
            "torch.tensor(ids, dtype=torch.long)."
        )

    def _embedding(self) -> str:
        """Return the name of the embedding in the model, or a general phrase if it is not found."""
        for name, parameter in self.model.named_parameters():
            if parameter is self.weight:
                return f"the embedding {name.removesuffix('.weight')!r}"
        return "an embedding of the model"


def _label_error(
    scores: Tensor, labels: Tensor, ignored: int, is_about_index: bool, batches: Batches
) -> Exception | None:
    num_classes = scores.shape[1] if scores.ndim > 1 else scores.shape[0]
    num_scores = scores.numel() // num_classes
    if not is_about_index and scores.ndim == 2 and labels.ndim == 1 and num_scores != labels.shape[0]:
        return ValueError(
            f"The loss got {num_scores} predictions of {num_classes} classes each, but {labels.shape[0]} labels "
            f"({_shapes(batches)}): there must be one label for each prediction. Give 'labels' the shape of the model's logits "
            "without the class dimension, or pass a compute_loss_func that matches them."
        )
    wrong = _worst(labels, num_classes, ignored) if is_about_index else None
    if wrong is None:
        return None
    return IndexError(_label_message(wrong, num_classes, ignored, _key_of_label(wrong, batches)))


def _label_message(wrong: int, num_classes: int, ignored: int, key: str | None) -> str:
    which = f"{key!r} of a batch" if key is not None else "The target of the loss"
    allowed = f"allowed are 0 to {num_classes - 1}, and {ignored} for ignored positions"
    remedy = f"Use {ignored} for positions without a label, such as padding."
    if wrong >= num_classes:
        remedy = (
            "For class labels, build the model with enough classes (num_labels). For token ids, use the tokenizer of this "
            "model."
        )
    return f"{which} holds the label {wrong}, but the logits have {num_classes} classes: {allowed}. {remedy}"


def _worst(ids: Tensor, num_rows: int, ignored: int | None = None) -> int | None:
    """Return a value outside of 0 to `num_rows` - 1, the largest first; None if all are valid or cannot be read."""
    try:
        known = ids if ignored is None else ids[ids != ignored]
        if known.numel() == 0 or known.is_floating_point():
            return None
        least, most = int(known.min()), int(known.max())
    except RuntimeError:
        # The device can no longer be read after a failed assertion.
        return None
    if most >= num_rows:
        return most
    return least if least < 0 else None


def _key_of_ids(ids: Tensor, batches: Batches) -> str | None:
    """Return the batch key that holds these ids, completely or as a range of its rows."""
    host = ids.detach().cpu()
    return next((name for name, value in _tensors(batches) if _has_rows(value.cpu(), host)), None)


def _has_rows(value: Tensor, rows: Tensor) -> bool:
    # A model may have reshaped the ids, and a pipeline runs on a slice of the rows.
    if value.shape[1:] != rows.shape[1:] or value.ndim == 0 or value.is_floating_point():
        return value.numel() == rows.numel() and torch.equal(value.flatten().to(rows.dtype), rows.flatten())
    starts = range(len(value) - len(rows) + 1)
    return any(torch.equal(value[start : start + len(rows)].to(rows.dtype), rows) for start in starts)


def _key_of_label(wrong: int, batches: Batches) -> str | None:
    """Return the batch key that holds this label, "labels" first."""
    # Compare single values: losses shift and flatten their labels, so shapes do not match.
    names = [name for name, value in _tensors(batches) if bool((value == wrong).any())]
    return "labels" if "labels" in names else next(iter(names), None)


def _tensors(batches: Batches) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for batch in batches for name, value in batch.items() if isinstance(value, Tensor))


def _shapes(batches: Batches) -> str:
    shapes = {name: list(value.shape) for name, value in _tensors(batches[-1:])}
    return ", ".join(f"{name!r} of shape {shape}" for name, shape in shapes.items())


def _suspects(model: nn.Module, batches: Batches) -> Iterator[str]:
    """Yield a message for each CPU tensor of token ids or labels with a value beyond the input embedding."""
    embedding = _input_embedding(model)
    if embedding is None:
        return
    num_rows = embedding.num_embeddings
    shapes = [value.shape for name, value in _tensors(batches) if name == "input_ids"]
    for name, value in _tensors(batches):
        # Labels with another shape than the ids are not tokens, for example the classes of a classification task.
        if value.device.type != "cpu" or name not in ("input_ids", "labels") or value.shape not in shapes:
            continue
        wrong = _worst(value, num_rows, IGNORE_INDEX if name == "labels" else None)
        if wrong is not None:
            yield (
                f"{name!r} of a batch holds the id {wrong}, but "
                f"{_rows(f'the input embedding of {type(model).__name__}', num_rows, name)}. {_remedy_for(name)}"
            )


def _input_embedding(model: nn.Module) -> nn.Embedding | None:
    """Return the token embedding: from `get_input_embeddings()`, else the only `nn.Embedding`, else None."""
    try:
        ask = getattr(model, "get_input_embeddings", None)
        named = None if ask is None else ask()
    except (NotImplementedError, AttributeError):
        named = None
    if isinstance(named, nn.Embedding):
        return named
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return embeddings[0] if len(embeddings) == 1 else None


def _rows(embedding: str, num_rows: int, key: str) -> str:
    vocabulary = "a vocabulary of " if key in _TOKEN_KEYS else ""
    return f"{embedding} has {vocabulary}{num_rows} rows, for ids from 0 to {num_rows - 1}"


def _remedy_for(key: str) -> str:
    if key in _TOKEN_KEYS:
        return _TOKENIZER_REMEDY
    return f"Keep the values of {key!r} below the number of rows, or build the model with more rows."


def _assert_message(text: str) -> str:
    return (
        f"A device kernel failed an assertion, in this step or shortly before it: {text.splitlines()[0]}. Usually an index was "
        "out of range: a token id beyond the vocabulary, a label beyond the classes, or a position beyond the model's maximum. "
        "Run again with use_cpu=True to see the batch key and the value, or with the environment variable "
        "CUDA_LAUNCH_BLOCKING=1 to see the line."
    )
