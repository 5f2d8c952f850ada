"""Text for terminals: control characters of untrusted text, such as escape sequences, become visible characters."""

_KEPT = "\n\t"
_FIRST_PICTURE = 0x2400
_DELETE, _DELETE_PICTURE = 0x7F, 0x2421
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LAST_CONTROL = 0x9F
# Marks that change the direction of the text after them, and so what the rest of a line seems to say.
_DIRECTIONS = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_VISIBLE = {
    **{code: chr(_FIRST_PICTURE + code) for code in range(0x20) if chr(code) not in _KEPT},
    _DELETE: chr(_DELETE_PICTURE),
    **dict.fromkeys(range(_DELETE + 1, _LAST_CONTROL + 1), _REPLACEMENT),
    **dict.fromkeys(map(ord, _DIRECTIONS), _REPLACEMENT),
    # Lone surrogates cannot be written as UTF-8.
    **dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT),
}
_VISIBLE_KEPT = {ord(sign): chr(_FIRST_PICTURE + ord(sign)) for sign in _KEPT}


def printable(text: str) -> str:
    """Return the text with control characters, except line breaks and tabs, as visible characters."""
    return text.translate(_VISIBLE)


def printable_line(text: str) -> str:
    """Return the text on one line: line breaks and tabs become visible characters too."""
    return printable(text).translate(_VISIBLE_KEPT)
