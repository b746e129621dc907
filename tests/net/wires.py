"""What the tests of the emulated cluster share."""

import subprocess
import sys

from thinwire.tools import lab
from thinwire.tools.lab.network import tool

CLI = [sys.executable, "-c", "from thinwire.tools.cli.main import run; run()", "lab"]


def namespaces(pid):
    listed = subprocess.run([tool("ip"), "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"tw{pid}-")]


def collect(cluster, command, **options):
    """Run and return the result and the lines of each rank."""
    lines = [[] for _ in range(cluster.workers)]
    result = lab.run(cluster, command, on_line=lambda rank, line: lines[rank].append(line), **options)
    return result, lines
