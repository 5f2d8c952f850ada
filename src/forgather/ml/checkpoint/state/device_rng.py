"""RNG state of an accelerator: the generator of this process's own device.

`RNGState` stores it under the key "accelerator". The device index is only a note for messages: the state is restored on
the device of the process that loads it, so that another layout of nodes draws the same numbers. Older checkpoints have
a list of the states of all visible devices instead.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forgather.ml.checkpoint.state.tensor_checks import Where, check_mapping, check_tensor, described, whole_number

logger = logging.getLogger(__name__)

_MOST_DEVICES = 2**16


def device_state() -> dict[str, Any] | None:
    """Return the generator state of the current accelerator device with its type and index, or None without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    index = torch.accelerator.current_device_index()
    state = torch.get_device_module(accelerator).get_rng_state(*_place(accelerator, index))
    return {"type": accelerator.type, "index": index, "state": state}


def set_device_state(stored: Mapping[str, Any] | None) -> None:
    """Restore the stored state on the current device; a state that does not fit it is reported."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if stored is None:
        return
    if accelerator is None or accelerator.type != stored["type"]:
        logger.warning(
            "The checkpoint has random states of %d %s device(s), but this process uses %s. They are not restored, so random "
            "numbers on a device may differ from the saved run.",
            len(_states(stored)),
            stored["type"],
            "no accelerator" if accelerator is None else accelerator.type,
        )
        return
    index = torch.accelerator.current_device_index()
    state = stored["state"] if "state" in stored else _from_list(stored["states"], accelerator.type, index)
    if state is not None:
        torch.get_device_module(accelerator).set_rng_state(state, *_place(accelerator, index))


def check_device_state(stored: object, where: Where) -> None:
    """Raise `CheckpointLoadError` unless the value is None or a state, or list of states, that `device_state` wrote."""
    if stored is None:
        return
    fields = check_mapping(stored, where)
    kind = fields.get("type")
    if not isinstance(kind, str):
        raise where.at("type").refusal(f"is {described(kind)}", "the name of a kind of device")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # States of another kind of device cannot be tried here. They are not restored either.
    device = kind if accelerator is not None and accelerator.type == kind else ""
    if "state" in fields:
        whole_number(fields.get("index"), where.at("index"), least=0, most=_MOST_DEVICES)
        check_generator_bytes(fields["state"], device, where.at("state"))
        return
    states = fields.get("states")
    if not isinstance(states, list | tuple):
        raise where.at("states").refusal(f"is {described(states)}", "a list")
    for number, state in enumerate(states):
        check_generator_bytes(state, device, where.at(f"states[{number}]"))


def copied_device_state(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with tensors that share no memory with the original."""
    if "state" in stored:
        return {**stored, "state": cpu_copy(stored["state"])}
    return {**stored, "states": [cpu_copy(state) for state in stored["states"]]}


def check_generator_bytes(state: object, device: str, where: Where) -> None:
    """Raise unless a generator of the device accepts the state; an empty `device` skips that test."""
    found = check_tensor(state, where)
    if found.dtype is not torch.uint8 or found.ndim != 1 or found.device.type != "cpu":
        raise where.refusal(
            f"has dtype {found.dtype} and shape {tuple(found.shape)} on {found.device}", "a row of uint8 on the CPU"
        )
    if device:
        # A temporary generator, so that the generators in use keep their state.
        try:
            torch.Generator(device).set_state(cpu_copy(found))
        except RuntimeError as error:
            raise where.refusal(f"is rejected by torch ({str(error).splitlines()[0]})", "a generator state") from error


def cpu_copy(state: Tensor) -> Tensor:
    return state.detach().to("cpu", copy=True)


def _states(stored: Mapping[str, Any]) -> Sequence[Tensor]:
    return [stored["state"]] if "state" in stored else stored["states"]


def _from_list(states: Sequence[Tensor], kind: str, index: int) -> Tensor | None:
    """Return the entry that the saved process used, from an older checkpoint with a list by device index."""
    if not states:
        return None
    used = _used_index(states, kind)
    if used is not None:
        return states[used]
    chosen = index if index < len(states) else 0
    num_devices = torch.accelerator.device_count()
    # With the same number of devices, a rank is on the same device as before, as far as a list can tell.
    if len(states) != num_devices and not all(torch.equal(state, states[chosen]) for state in states):
        logger.warning(
            "The checkpoint has a list of random states of %d %s device(s), and this process sees %d. The list does not tell "
            "which device the saved process used. %s:%d gets the state of %s:%d, so its random numbers may differ from the "
            "saved run.",
            *(len(states), kind, num_devices, kind, index, kind, chosen),
        )
    return states[chosen]


def _used_index(states: Sequence[Tensor], kind: str) -> int | None:
    """Return the index of the only device that drew random numbers, or None if the states do not show it."""
    # All generators get the same seed, and a process draws on its own device only.
    drawn = [number for number, state in enumerate(states) if not _is_fresh(state, kind)]
    if len(drawn) == 1:
        return drawn[0]
    if len(states) < 3:
        return None
    # All devices drew before, but only one of them since their states were last equal.
    usual = states[0] if torch.equal(states[0], states[1]) else states[2]
    different = [number for number, state in enumerate(states) if not torch.equal(state, usual)]
    return different[0] if len(different) == 1 else None


def _is_fresh(state: Tensor, kind: str) -> bool:
    """Return whether a generator with this state has drawn nothing since it was seeded."""
    generator = torch.Generator(kind)
    generator.set_state(cpu_copy(state))
    return torch.equal(torch.Generator(kind).manual_seed(generator.initial_seed()).get_state(), state.cpu())


def _place(accelerator: torch.device, index: int) -> tuple[int, ...]:
    # There is only one MPS device, and the functions of torch.mps take no index.
    return () if accelerator.type == "mps" else (index,)
