"""Diagnosis of an installation: versions, devices, resources, missing extras, and a self-test of about ten seconds.

`diagnose` does both parts. It needs neither network nor root rights nor a compiler, and it also works where torch is
missing or broken. `forgather doctor` prints the result.
"""

import os
from dataclasses import dataclass

from forgather.tools.doctor.environment import Environment, inspect_environment
from forgather.tools.doctor.self_test import Check, self_test

__all__ = ["Check", "Diagnosis", "Environment", "diagnose", "inspect_environment", "self_test"]


@dataclass(frozen=True)
class Diagnosis:
    """Environment and results of the self-test; `checks` is empty without a self-test."""

    environment: Environment
    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each reason why Forgather does not work here."""
        failed = (f"Self-test {check.name!r}: {check.detail}" for check in self.checks if not check.passed)
        return (*self.environment.problems, *failed)

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong. Warnings and missing extras are no problems."""
        return not self.problems


def diagnose(folder: str = os.curdir, run_self_test: bool = True) -> Diagnosis:
    """Inspect the environment and run the self-test in a temporary directory below `folder`.

    The self-test is left out if the environment has problems: it would only repeat them.
    """
    environment = inspect_environment(folder)
    is_tested = run_self_test and not environment.problems
    return Diagnosis(environment, tuple(self_test(folder)) if is_tested else ())
