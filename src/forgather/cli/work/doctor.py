"""Work of `forgather doctor`: prints the diagnosis of the installation.

Prints plain text: the command must also work where rich or torch is missing or broken.
"""

import argparse
import dataclasses
import textwrap
from collections.abc import Iterator, Sequence

from forgather._terminal_text import printable
from forgather.cli.command_line import DONE, FAILED
from forgather.cli.json_output import print_json
from forgather.tools.doctor import Check, Diagnosis, Environment, diagnose, inspect_environment, self_test
from forgather.tools.doctor.environment import Space
from forgather.tools.doctor.packages import ExtraPackage
from forgather.tools.doctor.torch_build import Device

_LABEL_WIDTH = 14
_WIDTH = 100


def doctor(options: argparse.Namespace) -> int:
    """Diagnose the installation as the command line requests; returns the exit code."""
    if options.json:
        result = diagnose(run_self_test=not options.no_self_test)
        print_json("doctor/1", as_plain_data(result))
    else:
        result = _shown(not options.no_self_test)
    return DONE if result.is_healthy else FAILED


def as_plain_data(result: Diagnosis) -> dict[str, object]:
    """Return a diagnosis as data that JSON can represent."""
    environment = result.environment
    return {
        "healthy": result.is_healthy,
        "problems": result.problems,
        "warnings": environment.warnings,
        **dataclasses.asdict(environment),
        "self_test": [dataclasses.asdict(check) for check in result.checks],
    }


def _shown(with_self_test: bool) -> Diagnosis:
    """Print the environment, then each check as soon as it has run, then the verdict."""
    environment = inspect_environment()
    for label, text in _rows(environment):
        _row(label, text)
    checks: list[Check] = []
    if with_self_test and not environment.problems:
        _row("self-test", "takes about ten seconds")
        for check in self_test():
            checks.append(check)
            _row("", f"{'passed' if check.passed else 'FAILED'} ({check.seconds:.1f} s)  {check.name}")
            _row("", check.detail)
    result = Diagnosis(environment, tuple(checks))
    _show_verdict(result, with_self_test)
    return result


def _rows(environment: Environment) -> Iterator[tuple[str, str]]:
    torch = environment.torch
    yield "forgather", f"{environment.forgather} in {environment.location}"
    yield "python", f"{environment.python}, {environment.executable}"
    yield "system", f"{environment.system}, {environment.num_cpus} processors for this process"
    for package in environment.packages:
        permitted = f" (needs {package.permitted})" if package.permitted and not package.is_permitted else ""
        yield package.name, f"{package.version or 'MISSING'}{permitted}"
    if torch.version is not None:
        yield "devices", "; ".join(map(_device_text, torch.devices)) or f"CPU only (torch built for {torch.built_for})"
        yield "backends", ", ".join(torch.backends) or "none"
    yield "disk", f"{_space_text(environment.disk)} in {environment.folder}"
    if environment.memory is not None:
        yield "memory", _space_text(environment.memory)
    if environment.shared_memory is not None:
        yield "shared memory", _space_text(environment.shared_memory)
    yield "compiler", environment.compiler or "none (only torch.compile on the CPU needs one)"
    present = [extra for extra in environment.extras if extra.version is not None]
    yield "extras", ", ".join(f"{extra.package} {extra.version}" for extra in present) or "none"
    yield from _missing_rows([extra for extra in environment.extras if extra.version is None])


def _missing_rows(extras: Sequence[ExtraPackage]) -> Iterator[tuple[str, str]]:
    width = max((len(extra.extra) for extra in extras), default=0)
    for number, extra in enumerate(extras):
        package = "" if extra.package == extra.extra else f"{extra.package}, "
        yield "missing" if number == 0 else "", f"{extra.extra:<{width}}  {package}for {extra.feature}"
    if extras:
        yield "", f"To add one of them: {extras[0].install}"


def _show_verdict(result: Diagnosis, with_self_test: bool) -> None:
    for sentence in result.environment.warnings:
        _row("warning", sentence)
    for sentence in result.problems:
        _row("problem", sentence)
    if not result.is_healthy:
        _row("verdict", "Forgather does not work here: see the problems above")
    elif with_self_test:
        _row("verdict", "Forgather works here")
    else:
        _row("verdict", "nothing wrong found; the self-test was not run")


def _row(label: str, text: str) -> None:
    # Folders and errors may contain any character.
    lines = textwrap.wrap(printable(text), _WIDTH - _LABEL_WIDTH, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        print(f"{'' if number else label:<{_LABEL_WIDTH}}{line}", flush=True)


def _device_text(device: Device) -> str:
    memory = "" if device.total_memory is None else f", {device.total_memory / 2**30:.1f} GiB"
    return f"{device.name} {device.description}{memory}"


def _space_text(space: Space) -> str:
    return f"{space.free / 2**30:.1f} of {space.total / 2**30:.1f} GiB free"
