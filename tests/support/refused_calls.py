"""System calls that the kernel refuses from now on, as in a sandbox or on an older kernel (a seccomp filter)."""

import ctypes
import platform
import struct

PIDFD_OPEN = 434
SOCKET = {"x86_64": 41}.get(platform.machine(), 198)
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW = 0x00050000, 0x7FFF0000
_FIRST_ARGUMENT = 16
"""Offset in `struct seccomp_data`; the number of the call is at 0."""


def refuse(call: int, error: int, first_argument: int | None = None) -> None:
    """Let a system call fail with `error` in this process and its children, for one first argument or for all."""
    tests = [(0, call)] if first_argument is None else [(0, call), (_FIRST_ARGUMENT, first_argument)]
    code = []
    for left, (offset, expected) in zip(range(len(tests) - 1, -1, -1), tests, strict=True):
        # Where the value differs, the rest and the refusal are skipped.
        code += [(_LOAD, 0, 0, offset), (_JUMP_IF_EQUAL, 0, 2 * left + 1, expected)]
    code += [(_RETURN, 0, 0, _REFUSE | error), (_RETURN, 0, 0, _ALLOW)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("HP", len(code), ctypes.addressof(text)))
    system = ctypes.CDLL(None, use_errno=True)
    if system.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or system.prctl(_PR_SET_SECCOMP, _FILTER, program):
        raise OSError(ctypes.get_errno(), "The kernel accepts no seccomp filter")
