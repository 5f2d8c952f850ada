"""Restricted unpickler that builds neutral records: no class lookup, no constructor, no `__setstate__`.

A pickle names classes and passes arguments and state to them. Here each object becomes a `PickledRecord`, which the
reader checks before it uses the content. Protocols 2 to 5 are supported, with the opcodes for dataclasses, tuples,
lists and dicts. `dcp_metadata` reads with it.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any

from forgather.ml.checkpoint.encoding.state_budget import POINTER_BYTES, SCALAR_BYTES, SHELL_BYTES, MemoryBudget
from forgather.ml.checkpoint.errors import StateDecodingError

_MARK = object()
# Memory of the Python objects for a record and for a memo entry.
_RECORD_BYTES = 160
_MEMO_BYTES = 100


@dataclass(frozen=True)
class PickledGlobal:
    """Name of a class or function: "module.qualified.name"."""

    name: str


@dataclass(eq=False)
class PickledRecord:
    """Object as its pickle describes it."""

    name: str
    """Class or function that the pickle calls."""
    arguments: tuple[Any, ...]
    state: Any = None
    has_state: bool = field(default=False, repr=False)


def read_records(data: bytes) -> Any:
    """Return the content of a pickle as records; raise `StateDecodingError` for any other opcode or malformed data."""
    machine = _Machine(MemoryBudget(len(data)))
    machine.budget.allow_objects(len(data))
    handlers = machine.handlers()
    try:
        # `genops` only splits the bytes into opcodes and arguments. It builds no object.
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                break
            if opcode.name not in handlers:
                raise StateDecodingError(f"its pickle uses the opcode {opcode.name}")
            handlers[opcode.name](argument)
        (result,) = machine.stack
    except StateDecodingError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise StateDecodingError(f"its pickle is malformed ({type(error).__name__}: {error})") from error
    return result


class _Machine:
    """Stack and memo of one pickle."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def handlers(self) -> dict[str, Callable[[Any], None]]:
        """Return the handler of each allowed opcode."""
        constants = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
        pushed = {name: lambda _, value=value: self._push(value, POINTER_BYTES) for name, value in constants.items()}
        numbers = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
        texts = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
        return {
            **pushed,
            # Protocol number and frame size: no content.
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            **dict.fromkeys(numbers, lambda number: self._push(number, SCALAR_BYTES)),
            **dict.fromkeys(texts, lambda text: self._push(text, getsizeof(text))),
            "EMPTY_LIST": lambda _: self._push([], SHELL_BYTES),
            "EMPTY_DICT": lambda _: self._push({}, SHELL_BYTES),
            "TUPLE": lambda _: self._tuple(self._pop_to_mark()),
            "TUPLE1": lambda _: self._tuple(self._pop(1)),
            "TUPLE2": lambda _: self._tuple(self._pop(2)),
            "TUPLE3": lambda _: self._tuple(self._pop(3)),
            "APPEND": lambda _: self._append(self._pop(1)),
            "APPENDS": lambda _: self._append(self._pop_to_mark()),
            "SETITEM": lambda _: self._set_items(self._pop(2)),
            "SETITEMS": lambda _: self._set_items(self._pop_to_mark()),
            "MEMOIZE": lambda _: self._remember(len(self._memo)),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._remember),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), self._refer_to),
            "GLOBAL": lambda name: self._push(PickledGlobal(name.replace(" ", ".", 1)), _RECORD_BYTES),
            "STACK_GLOBAL": lambda _: self._stack_global(),
            **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda _: self._call()),
            "BUILD": lambda _: self._build(),
        }

    def _push(self, value: Any, num_bytes: int) -> None:
        self.budget.spend(num_bytes)
        self.stack.append(value)

    def _pop(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        if len(items) < count or any(item is _MARK for item in items):
            raise StateDecodingError("its pickle has too few items on its stack")
        del self.stack[-count:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        start = len(self.stack) - 1
        while self.stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise StateDecodingError("its pickle lacks a mark")
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def _tuple(self, items: list[Any]) -> None:
        self._push(tuple(items), SHELL_BYTES + POINTER_BYTES * len(items))

    def _append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise StateDecodingError(f"its pickle appends to a {type(target).__name__}")
        self.budget.spend(POINTER_BYTES * len(items))
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        if type(target) is not dict or len(items) % 2:
            raise StateDecodingError(f"its pickle sets items of a {type(target).__name__}")
        # Python randomises hashes of text, and records hash by identity. Neither can be made to collide.
        if not all(type(key) in (str, PickledRecord) for key in keys):
            raise StateDecodingError("its pickle has a dict with keys other than text and records")
        before = getsizeof(target)
        target.update(zip(keys, items[1::2], strict=True))
        self.budget.spend(getsizeof(target) - before)

    def _remember(self, number: int) -> None:
        self.budget.spend(_MEMO_BYTES)
        self._memo[number] = self.stack[-1]

    def _refer_to(self, number: int) -> None:
        """Push a memo entry."""
        value = self._memo[number]
        # A container that is referred to repeatedly could multiply the work of a reader.
        if type(value) in (list, dict):
            raise StateDecodingError("its pickle refers to one container more than once")
        self._push(value, POINTER_BYTES)

    def _stack_global(self) -> None:
        module, name = self._pop(2)
        if type(module) is not str or type(name) is not str:
            raise StateDecodingError("its pickle names a malformed global")
        self._push(PickledGlobal(f"{module}.{name}"), _RECORD_BYTES)

    def _call(self) -> None:
        function, arguments = self._pop(2)
        if type(function) is not PickledGlobal or type(arguments) is not tuple:
            raise StateDecodingError("its pickle calls something other than a named class")
        self._push(PickledRecord(function.name, arguments), _RECORD_BYTES)

    def _build(self) -> None:
        (state,) = self._pop(1)
        target = self.stack[-1]
        # A pickler sets the state of an object once. A second state would replace the first unseen.
        if type(target) is not PickledRecord or target.has_state:
            raise StateDecodingError(f"its pickle sets the state of a {type(target).__name__}")
        target.state, target.has_state = state, True
