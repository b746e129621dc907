"""What the tests of the emulated cluster share."""

import subprocess
import sys

from thinwire.tools import lab
from thinwire.tools.lab.network import tool

# Of two ranks: opens the connection ``peer`` of each to the other.
MEET = """
import os, socket, time
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(("", address[1])) as server:
        peer = server.accept()[0]
else:
    for _ in range(5000):
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
"""
CLI = [sys.executable, "-c", "from thinwire.tools.cli.main import run; run()", "lab"]


def namespaces(pid):
    listed = subprocess.run([tool("ip"), "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"tw{pid}-")]


def collect(cluster, command, **options):
    """Run and return the result and the lines of each rank."""
    lines = [[] for _ in range(cluster.workers)]
    result = lab.run(cluster, command, on_line=lambda rank, line: lines[rank].append(line), **options)
    return result, lines
