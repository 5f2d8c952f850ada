"""Program that sleeps until it is killed: `python -m tests.support.sleeping`."""

import time

if __name__ == "__main__":
    time.sleep(1000)
