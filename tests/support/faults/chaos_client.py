"""Command that ckpt-chaos runs: forwards environment and output to `chaos_server`, and exits like the rank there.

It does not import torch, so it starts fast enough to try every crash point.
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
    # A rank that vanished reports no exit code.
    return answer[0] if answer else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
