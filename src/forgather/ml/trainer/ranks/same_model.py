"""Check that all ranks have the same model: names, shapes and dtypes of parameters and buffers.

All ranks raise the same error, since a rank that raised alone would leave the others waiting in a collective.
`ReplicatedModel` calls it.
"""

import hashlib

from torch import nn

from forgather.ml.distributed import Peers

_NUM_SHOWN = 5


def require_same_model(model: nn.Module, peers: Peers) -> None:
    """Raise the same `ValueError` on all ranks if names, shapes, dtypes or `requires_grad` differ; collective."""
    own = _described(model)
    # Gather digests first: the full descriptions are large, and they are needed only for the message.
    digest = hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()
    if len(set(peers.gather(digest, "comparing the models of all ranks"))) == 1:
        return
    models = peers.gather(own, "comparing the models of all ranks")
    names = list(dict.fromkeys(name for one in models for name in one))
    differing = [name for name in names if len({one.get(name) for one in models}) > 1]
    lines = [f"{name!r}: {_by_rank([one.get(name) for one in models])}" for name in differing[:_NUM_SHOWN]]
    more = f"; and {len(differing) - _NUM_SHOWN} more" if len(differing) > _NUM_SHOWN else ""
    raise ValueError(
        f"The ranks have different models, which cannot train together: {'; '.join(lines)}{more}. Build the same model on "
        "every rank: its config, vocabulary and frozen parameters must not depend on the rank. Check that all nodes read the "
        "same files and versions."
    )


def _described(model: nn.Module) -> dict[str, str]:
    parameters = {
        name: f"shape {list(one.shape)}, {one.dtype}{'' if one.requires_grad else ', frozen'}"
        for name, one in model.named_parameters()
    }
    buffers = {name: f"buffer of shape {list(one.shape)}, {one.dtype}" for name, one in model.named_buffers()}
    return {**parameters, **buffers}


def _by_rank(described: list[str | None]) -> str:
    ranks: dict[str | None, list[str]] = {}
    for rank, one in enumerate(described):
        ranks.setdefault(one, []).append(str(rank))
    return ", ".join(f"{one or 'missing'} on rank {' '.join(numbers)}" for one, numbers in ranks.items())
