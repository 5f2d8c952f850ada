"""File mutations that ignore the content: bit flips, changed lengths, and non-regular files."""

import os
import shutil
import socket
from collections.abc import Callable

from tests.guarantees.hostile_checkpoints.fuzz.place import Place


def flip_bits(place: Place, positions: list[int]) -> bool:
    """Flip single bits. With a matching checksum, the result is other data or any kind of damage."""
    content = bytearray(place.read())
    for position in positions if content else ():
        content[position // 8 % len(content)] ^= 1 << position % 8
    place.write(bytes(content))
    return True


def overwrite(place: Place, position: int, length: int, byte: int) -> bool:
    """Fill a range with one byte."""
    content = bytearray(place.read())
    start = position % max(1, len(content))
    end = min(len(content), start + length)
    content[start:end] = bytes([byte]) * (end - start)
    place.write(bytes(content))
    return True


def resize(place: Place, way: str, number: int) -> bool:
    """Truncate or extend the file."""
    content = place.read()
    place.write(
        {
            "cut": content[: number % max(1, len(content))],
            "cut in front": content[number % max(1, len(content)) :],
            "lengthened": content + bytes(number % 5000),
            "twice": content + content,
            "sparse end": content,
        }[way]
    )
    if way == "sparse end":
        os.truncate(place.path, len(content) + 64 * 2**20)
    return way != "cut"


def exchange_files(place: Place, number: int) -> bool:
    """Overwrite the file with the content of another file of the checkpoint."""
    names = sorted(path.name for path in place.checkpoint.iterdir() if path.is_file())
    place.write((place.checkpoint / names[number % len(names)]).read_bytes())
    return place.name.endswith((".pt", ".bin"))


def take_older(place: Place) -> bool:
    """Overwrite the file with its version from the older checkpoint."""
    if (place.older / place.name).exists():
        place.write((place.older / place.name).read_bytes())
    return True


def replace_file(place: Place, way: str) -> bool:
    """Replace the file with a non-regular file, a link, other content, or nothing."""
    place.path.unlink()
    REPLACEMENTS[way](place)
    # The file outside of the checkpoint is a valid state file, but of another kind.
    return False


def _socket(place: Place) -> None:
    # The path of a socket has at most 108 characters, so the socket is bound to a relative name.
    before = os.getcwd()
    os.chdir(place.checkpoint)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(place.name)
    finally:
        os.chdir(before)


def _full_directory(place: Place) -> None:
    place.path.mkdir()
    (place.path / "data.pkl").write_bytes(b"")


def _hard_link_to_itself(place: Place) -> None:
    """Hard-link the manifest of the older checkpoint under this name."""
    os.link(place.older / "checkpoint_manifest.json", place.path)


def _unreadable(place: Place) -> None:
    shutil.copyfile(place.older / "checkpoint_manifest.json", place.path)
    place.path.chmod(0)


REPLACEMENTS: dict[str, Callable[[Place], object]] = {
    "missing": lambda place: None,
    "empty": lambda place: place.write(b""),
    "pipe": lambda place: os.mkfifo(place.path),
    "directory": lambda place: place.path.mkdir(),
    "full directory": _full_directory,
    "socket": _socket,
    "link to itself": lambda place: place.path.symlink_to(place.name),
    "link to nothing": lambda place: place.path.symlink_to("nothing"),
    "link to zeros": lambda place: place.path.symlink_to("/dev/zero"),
    "link to null": lambda place: place.path.symlink_to("/dev/null"),
    "link to a terminal": lambda place: place.path.symlink_to("/dev/tty"),
    "link outside": lambda place: place.path.symlink_to(place.outside / "sentinel.pt"),
    "relative link outside": lambda place: place.path.symlink_to(place.way_out()),
    "link to a file": lambda place: place.path.symlink_to("rng_state_rank_0.pt"),
    "link to a directory": lambda place: place.path.symlink_to(place.outside),
    "link to memory": lambda place: place.path.symlink_to("/proc/self/mem"),
    "link to a pipe": lambda place: place.path.symlink_to("/proc/self/fd/0"),
    "hard link": _hard_link_to_itself,
    "unreadable": _unreadable,
}
