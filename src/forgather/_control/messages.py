"""Messages of the control socket: one JSON object per line, with a protocol version.

A client sends one request. The server answers with a line "accepted" if the request has to wait, then with the result.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VERSION = 1
MOST_REQUEST_BYTES = 16384

STATUS, SAVE, EVALUATE, STOP, ABORT, STACKS, SET = COMMANDS = (
    "status",
    "save",
    "evaluate",
    "stop",
    "abort",
    "stacks",
    "set",
)
# Reasons of an answer without a result.
REFUSED, FAILED, ENDED = "refused", "failed", "ended"


class BadRequest(ValueError):
    """Request that is not understood; the message goes to the client."""


@dataclass(frozen=True)
class Request:
    """Request of a client. `wait` is False if the client does not wait for the result."""

    command: str
    wait: bool = True
    values: dict[str, Any] = field(default_factory=dict)
    """New settings, for `set`."""

    def line(self) -> bytes:
        content = {"forgather_control": VERSION, "command": self.command, "wait": self.wait, "values": self.values}
        return encode(content)

    @classmethod
    def parse(cls, line: bytes) -> "Request":
        """Return the request in a line; raise `BadRequest` for anything else."""
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            raise BadRequest("The request is not a line of JSON.") from None
        if not isinstance(content, dict) or "forgather_control" not in content:
            raise BadRequest("The request is not an object with the key 'forgather_control'.")
        if content["forgather_control"] != VERSION:
            raise BadRequest(
                f"This job speaks version {VERSION} of the control protocol. Use the forgather that started it."
            )
        command, values = content.get("command"), content.get("values", {})
        if command not in COMMANDS or not isinstance(values, dict):
            raise BadRequest(f"The command must be one of {', '.join(COMMANDS)}.")
        return cls(command, content.get("wait") is not False, values)


def accepted(about: Mapping[str, Any]) -> bytes:
    """Return the line that tells a waiting client that its request is queued, and what the job does now."""
    return encode({"accepted": True, **about})


def success(result: Mapping[str, Any]) -> bytes:
    return encode({"ok": True, "result": result})


def failure(kind: str, error: str) -> bytes:
    return encode({"ok": False, "kind": kind, "error": error})


def encode(content: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(content), ensure_ascii=True).encode() + b"\n"


def _plain(value: object) -> object:
    """Return a value that JSON can express. NaN and infinities become text, as in `--json`."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # Metrics may be NumPy numbers or tensors with one element.
    item = getattr(value, "item", None)
    return _plain(item()) if callable(item) and getattr(value, "ndim", 1) == 0 else str(value)
