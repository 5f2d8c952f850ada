"""Drop-in for transformers: Trainer, TrainingArguments and their Seq2Seq versions, on Forgather's training loop.

A script changes `from transformers import ...` into `from forgather.hf import ...`. All other names are forwarded to
transformers. See docs/moving-from-transformers.md.
"""

import sys
from typing import TYPE_CHECKING

from forgather._lazy import lazily

if TYPE_CHECKING:
    from forgather.hf.arguments import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
    from forgather.hf.arguments import TrainingArguments as TrainingArguments
    from forgather.hf.seq2seq import Seq2SeqTrainer as Seq2SeqTrainer
    from forgather.hf.trainer import Trainer as Trainer

_OWN = {
    "Seq2SeqTrainer": "seq2seq",
    "Seq2SeqTrainingArguments": "arguments",
    "Trainer": "trainer",
    "TrainingArguments": "arguments",
}
_own = lazily(__name__, _OWN)

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"]


def __getattr__(name: str) -> object:
    """Return a class of this package, or the object of this name in transformers."""
    if name in _OWN:
        return _own(name)
    # Python and its tools probe special names. Importing transformers for them would take seconds.
    if name.startswith("__") and name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    import transformers

    try:
        value: object = getattr(transformers, name)
    except AttributeError:
        raise AttributeError(_unknown(name), name=name, obj=sys.modules[__name__]) from None
    return value


def __dir__() -> list[str]:
    import transformers

    return sorted({*vars(sys.modules[__name__]), *_OWN, *dir(transformers)})


def _unknown(name: str) -> str:
    import transformers

    from forgather._suggestions import did_you_mean

    hint = did_you_mean(name, [*_OWN, *dir(transformers)])
    return f"module {__name__!r} has no attribute {name!r}, and transformers {transformers.__version__} has none.{hint}"
