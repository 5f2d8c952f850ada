"""Comparison of ranks: a minority is wrong, without a majority the log of the run decides."""

from dataclasses import replace

from forgather.tools.replay import LoggedStep, ReplayReport, StepReport, compare_ranks

RIGHT = {"first": "a", "second": "b"}
WRONG = {"first": "a", "second": "c"}


def report(digests: dict[str, str], loss: float = 1.0, logged: float | None = None) -> ReplayReport:
    step = StepReport(3, 0, loss, 0.5, 0.1, 8, gradient_digests=digests)
    if logged is not None:
        step = replace(step, logged=LoggedStep(logged, 0.5, loss, 0.5))
    return ReplayReport("run", None, 0, "ddp", 2, "cpu", False, [step])


def test_equal_ranks_agree_also_with_losses_that_are_no_numbers() -> None:
    check = compare_ranks([report(RIGHT, float("nan"))] * 3, ["a", "b", "c"])
    assert check.agrees and "devices agree" in check.verdict


def test_the_minority_is_wrong() -> None:
    check = compare_ranks([report(RIGHT), report(RIGHT), report(WRONG)], ["a", "b", "c"])
    assert check.different == [2] and check.parameters == ["second"] and "rank 2 on c" in check.verdict


def test_the_log_decides_between_two_ranks() -> None:
    check = compare_ranks([report(WRONG, 1.1, logged=1.0), report(RIGHT, 1.0, logged=1.0)], ["a", "b"])
    assert check.different == [0] and "rank 0 on a" in check.verdict


def test_without_majority_and_log_nobody_is_named() -> None:
    check = compare_ranks([report(RIGHT), report(WRONG)], ["a", "b"])
    assert check.different == [0, 1] and not check.is_decided and "more ranks" in check.verdict
