"""Numbers that are read at a glance."""

import pytest

from forgather.ml.trainer.callbacks.display import format_count, format_duration


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
def test_durations_grow_with_what_they_need(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
