"""Address of the control socket: `<output_dir>/.forgather.sock`, also for paths beyond the limit of Unix sockets.

A long path is replaced by `/proc/self/fd/N/.forgather.sock`, where N is a descriptor of the directory.
"""

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator

SOCKET_NAME = ".forgather.sock"
_MOST_BYTES = 107
"""Size of `sun_path` on Linux, without the final zero."""
_CREDENTIALS = struct.Struct("3i")


@contextlib.contextmanager
def usable_path(directory: str, name: str = SOCKET_NAME) -> Iterator[str]:
    """Yield a path of the socket that `bind` and `connect` accept; it is valid inside the context only."""
    path = os.path.join(directory, name)
    if len(os.fsencode(path)) <= _MOST_BYTES:
        yield path
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def socket_status(directory: str) -> os.stat_result | None:
    """Return the status of the socket file, without following links; None if there is no file.

    Raise `FileExistsError` for a file of another kind, such as a link.
    """
    path = os.path.join(directory, SOCKET_NAME)
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISSOCK(status.st_mode):
        raise FileExistsError(f"{path} exists but is not a socket")
    return status


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def is_trusted(user: int) -> bool:
    """Return whether a user may speak to this process: the same user, or root."""
    return user in (os.geteuid(), 0)
