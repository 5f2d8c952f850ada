"""Axes of charts: ranges, nice ticks, logarithmic scales, and labels with units."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forgather.ml.trainer.callbacks.display import format_count

Format = Callable[[float], str]
_LOG_RATIO = 50.0
"""Ratio of largest to smallest value that makes a scale logarithmic, if the chart allows it."""
_TIME_STEPS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200),
    *(86400 * days for days in (1, 2, 5, 7, 14, 28, 56, 112, 364)),
)


@dataclass(frozen=True)
class Scale:
    """Map of values to pixels, with ticks and their labels."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]
    label: Format
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(one) if self.is_log else one for one in (self.low, self.high, value))
        share = (at - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def contains(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high


def value_scale(
    values: Sequence[float],
    start: float,
    end: float,
    num_ticks: int,
    from_zero: bool,
    label: Format | None,
    may_be_log: bool,
) -> Scale:
    """Return a scale for finite values: logarithmic for a wide range of positive values, if allowed."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if may_be_log and low > 0 and high / low > _LOG_RATIO:
        return _log_scale(low, high, start, end, label)
    if from_zero:
        low = min(low, 0.0)
    if high - low <= abs(high) * 1e-9:
        # One value, or equal values: a range around them.
        reach = abs(high) * 0.1 or 1.0
        low, high = (low if from_zero else low - reach), high + reach
    step = nice_step((high - low) / num_ticks)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    ticks = [low + step * number for number in range(round((high - low) / step) + 1)]
    return Scale(low, high, start, end, ticks, label or plain_format(step, max(abs(low), abs(high))))


def _log_scale(low: float, high: float, start: float, end: float, label: Format | None) -> Scale:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 6)
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    if len(ticks) < 2:
        ticks = [10.0**first, 10.0**last]
        low, high = ticks
    return Scale(low * 0.95, high * 1.05, start, end, ticks, label or short_number, is_log=True)


def step_scale(low: float, high: float, start: float, end: float, num_ticks: int) -> Scale:
    """Return the scale of a step axis: whole numbers."""
    if high <= low:
        low, high = low - 1, high + 1
    step = max(nice_step((high - low) / num_ticks), 1.0)
    ticks = _inside(low, high, step)
    return Scale(low, high, start, end, ticks, lambda value: f"{value:,.0f}" if high < 1e6 else format_count(value))


def time_scale(high: float, start: float, end: float, num_ticks: int) -> Scale:
    """Return the scale of a time axis from 0 seconds on."""
    high = max(high, 0.001)
    step = next((one for one in _TIME_STEPS if high / one <= num_ticks), _TIME_STEPS[-1])
    return Scale(0.0, high, start, end, _inside(0.0, high, step), lambda value: format_seconds(value, step))


def _inside(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def nice_step(rough: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not smaller than `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def plain_format(step: float, largest: float) -> Format:
    """Return a format with as many digits as the distance of ticks needs."""
    if largest >= 1e5 or step < 1e-4:
        return short_number
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return lambda value: f"{value:.{digits}f}"


def short_number(value: float) -> str:
    """Return a number with at most four digits: 0.0015, 1.2e-05, 12.3k."""
    if value == 0:
        return "0"
    if math.isinf(value):
        return str(value)
    if abs(value) < 1e-3 or abs(value) >= 1e15:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return format_count(value) if value >= 1e4 else f"{value:.4g}"


def round_count(value: float) -> str:
    """Return a count for a tick: 500, 5k, 12.5k, 1.2M."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}"


def format_seconds(value: float, step: float = 1.0) -> str:
    """Return a duration in the unit that its ticks have: 200 ms, 12 s, 5 min, 2 h, 3 d."""
    if value == 0:
        return "0"
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (0.001, "ms"))
    size, unit = next(((size, unit) for size, unit in units if step >= size), units[-1])
    return f"{value / size:g} {unit}" if value / size < 1e6 else f"{value / size:.3g} {unit}"


def format_span(seconds: float) -> str:
    """Return a duration for text: 210 ms, 42 s, 5 min 20 s, 2 h 05 min, 3 d 4 h."""
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if minutes < 60:
        return f"{int(minutes)} min {int(seconds % 60)} s"
    return f"{int(hours)} h {int(minutes % 60):02d} min" if hours < 48 else f"{int(days)} d {int(hours % 24)} h"


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the unit for sizes up to `largest`."""
    for size, unit in ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if largest >= size:
            return size, unit
    return 1.0, "B"


def format_bytes(size: float) -> str:
    factor, unit = byte_unit(size)
    return f"{size / factor:.3g} {unit}" if size / factor < 1000 else f"{size / factor:.0f} {unit}"
