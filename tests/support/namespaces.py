"""Network namespaces as nodes of a job, with a link between them. Where they cannot be made, the test is skipped."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

ADDRESSES = ("10.213.77.1", "10.213.77.2")


@dataclass(frozen=True)
class Node:
    """A network namespace with an address on a link to the other node."""

    name: str
    link: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def linked_nodes() -> Iterator[list[Node]]:
    """Make two nodes with a link between them, and delete them after the body."""
    if shutil.which("ip") is None:
        pytest.skip("the program ip is missing")
    nodes = [
        Node(f"node{os.getpid()}{side}", f"ln{os.getpid()}{side}", address)
        for side, address in zip("ab", ADDRESSES, strict=True)
    ]
    first, second = nodes
    try:
        for node in nodes:
            _ip("netns", "add", node.name)
        pair = ("type", "veth", "peer", "name", second.link, "netns", second.name)
        _ip("link", "add", first.link, "netns", first.name, *pair)
        for node in nodes:
            _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", node.link)
            _ip("-n", node.name, "link", "set", node.link, "up")
            _ip("-n", node.name, "link", "set", "lo", "up")
        yield nodes
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made: {error.stderr.decode().strip()}")
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "delete", node.name], capture_output=True, check=False)
