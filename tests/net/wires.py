"""What the tests of the emulated cluster share."""

import subprocess
import sys
import time
from pathlib import Path

from thinwire.tools import lab
from thinwire.tools.lab.network import tool

CLI = [sys.executable, "-c", "from thinwire.tools.cli.main import run; run()", "lab"]


def namespaces(pid):
    listed = subprocess.run([tool("ip"), "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"tw{pid}-")]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def collect(cluster, command, **options):
    """Run and return the result and the lines of each rank."""
    lines = [[] for _ in range(cluster.workers)]
    result = lab.run(cluster, command, on_line=lambda rank, line: lines[rank].append(line), **options)
    return result, lines
