"""Rehearsal device: CUDA tensors and NCCL's rules in a CPU build of torch.

`python -m tests.support.rehearsal COMMAND ...` runs a command with it (see `__main__.py`), and `make rehearse` runs
`tests/rehearsal`. In such a process, `torch.cuda` has devices. Their memory belongs to the host, and the kernels are
the CPU's. Tests can find errors that do not show on the CPU:

- `watching()` records host waits, copies and hazards, each with its source line.
- Tensors of the host and of the device do not mix, nor do tensors of two devices.
- Fresh memory is NaN. An asynchronous copy to pinned memory arrives when the host waits for it; until then the target
  is NaN. It is a hazard to change the pinned source of a copy too early.
- Streams and events have an order, and it is a hazard to use or free memory that another stream still works on.
- Each device has its own random numbers and memory statistics.
- `ProcessGroupNCCL` enforces NCCL's rules. `tracing()` records its launches and waits, and `find_deadlocks()` replays
  the traces of all ranks by NCCL's order.

Limits: kernels are the CPU's and run at once, attention is always decomposed, and there are no Triton, CUDA graphs or
NCCL itself. Counts of host waits are lower bounds. The device uses internals of torch 2.13.
"""

from tests.support.rehearsal.order import find_deadlocks, load_traces, save_trace
from tests.support.rehearsal.record import Observation, Record, watching
from tests.support.rehearsal.tracing import tracing

__all__ = ["Observation", "Record", "find_deadlocks", "load_traces", "save_trace", "tracing", "watching"]
