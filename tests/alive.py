"""Processes that somebody else has started."""

import time
from pathlib import Path


def runs(pid):
    """Whether it lives: gone and waiting to be buried (by init, if its parent is dead) both count as not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
