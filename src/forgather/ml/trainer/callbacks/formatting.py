"""Numbers as people read them."""

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def format_count(value: float) -> str:
    """Three digits and a unit: 950, 12.3k, 1.24B."""
    for factor, unit in _UNITS:
        # 999,950 would round to "1000k"
        if value >= factor * 0.9995:
            return f"{value / factor:#.3g}".rstrip(".") + unit
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def format_duration(seconds: float) -> str:
    """Minutes and seconds, with hours and days once there are some: 0:42, 1:02:03, 2d 03:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    if hours:
        return f"{hour}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"
