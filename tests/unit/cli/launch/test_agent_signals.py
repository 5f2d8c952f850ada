"""Signals of the launcher: only its workers get them, also after the system has reused a process id."""

import os
import signal
import subprocess
import sys

from forgather.cli.launch.agent import send

# A process that is no child of the test: it stands for one that got the id of an ended worker.
WITH_GRANDCHILD = """
import subprocess, sys
sleeper = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=sys.stdin)
print(sleeper.pid, flush=True)
sys.exit(sleeper.wait())
"""


def test_process_that_is_no_worker_gets_no_signal() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WITH_GRANDCHILD], stdin=pipe, stdout=pipe, text=True) as stranger:
        assert stranger.stdout is not None and stranger.stdin is not None
        pid = int(stranger.stdout.readline())
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        send(signal.SIGKILL, [pid, ended.pid, worker.pid])
        assert worker.wait(30) == -signal.SIGKILL
        os.kill(pid, 0)
        stranger.stdin.close()
        assert stranger.wait(30) == 0
