"""Python stacks: all stacks of this process as text, and the activity of a thread (computing, waiting, debugged).

Phases alone cannot tell a rank that computes from a rank that waits for it, since gradients are reduced inside the
backward pass and parameters are gathered inside the forward pass. The sentry of a rank looks when it sees no progress.

The stacks come from faulthandler, which reads them in C without creating frame objects. `sys._current_frames` creates
them for threads that may be leaving these frames, and CPython 3.11 then crashes on `f_back`.
"""

import faulthandler
import linecache
import os
import re
import tempfile
import threading
from typing import IO, NamedTuple

from forgather._watch.judge import IN_BACKWARD, IN_COLLECTIVE, IN_COMPILER, IN_DEBUGGER, RUNNING

# A wait for a `Work` object is a call into C++, so the innermost Python frame is in the file that waits.
_COLLECTIVES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/forgather/ml/distributed/",
    "/forgather/ml/trainer/ddp/parameter_broadcast.py",
    "/forgather/ml/trainer/hybrid/gradient_reduction.py",
    "/forgather/ml/trainer/hybrid/sharded_stages.py",
    "/forgather/ml/trainer/loading/batch_transport.py",
    "/forgather/ml/trainer/pipeline/forward_only.py",
    "/forgather/ml/trainer/pipeline/stage_setup.py",
    "/forgather/ml/trainer/pipeline/tied_weights.py",
    "/forgather/ml/trainer/pipeline/splitters/stage_building.py",
    "/forgather/ml/checkpoint/sharding/exchange.py",
)
_BACKWARD = "/torch/autograd/graph.py"
_AUTOGRAD_FUNCTION = "/torch/autograd/function.py"
# Wrappers around an operation; the frame outside of them called it.
_NEUTRAL = ("/torch/_ops.py", "/torch/utils/_contextlib.py")
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/pydevd.py", "/pydevd_frame.py", "/IPython/terminal/embed.py")
# On the stack only while torch.compile works. Its stacks may be deeper than a dump, so each of its halves has a name.
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py", "/torch/_inductor/graph.py")

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) ")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Call(NamedTuple):
    """Entry of a Python stack."""

    file: str
    line: int
    function: str


def activity_of(thread_id: int) -> int:
    """Return what a thread does now."""
    stacks = {number: [call.file for call in calls] for number, calls in _stacks().items()}
    stack = stacks.pop(thread_id, [])
    if any(file.endswith(_DEBUGGERS) for file in stack):
        return IN_DEBUGGER
    innermost = next((file for file in stack if not file.endswith(_NEUTRAL)), "")
    if innermost.endswith(_BACKWARD):
        # The autograd engine runs Python code in other threads for accelerators.
        computes = any(other and other[-1].endswith(_AUTOGRAD_FUNCTION) for other in stacks.values())
        return RUNNING if computes else IN_BACKWARD
    if any(part in innermost for part in _COLLECTIVES):
        return IN_COLLECTIVE
    return IN_COMPILER if any(file.endswith(_COMPILERS) for file in stack) else RUNNING


def all_stacks() -> str:
    """Return the Python stacks of all threads of this process, the main thread first, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = _stacks()
    stacks.pop(threading.get_ident(), None)
    ordered = sorted(stacks, key=lambda number: (number != main, names.get(number, "")))
    return "\n".join(f"Thread {names.get(number, number)}:\n{_text(stacks[number])}" for number in ordered)


def _text(calls: list[Call]) -> str:
    """Format a stack like a traceback."""
    lines = []
    for call in reversed(calls):
        lines.append(f'  File "{call.file}", line {call.line}, in {call.function}\n')
        if source := linecache.getline(call.file, call.line).strip():
            lines.append(f"    {source}\n")
    return "".join(lines)


def _stacks() -> dict[int, list[Call]]:
    """Return the stack of each thread by its identifier, innermost call first; at most 100 calls of 100 threads."""
    stacks: dict[int, list[Call]] = {}
    calls: list[Call] = []
    for line in _dump().splitlines():
        if thread := _THREAD.match(line):
            calls = stacks.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME.match(line):
            calls.append(Call(frame[1], int(frame[2]), frame[3]))
    return stacks


def _dump() -> str:
    with _memory_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def _memory_file() -> IO[bytes]:
    # Only Linux has files in memory.
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("forgather-stacks"), "w+b", buffering=0)
    return tempfile.TemporaryFile()
