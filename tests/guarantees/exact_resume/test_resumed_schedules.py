"""Resumed learning-rate schedules equal uninterrupted ones, also after a change of the learning rate."""

import copy
import functools
import re
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from transformers import get_scheduler

from forgather.ml.checkpoint.encoding.codec import decode_state, encode_state
from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.optimizer_state import OptimizerState
from forgather.ml.trainer.loop.scheduler_state import SchedulerState, kept_rates

NUM_STEPS, INTERRUPTED = 10, 4


def in_turn(later: Callable[[Any], Any], optimizer: Any) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=3), later(optimizer)]
    return schedules.SequentialLR(optimizer, parts, milestones=[3])


def together(optimizer: Any) -> Any:
    return schedules.ChainedScheduler([schedules.LinearLR(optimizer, 0.1), schedules.ExponentialLR(optimizer, 0.9)])


def by_name(name: str, optimizer: Any) -> Any:
    return get_scheduler(name, optimizer, num_warmup_steps=2, num_training_steps=NUM_STEPS)


cyclic = functools.partial(
    schedules.CyclicLR, base_lr=0.001, max_lr=0.2, step_size_up=3, mode="triangular2", cycle_momentum=False
)
one_cycle = functools.partial(schedules.OneCycleLR, max_lr=0.3, total_steps=NUM_STEPS + 5)
FOLLOWING: dict[str, Callable[[Any], Any]] = {
    "steps": functools.partial(schedules.StepLR, step_size=2, gamma=0.5),
    "exponential": functools.partial(schedules.ExponentialLR, gamma=0.9),
    "cosine": functools.partial(schedules.CosineAnnealingLR, T_max=NUM_STEPS),
    "warm-up": functools.partial(schedules.LinearLR, start_factor=0.1, total_iters=6),
    "in turn": functools.partial(in_turn, functools.partial(schedules.ExponentialLR, gamma=0.9)),
    "together": together,
    "transformers linear": functools.partial(by_name, "linear"),
    "transformers cosine": functools.partial(by_name, "cosine"),
}
"""Schedules that multiply the learning rate of the optimizer."""
OTHERS: dict[str, Callable[[Any], Any]] = {
    "cycles": cyclic,
    "one cycle": one_cycle,
    "cycles in turn": functools.partial(in_turn, cyclic),
    "one cycle in turn": functools.partial(in_turn, one_cycle),
    "to a minimum rate": functools.partial(schedules.CosineAnnealingLR, T_max=NUM_STEPS, eta_min=0.01),
}


class Run:
    """Optimizer with a schedule, and their states for a checkpoint."""

    def __init__(self, schedule: Callable[[Any], Any], rate: Any) -> None:
        named = list(nn.Linear(2, 2).named_parameters())
        groups = [{"params": [one]} for one in named]
        self.optimizer = torch.optim.AdamW([*groups[:1], {**groups[1], "lr": 2 * rate}], lr=rate)
        self.optimizer_state = OptimizerState(self.optimizer, named)
        self.scheduler = schedule(self.optimizer)
        self.scheduler_state = SchedulerState(self.scheduler, self.optimizer)

    def rates(self, num_steps: int) -> list[list[float]]:
        """Return the learning rates of the next steps."""
        noted = []
        for _ in range(num_steps):
            noted.append([float(group["lr"]) for group in self.optimizer.param_groups])
            self.optimizer.step()
            self.scheduler.step()
        return noted

    def resume(self, other: "Run") -> None:
        self.optimizer_state.load_state_dict(other.optimizer_state.state_dict())
        self.scheduler_state.load_state_dict(other.scheduler_state.state_dict())


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("name", [*FOLLOWING, *OTHERS])
def test_resumed_learning_rates_are_bit_identical(name: str, kind: Any) -> None:
    schedule = {**FOLLOWING, **OTHERS}[name]
    straight = Run(schedule, kind(0.1)).rates(NUM_STEPS)
    first, second = Run(schedule, kind(0.1)), Run(schedule, kind(0.1))
    first.rates(INTERRUPTED)
    own = [group["lr"] for group in second.optimizer.param_groups]
    second.resume(first)
    assert second.rates(NUM_STEPS - INTERRUPTED) == straight[INTERRUPTED:]
    # Compiled optimizers keep a reference to the tensor.
    if kind is torch.tensor:
        assert all(group["lr"] is one for group, one in zip(second.optimizer.param_groups, own, strict=True))


@pytest.mark.parametrize("name", FOLLOWING)
def test_changed_learning_rate_takes_effect_once(name: str) -> None:
    expected = Run(FOLLOWING[name], 0.25).rates(NUM_STEPS)[INTERRUPTED:]
    first, second = Run(FOLLOWING[name], 0.1), Run(FOLLOWING[name], 0.25)
    first.rates(INTERRUPTED)
    second.resume(first)
    found = second.rates(NUM_STEPS - INTERRUPTED)
    assert [one == pytest.approx(two, rel=1e-9) for one, two in zip(found, expected, strict=True)].count(False) == 0


@pytest.mark.parametrize("name", ["cycles", "one cycle"])
def test_schedules_with_absolute_rates_ignore_a_changed_learning_rate(name: str) -> None:
    expected = Run(OTHERS[name], 0.1).rates(NUM_STEPS)[INTERRUPTED:]
    first, second = Run(OTHERS[name], 0.1), Run(OTHERS[name], 0.25)
    first.rates(INTERRUPTED)
    second.resume(first)
    assert second.rates(NUM_STEPS - INTERRUPTED) == expected


def test_learning_rate_set_by_other_code_survives_resume() -> None:
    first, second = (Run(FOLLOWING["exponential"], 0.1) for _ in range(2))
    first.rates(INTERRUPTED)
    first.optimizer.param_groups[0]["lr"] = 0.7
    second.resume(first)
    assert second.rates(1)[0][0] == 0.7


def test_kept_rates_undoes_the_effect_of_a_new_schedule() -> None:
    run = Run(FOLLOWING["steps"], torch.tensor(0.1))
    run.rates(INTERRUPTED)
    before = [float(group["lr"]) for group in run.optimizer.param_groups]
    with kept_rates(run.optimizer):
        FOLLOWING["warm-up"](run.optimizer)
        assert [float(group["lr"]) for group in run.optimizer.param_groups] != before
    assert [float(group["lr"]) for group in run.optimizer.param_groups] == before


# --- invalid states


class Factor:
    """Callable object with attributes."""

    def __init__(self) -> None:
        self.decay = 0.9
        self.warm: int | None = None

    def __call__(self, step: int) -> float:
        return self.decay**step


class Own:
    """Schedule that is not a torch class."""

    def __init__(self, optimizer: Any) -> None:
        self.state: Any = {1: [2]}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state

    def step(self) -> None:
        pass


class Growing(schedules.ExponentialLR):
    """Schedule with attributes that grow and change their type."""

    def __init__(self, optimizer: Any) -> None:
        self.seen: list[float] = []
        self.extra: Any = None
        super().__init__(optimizer, 0.9)

    def step(self, epoch: int | None = None) -> None:
        super().step()
        self.seen.append(self.last_epoch)
        self.extra = {"at": self.last_epoch}


ALL: dict[str, Callable[[Any], Any]] = {
    **FOLLOWING,
    **OTHERS,
    "milestones": functools.partial(schedules.MultiStepLR, milestones=[2, 2, 5]),
    "factors": functools.partial(schedules.LambdaLR, lr_lambda=[Factor(), Factor()]),
    "products": functools.partial(schedules.MultiplicativeLR, lr_lambda=lambda step: 0.9),
    "restarts": functools.partial(schedules.CosineAnnealingWarmRestarts, T_0=3),
    "powers": schedules.PolynomialLR,
    "averaging": functools.partial(torch.optim.swa_utils.SWALR, swa_lr=0.05),
    "growing": Growing,
}


def leaves(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all leaves of a state."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return [one for key, value in items for one in leaves(value, (*path, key))] or [path]


def changed(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    copied = place = copy.deepcopy(state)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copied


@pytest.mark.parametrize("name", ALL)
def test_states_of_all_schedules_load(name: str) -> None:
    first, second = Run(ALL[name], 0.1), Run(ALL[name], 0.1)
    first.rates(INTERRUPTED)
    state = decode_state(encode_state(first.scheduler_state.state_dict()))
    second.scheduler_state.check_state_dict(state)
    second.scheduler_state.load_state_dict(copy.deepcopy(state))
    assert second.scheduler_state.state_dict() == state


@pytest.mark.parametrize("name", [name for name in ALL if name != "growing"])
def test_values_of_the_wrong_type_are_rejected(name: str) -> None:
    run = Run(ALL[name], 0.1)
    run.rates(INTERRUPTED)
    before = repr(run.scheduler_state.state_dict())
    # The round trip separates lists that torch stores under several keys.
    state = decode_state(encode_state(run.scheduler_state.state_dict()))
    for path in leaves(state):
        if path[-2:-1] == ("milestones",) or path[-1] in ("warm", "_scale_fn_custom"):
            continue
        wrong: list[Any] = [print, object(), {"a": 1}, torch.zeros(2, 3), [[]], "\0"]
        for value in wrong:
            hostile = changed(state, path, value)
            key = ".".join(["scheduler", *map(str, path)])
            for refuse in (run.scheduler_state.check_state_dict, run.scheduler_state.load_state_dict):
                with pytest.raises(CheckpointLoadError, match=re.escape(key)):
                    refuse(copy.copy(hostile))
            assert repr(run.scheduler_state.state_dict()) == before


KINDS: dict[str, tuple[list[Any], list[Any]]] = {
    "last_epoch": ([-1, 0, 7], [-2, 0.5, True, None, 2**70, "text"]),
    "_step_count": ([0, 7], [-2, 0.5, True, None, 2**70, "text"]),
    "_is_initial": ([True, False], [0, 1, None, "text"]),
    "gamma": ([0.5, 1, -1], [True, None, 2**70, "text", torch.tensor(0.5)]),
    "base_lrs": ([[1, 0.5], [torch.tensor(0.1), 2]], [[1], [1, True], [1, None], [0.1, 0.1, 0.1], None, 0.1]),
}


@pytest.mark.parametrize("key", KINDS)
def test_counters_flags_and_numbers_are_checked_by_type(key: str) -> None:
    run = Run(ALL["exponential"], 0.1)
    own, (fine, wrong) = run.scheduler_state.state_dict(), KINDS[key]
    for value in fine:
        run.scheduler_state.check_state_dict({**own, key: value})
    for value in wrong:
        with pytest.raises(CheckpointLoadError, match=rf"scheduler\.{key}|parameter groups"):
            run.scheduler_state.check_state_dict({**own, key: value})


@pytest.mark.parametrize("name", ["exponential", "in turn", "together", "one cycle", "transformers linear"])
@pytest.mark.parametrize("key", ["step", "get_lr", "optimizer", "__class__", "added"])
def test_unknown_schedule_keys_are_rejected(name: str, key: str) -> None:
    run = Run(ALL[name], 0.1)
    state = run.scheduler_state.state_dict()
    states = [{**state, key: 1}]
    if "_schedulers" in state:
        states.append(changed(state, ("_schedulers", 1, key), 1))
    for hostile in states:
        path = rf"scheduler\.(_schedulers\.1\.)?{key} "
        with pytest.raises(CheckpointLoadError, match=path + ".*same kind as before") as error:
            run.scheduler_state.load_state_dict(hostile)
        assert error.value.is_misfit
    run.rates(1)


@pytest.mark.parametrize(
    ("name", "path"), [("milestones", "gamma"), ("in turn", "_schedulers"), ("factors", "lr_lambdas")]
)
def test_missing_keys_are_accepted_where_torch_accepts_them(name: str, path: str) -> None:
    run = Run(ALL[name], 0.1)
    state = {key: value for key, value in run.scheduler_state.state_dict().items() if key != path}
    if path == "gamma":
        run.scheduler_state.check_state_dict(state)
    else:
        with pytest.raises(CheckpointLoadError, match=f"the key '{path}'"):
            run.scheduler_state.check_state_dict(state)


@pytest.mark.parametrize("milestones", [Counter({-1: 1}), Counter({"a": 1}), {2: 1}, [2], None, Counter({2: True})])
def test_invalid_milestones_are_rejected(milestones: Any) -> None:
    run = Run(ALL["milestones"], 0.1)
    with pytest.raises(CheckpointLoadError, match=r"scheduler\.milestones"):
        run.scheduler_state.check_state_dict({**run.scheduler_state.state_dict(), "milestones": milestones})


def test_lr_lambda_attributes_must_exist() -> None:
    run, plain = Run(ALL["factors"], 0.1), Run(ALL["products"], 0.1)
    state = run.scheduler_state.state_dict()
    for lambdas in ([{"decay": "x"}, None], [{"__call__": print}, None], [{1: 2}, None], [None], "text", [1, 2]):
        with pytest.raises(CheckpointLoadError, match=r"scheduler\.lr_lambdas"):
            run.scheduler_state.check_state_dict({**state, "lr_lambdas": lambdas})
    run.scheduler_state.check_state_dict({**state, "lr_lambdas": [{"decay": 0.5, "warm": 3}, None]})
    with pytest.raises(CheckpointLoadError, match="no attributes"):
        plain.scheduler_state.check_state_dict({**plain.scheduler_state.state_dict(), "lr_lambdas": [{"a": 1}, None]})


@pytest.mark.parametrize("key", ["mode", "threshold_mode"])
def test_unknown_plateau_modes_are_rejected(key: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    state = SchedulerState(schedules.ReduceLROnPlateau(optimizer), optimizer)
    own = state.state_dict()
    state.check_state_dict(
        {**own, key: {"mode": "max", "threshold_mode": "abs"}[key], "best": 0.5, "num_bad_epochs": 2}
    )
    for value in ("triangular", "", None, 1):
        with pytest.raises(CheckpointLoadError, match=rf"scheduler\.{key}.*one of"):
            state.load_state_dict({**own, key: value})


@pytest.mark.parametrize("state", [None, [], "text", 3])
def test_state_must_be_a_dict(state: Any) -> None:
    for name in ("exponential", "transformers linear"):
        with pytest.raises(CheckpointLoadError, match="scheduler in the checkpoint"):
            Run(ALL[name], 0.1).scheduler_state.load_state_dict(state)


def test_custom_schedule_state_must_be_plain_data() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    own = Own(optimizer)
    state = SchedulerState(own, optimizer)
    state.load_state_dict({1: ["anything", torch.ones(3)]})
    assert own.state[1][0] == "anything"
    for hostile in ({"a": [print]}, [1], None):
        with pytest.raises(CheckpointLoadError, match="scheduler"):
            state.load_state_dict(hostile)  # type: ignore[arg-type]


def test_wrapped_schedule_is_checked_like_the_inner_one() -> None:
    run = Run(ALL["exponential"], 0.1)
    wrapper = SimpleNamespace(scheduler=run.scheduler, state_dict=run.scheduler.state_dict)
    with pytest.raises(CheckpointLoadError, match=r"scheduler\.gamma"):
        SchedulerState(wrapper, run.optimizer).check_state_dict({**run.scheduler.state_dict(), "gamma": "x"})
