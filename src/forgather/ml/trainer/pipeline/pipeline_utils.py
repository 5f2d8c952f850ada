"""Pipeline helpers: stages of each rank, tensors of a module, and checks of the FQNs in stages.

No FQN is in two stages, and all stages together cover the full model. `PipelineModel` checks this after each split.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

STAGE_TYPES = ("loop", "v")


def pipeline_stage_indices(pp_size: int, n_stages: int, style: str = "loop") -> list[tuple[int, ...]]:
    """Return the stages of each rank, in ascending order.

    "loop": rank r has r, r + pp_size, r + 2 pp_size, ...; "v": rank r has r and n_stages - 1 - r.
    """
    if style not in STAGE_TYPES:
        raise ValueError(f"pp_stage_type={style!r} is not one of {', '.join(map(repr, STAGE_TYPES))}.")
    if pp_size < 1 or n_stages < pp_size or n_stages % pp_size:
        raise ValueError(
            f"{n_stages} stages cannot be divided among {pp_size} ranks: each needs the same number of stages, at least one."
        )
    # The "v" schedules of torch (ZBV, DualPipeV) run exactly two stages on each rank.
    if style == "v":
        if n_stages != 2 * pp_size:
            raise ValueError(
                f"A 'v' of {pp_size} ranks has {2 * pp_size} stages, two per rank, but {n_stages} were requested. Set "
                "stages_per_rank=2."
            )
        return [(rank, n_stages - 1 - rank) for rank in range(pp_size)]
    return [tuple(range(rank, n_stages, pp_size)) for rank in range(pp_size)]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, including non-persistent buffers and every name of a tied tensor."""
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    return tensors


def assert_no_duplicate_fqns(modules: Iterable[nn.Module]) -> None:
    """Raise ValueError if two stages hold the same FQN."""
    # Two copies under one name would diverge in training, and a save would keep only one of them.
    seen: dict[str, int] = {}
    for number, module in enumerate(modules):
        for name in module.state_dict(keep_vars=True):
            if name in seen:
                raise ValueError(
                    f"The splitter gave {name!r} to stages {seen[name]} and {number}, but every name belongs to one stage. "
                    "Give a tied weight a different name in each stage."
                )
            seen[name] = number


def require_all_fqns(whole: nn.Module, modules: Sequence[nn.Module], sharing: Sequence[Sequence[str]] = ()) -> None:
    """Raise ValueError unless the stages together have exactly the FQNs of the full model.

    Of names that share one tensor (`sharing`), one name is enough.
    """
    expected = set(whole.state_dict(keep_vars=True))
    given = {name for module in modules for name in module.state_dict(keep_vars=True)}
    given |= {name for group in sharing if given & set(group) for name in group}
    lost, unknown = sorted(expected - given), sorted(given - expected)
    if lost or unknown:
        what = f"lack {lost[0]!r}" if lost else f"have {unknown[0]!r}, which the model does not have"
        raise ValueError(
            f"The stages of {type(whole).__name__} together {what} ({len(lost)} names are missing, "
            f"{len(unknown)} are unknown). A splitter must keep all tensors, under the names of the full model. Pass "
            "another model_splitter."
        )
