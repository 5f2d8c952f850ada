"""Activity of a thread, from its Python stack: computing, waiting in a collective, or held in a debugger.

Phases alone cannot tell a rank that computes from a rank that waits for it, since gradients are reduced inside the
backward pass and parameters are gathered inside the forward pass. The sentry of a rank looks twice a second.
"""

import sys
from types import FrameType

from forgather._watch.judge import IN_BACKWARD, IN_COLLECTIVE, IN_DEBUGGER, RUNNING

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
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/pydevd.py", "/pydevd_frame.py")


def activity_of(thread_id: int) -> int:
    """Return what a thread does now."""
    # Only names are kept. A frame keeps its local variables alive, such as the tensors of a step, and a variable with all
    # frames would be a reference cycle, because this frame is one of them.
    stacks = {number: _files(frame) for number, frame in sys._current_frames().items()}
    stack = stacks.pop(thread_id, [])
    if any(file.endswith(_DEBUGGERS) for file in stack):
        return IN_DEBUGGER
    innermost = next((file for file in stack if not file.endswith(_NEUTRAL)), "")
    if innermost.endswith(_BACKWARD):
        # The autograd engine runs Python code in other threads for accelerators.
        computes = any(other and other[-1].endswith(_AUTOGRAD_FUNCTION) for other in stacks.values())
        return RUNNING if computes else IN_BACKWARD
    return IN_COLLECTIVE if any(part in innermost for part in _COLLECTIVES) else RUNNING


def _files(frame: FrameType | None) -> list[str]:
    """Return the files of a stack, innermost first."""
    files: list[str] = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return files
