"""Rules of transformers about labels: their names, and which labels of a model are targets.

`Trainer` of this package and its engines use them where a loss is computed outside of Forgather's `ModelLoss`.
"""

from typing import Any

from torch import nn

from forgather.ml.trainer.step_loss.loss_traits import Traits
from forgather.ml.utils import unwrap_model


def target_traits(model: nn.Module) -> Traits:
    """Return which labels of this model are targets: a causal language model does not predict the first position."""
    return Traits(first_counts=not shifts_labels(model))


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the loss of a model shifts its labels by one position."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    inner: Any = base_model(model)
    loss_type = getattr(inner, "loss_type", None)
    # Names such as GPT2LMHeadModel and MyLlama lead to no loss type. Such models use the causal loss, which is the default.
    names = {base.__name__ for base in type(inner).__mro__}
    is_named = loss_type is None and not names.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    is_causal = is_named or LOSS_MAPPING.get(str(loss_type)) is ForCausalLMLoss
    return is_causal and not getattr(getattr(inner, "config", None), "is_encoder_decoder", False)


def label_names_of(model: nn.Module) -> list[str]:
    """Return the arguments of the model's forward that are labels."""
    from transformers.utils.generic import find_labels

    names: list[str] = find_labels(type(base_model(model)))
    return names


def returns_loss(model: nn.Module) -> bool:
    """Return whether the model computes a loss without labels by default."""
    from transformers.utils.generic import can_return_loss

    return bool(can_return_loss(type(base_model(model))))


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers and adapters."""
    inner: Any = unwrap_model(model)
    get_base = getattr(inner, "get_base_model", None)
    base: nn.Module = inner if get_base is None else get_base()
    return base
