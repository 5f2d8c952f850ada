"""SVG and HTML elements as text: every text and attribute is escaped, so that no text of a run can become markup."""

from html import escape

_CONTROL = {code: " " for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
"""Control characters have no place in a page."""


def clean(text: object) -> str:
    """Return text without control characters and lone surrogates, escaped for HTML."""
    plain = str(text).translate(_CONTROL).encode("utf-8", "replace").decode("utf-8")
    return escape(plain, quote=True)


def element(name: str, *children: str, **attributes: object) -> str:
    """Return an element. Children are markup, attributes are text; `class_` is the attribute `class`."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{clean(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{pairs}>{''.join(children)}</{name}>"


def text(content: object, x: float, y: float, **attributes: object) -> str:
    return element("text", clean(content), x=round(x, 1), y=round(y, 1), **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    return element("line", x1=round(x1, 1), y1=round(y1, 1), x2=round(x2, 1), y2=round(y2, 1), **attributes)


def title(content: object) -> str:
    """Return the tooltip of the element around it."""
    return element("title", clean(content))
