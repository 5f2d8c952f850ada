"""Replay of NCCL traces: would the messages of these ranks arrive, by NCCL's order?

    python -m tests.support.rehearsal.order FOLDER

The rules of the replay:

- A communicator runs its operations in the order of their launch. An operation occupies it until it is complete.
- A collective is complete when all members have it at the head of their queues. A message needs both ends there.
- A batch of messages occupies the communicator of the whole group. Its messages match in any order.
- A single message occupies a communicator of its two ranks.
- A launch comes after all earlier waits of its rank, because NCCL's stream waits for the computing stream, and that
  waits for the operation.
"""

import json
import sys
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

Entry: TypeAlias = Mapping[str, Any]
Trace: TypeAlias = Sequence[Entry]
MESSAGES = ("send", "recv")
TRACE_NAME = "nccl_trace_{rank}.json"
MAX_SHOWN = 12


class Channel(NamedTuple):
    """A communicator: a group, or two of its ranks."""

    group: str
    members: tuple[int, ...]


class Message(NamedTuple):
    """One half of a message, as its own rank sees it."""

    operation: str
    peer: int
    num_bytes: int

    def other_half(self, rank: int) -> "Message":
        return Message("recv" if self.operation == "send" else "send", rank, self.num_bytes)


@dataclass
class Operation:
    """An operation of one rank: a collective, or one or more messages."""

    work: int
    channel: Channel
    collective: tuple[str, int] | None = None
    """Name and size; None for messages."""
    messages: list[Message] = field(default_factory=list)

    def __str__(self) -> str:
        if self.collective is not None:
            return f"{self.collective[0]} of {self.collective[1]} bytes in group {self.channel.group!r}"
        halves = [f"{name} rank {peer} ({size} bytes)" for name, peer, size in self.messages]
        return f"{', '.join(halves)} in group {self.channel.group!r}"


class Wait(NamedTuple):
    work: int


class Rank:
    """One rank in the replay: its program, and the queues of its communicators."""

    def __init__(self, number: int, program: Sequence[Operation | Wait]) -> None:
        self.number = number
        self.queues: dict[Channel, deque[Operation]] = defaultdict(deque)
        self._program = deque(program)
        self._open: dict[int, int] = defaultdict(int)

    def advance(self) -> bool:
        """Launch up to the first wait for an operation that is not complete."""
        before = len(self._program)
        while self._program:
            step = self._program[0]
            if isinstance(step, Operation):
                self.queues[step.channel].append(step)
                self._open[step.work] += 1
            elif self._open[step.work]:
                break
            self._program.popleft()
        return len(self._program) < before

    def head(self, channel: Channel) -> Operation | None:
        queue = self.queues[channel]
        return queue[0] if queue else None

    def complete(self, channel: Channel) -> None:
        self._open[self.queues[channel].popleft().work] -= 1

    def waiting_for(self) -> int | None:
        step = self._program[0] if self._program else None
        return step.work if isinstance(step, Wait) else None

    def unfinished(self) -> list[Operation]:
        return [operation for queue in self.queues.values() for operation in queue]


def find_deadlocks(traces: Sequence[Trace]) -> list[str]:
    """Return one line for each operation that never completes, given the traces in the order of ranks."""
    ranks = [Rank(number, read_program(trace, number)) for number, trace in enumerate(traces)]
    mismatches: list[str] = []
    is_moving = True
    while is_moving and not mismatches:
        is_moving = True in [rank.advance() for rank in ranks]
        for rank in ranks:
            for channel in list(rank.queues):
                is_moving |= _progress(ranks, rank, channel, mismatches)
    # Every member of a group finds the same mismatch.
    return list(dict.fromkeys(mismatches) or _describe_rest(ranks))[:MAX_SHOWN]


def _progress(ranks: Sequence[Rank], rank: Rank, channel: Channel, mismatches: list[str]) -> bool:
    """Complete the operation at the head of a communicator, or messages of it; False if nothing can move."""
    operation = rank.head(channel)
    if operation is None:
        return False
    if operation.collective is None:
        return _progress_messages(ranks, rank, operation)
    heads = [ranks[member].head(channel) for member in channel.members]
    if any(head is None for head in heads):
        return False
    found = [head for head in heads if head is not None]
    if len({head.collective for head in found}) > 1:
        pairs = zip(channel.members, found, strict=True)
        mismatches.append("; ".join(f"rank {member} runs {head}" for member, head in pairs) + ": these do not match")
        return False
    for member in channel.members:
        ranks[member].complete(channel)
    return True


def _progress_messages(ranks: Sequence[Rank], rank: Rank, operation: Operation) -> bool:
    num_before = len(operation.messages)
    for message in list(operation.messages):
        other = ranks[message.peer].head(operation.channel)
        half = message.other_half(rank.number)
        if other is not None and half in other.messages:
            operation.messages.remove(message)
            other.messages.remove(half)
            if not other.messages and other is not operation:
                ranks[message.peer].complete(operation.channel)
    if not operation.messages:
        rank.complete(operation.channel)
    return len(operation.messages) < num_before


def _describe_rest(ranks: Sequence[Rank]) -> list[str]:
    lines = []
    for rank in ranks:
        work = rank.waiting_for()
        for operation in rank.unfinished():
            state = "waits forever for" if operation.work == work else "never completes"
            lines.append(f"rank {rank.number} {state} {operation}")
    return lines


def read_program(trace: Trace, rank: int) -> list[Operation | Wait]:
    """Convert the trace of one rank into operations and waits."""
    program: list[Operation | Wait] = []
    batches: dict[int, Operation] = {}
    for entry in trace:
        if entry["event"] == "wait":
            program.append(Wait(entry["work"]))
            continue
        operation = _read_launch(entry, rank, batches)
        if operation is not None:
            program.append(operation)
    return program


def _read_launch(entry: Entry, rank: int, batches: dict[int, Operation]) -> Operation | None:
    """Return the operation that an entry begins; None if the entry adds a message to a batch."""
    members = tuple(entry["members"])
    whole_group = Channel(entry["group"], members)
    if entry["operation"] not in MESSAGES:
        return Operation(entry["work"], whole_group, (entry["operation"], entry["bytes"]))
    peer = members[entry["peer"]]
    message = Message(entry["operation"], peer, entry["bytes"])
    if not entry["batch"]:
        pair = Channel(entry["group"], (min(rank, peer), max(rank, peer)))
        return Operation(entry["work"], pair, messages=[message])
    if entry["batch"] in batches:
        batches[entry["batch"]].messages.append(message)
        return None
    batches[entry["batch"]] = Operation(entry["work"], whole_group, messages=[message])
    return batches[entry["batch"]]


def save_trace(folder: Path, rank: int, trace: Trace) -> Path:
    """Write the trace of a rank into a folder."""
    path = folder / TRACE_NAME.format(rank=rank)
    path.write_text(json.dumps(list(trace)))
    return path


def load_traces(folder: Path) -> list[Trace]:
    """Read the traces of a folder, in the order of ranks."""
    num_ranks = len(list(folder.glob(TRACE_NAME.format(rank="*"))))
    return [json.loads((folder / TRACE_NAME.format(rank=rank)).read_text()) for rank in range(num_ranks)]


def main(folder: str) -> int:
    traces = load_traces(Path(folder))
    problems = find_deadlocks(traces)
    num_launches = sum(entry["event"] == "launch" for trace in traces for entry in trace)
    print(f"{len(traces)} ranks, {num_launches} launches: {'DEADLOCK' if problems else 'no deadlock'}")
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
