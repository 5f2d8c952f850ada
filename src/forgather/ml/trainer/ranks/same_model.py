"""Check that all ranks have the same model: names, shapes, dtypes and order of parameters and buffers.

All ranks raise the same error, since a rank that raised alone would leave the others waiting in a collective.
`ReplicatedModel` calls it, and `StageSetup` for pipelines.
"""

import hashlib
from collections.abc import Mapping, Sequence

from torch import nn

from forgather.ml.distributed import Peers

_NUM_SHOWN = 5
_MODELS_DIFFER = (
    "The ranks have different models, which cannot train together: {}. Build the same model on every rank: its config, "
    "vocabulary and frozen parameters must not depend on the rank. Check that all nodes read the same files and versions."
)
_STAGES_DIFFER = (
    "The ranks have divided the model into different stages: {}. The model_splitter must return the same stages on every "
    "rank, and may use the rank only to choose its own of them."
)


def require_same_model(model: nn.Module, peers: Peers) -> None:
    """Raise the same `ValueError` on all ranks if names, shapes, dtypes, order or `requires_grad` differ; collective."""
    _require_equal(_described(model), peers, _MODELS_DIFFER)


def require_same_stages(stages: Sequence[nn.Module], peers: Peers) -> None:
    """Raise the same `ValueError` on all ranks if they have divided the model differently; collective."""
    places: dict[str, str] = {}
    for number, stage in enumerate(stages):
        for name, text in _described(stage).items():
            # Buffers that no checkpoint holds may be in several stages.
            places[name] = "; ".join(filter(None, (places.get(name), f"stage {number}, {text}")))
    _require_equal(places, peers, _STAGES_DIFFER)


def _require_equal(own: Mapping[str, str], peers: Peers, message: str) -> None:
    # Gather digests first: the full descriptions are large, and they are needed only for the message. The order counts,
    # because ranks send each other the tensors without names.
    digest = hashlib.sha256(repr(list(own.items())).encode()).hexdigest()
    if len(set(peers.gather(digest, "comparing the models of all ranks"))) == 1:
        return
    models = peers.gather(own, "comparing the models of all ranks")
    names = list(dict.fromkeys(name for one in models for name in one))
    differing = [name for name in names if len({one.get(name) for one in models}) > 1]
    lines = [f"{name!r}: {_by_rank([one.get(name) for one in models])}" for name in differing[:_NUM_SHOWN]]
    if not lines:
        at_places = enumerate(zip(*models, strict=True))
        lines = [
            f"order, tensor {number}: {_by_rank([repr(name) for name in at_place])}"
            for number, at_place in at_places
            if len(set(at_place)) > 1
        ][:1]
    more = f"; and {len(differing) - _NUM_SHOWN} more" if len(differing) > _NUM_SHOWN else ""
    raise ValueError(message.format("; ".join(lines) + more))


def _described(model: nn.Module) -> dict[str, str]:
    parameters = {
        name: f"shape {list(one.shape)}, {one.dtype}{'' if one.requires_grad else ', frozen'}"
        for name, one in model.named_parameters()
    }
    buffers = {name: f"buffer of shape {list(one.shape)}, {one.dtype}" for name, one in model.named_buffers()}
    return {**parameters, **buffers}


def _by_rank(described: Sequence[str | None]) -> str:
    ranks: dict[str | None, list[str]] = {}
    for rank, one in enumerate(described):
        ranks.setdefault(one, []).append(str(rank))
    return ", ".join(f"{one or 'missing'} on rank {' '.join(numbers)}" for one, numbers in ranks.items())
