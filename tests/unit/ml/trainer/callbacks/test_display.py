"""Formatting of counts, durations and table rows."""

import pytest

from forgather.ml.trainer.callbacks.display import LABEL_WIDTH, format_count, format_duration, show_row


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (3.25, "3.2"),
        (950, "950"),
        (999.9, "1.00k"),
        (12345, "12.3k"),
        (999_960, "1.00M"),
        (1.24e9, "1.24B"),
    ],
)
def test_counts_have_three_digits(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3723, "1:02:03"), (183845, "2d 03:04:05")]
)
def test_duration_format_depends_on_its_length(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_rows_are_aligned_and_empty_rows_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    for label, text in {"model": "tiny", "start": None, "recipes": "", "": "second line"}.items():
        show_row(label, text)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["model      tiny", f"{'':<{LABEL_WIDTH}} second line"]
