"""The command that ckpt-chaos runs: hands its environment and output to `chaos_server`, and ends as the rank there does.

Without torch it starts in a few hundredths of a second, so that every crash point can be tried.
"""

import json
import os
import socket
import sys


def main(output_dir: str) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["CHAOS_SOCKET"])
        request = json.dumps({"environment": dict(os.environ), "output_dir": output_dir}).encode()
        socket.send_fds(connection, [len(request).to_bytes(8, "little")], [1, 2])
        connection.sendall(request)
        answer = connection.recv(1)
    # A rank whose process vanished has no exit code to tell.
    return answer[0] if answer else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
