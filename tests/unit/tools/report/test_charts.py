"""Charts keep spikes and gaps, have sensible ticks, and escape every text."""

import math
import re

import pytest

from forgather.tools.report import svg
from forgather.tools.report.charts import Chart, Curve, Mark, decimate, segments
from forgather.tools.report.scales import format_seconds, step_scale, time_scale, value_scale


def test_decimation_keeps_spikes_and_gaps() -> None:
    points = [(float(x), 1.0) for x in range(100_000)]
    points[43_210] = (43_210.0, 99.0)
    points[70_000] = (70_000.0, math.nan)
    kept = decimate(points, 300)
    assert len(kept) <= 5 * 300 and max(y for _, y in kept if math.isfinite(y)) == 99.0
    assert any(math.isnan(y) for _, y in kept) and kept[0] == points[0] and kept[-1] == points[-1]


def test_a_value_that_is_not_finite_makes_a_gap_and_a_mark() -> None:
    points = [(1.0, 1.0), (2.0, 2.0), (3.0, math.nan), (4.0, math.inf), (5.0, 1.0)]
    assert segments(points) == [[(1.0, 1.0), (2.0, 2.0)], [(5.0, 1.0)]]
    page = Chart("Loss", "", [Curve("training", "c1", points)]).draw()
    assert "is NaN at 3" in page and "is infinite at 4" in page


def test_lines_over_time_do_not_cross_a_restart() -> None:
    assert segments([(1.0, 1.0), (9.0, 2.0)], breaks=[5.0]) == [[(1.0, 1.0)], [(9.0, 2.0)]]


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (2.4, 5.6), (1e-9, 3e-9), (0.0, 1.7e12), (-3.0, 4.0), (5.0, 5.0)]
)
def test_ticks_of_values_are_few_and_cover_the_range(low: float, high: float) -> None:
    scale = value_scale([low, high], 100, 0, 5, False, None, False)
    labels = [scale.label(tick) for tick in scale.ticks]
    assert 2 <= len(labels) <= 8 and len(set(labels)) == len(labels)
    assert scale.low <= low <= high <= scale.high and 0 <= scale(low) <= 100


def test_wide_ranges_of_positive_values_are_logarithmic() -> None:
    assert value_scale([0.01, 300.0], 100, 0, 5, False, None, True).is_log
    assert not value_scale([0.0, 300.0], 100, 0, 5, False, None, True).is_log


def test_ticks_of_steps_and_times() -> None:
    assert step_scale(1, 3, 0, 100, 8).ticks == [1, 2, 3]
    assert step_scale(5, 5, 0, 100, 8).contains(5)
    assert [time_scale(7200, 0, 100, 5).label(tick) for tick in (0, 1800, 3600)] == ["0", "30 min", "60 min"]
    assert format_seconds(7200, 3600) == "2 h" and format_seconds(0.02, 0.01) == "20 ms"


def test_a_chart_of_one_point_has_a_dot() -> None:
    page = Chart("Loss", "", [Curve("training", "c1", [(1.0, 2.5)])]).draw()
    assert page.count("<circle") == 2 and "NaN" not in page


def test_texts_are_escaped_everywhere() -> None:
    bad = '<script>alert("1")</script>\x1b[31m\ud800'
    page = Chart(
        bad, bad, [Curve(bad, "c1", [(1.0, 2.0)]), Curve(bad, "c2", [])], marks=[Mark(1.0, "failed", bad)]
    ).draw()
    assert "<script" not in page and "\x1b" not in page and svg.clean(bad).startswith("&lt;script&gt;alert(&quot;1")
    assert not re.search(r'="[^"]*[<>][^"]*"', page)
