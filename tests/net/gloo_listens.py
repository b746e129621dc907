"""Where a real Gloo process listens, for several set-ups of one machine, beside what doctor says it will.

Runs in a network namespace and mounts of its own (see test_doctor_gloo.py); prints a line of JSON per set-up.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

from thinwire.predict.measure.network import gloo_choice
from thinwire.tools.doctor import collect_facts
from thinwire.tools.lab.network import tool

NAME = socket.gethostname()
SETUP = """
ip link set lo up
ip link add eth0 type veth peer name far0
ip link set far0 addrgenmode none
ip link add br7 type bridge
ip addr add 10.9.0.7/24 dev eth0
ip addr add 10.9.0.8/24 dev eth0
ip addr add 10.8.0.7/24 dev br7
ip link set far0 up
ip link set eth0 up
ip link set br7 up
"""
IPV6 = "ip addr add 2001:db8::7/64 dev eth0 nodad"
CASES = {
    "the name leads to the interface": (f"10.9.0.7 {NAME}", {}),
    "to its second address": (f"10.9.0.8 {NAME}", {}),
    "debian": (f"127.0.1.1 {NAME}", {}),
    "to another machine": (f"10.9.0.99 {NAME}", {}),
    "to another machine first": (f"10.9.0.99 {NAME}\n10.9.0.7 {NAME}", {}),
    "to IPv6": (f"2001:db8::7 {NAME}", {}),
    "nowhere": ("127.0.0.1 localhost", {}),
    "debian, interface named": (f"127.0.1.1 {NAME}", {"GLOO_SOCKET_IFNAME": "eth0"}),
    "bridge named": (f"10.9.0.7 {NAME}", {"GLOO_SOCKET_IFNAME": "br7"}),
    "two named": (f"10.9.0.7 {NAME}", {"GLOO_SOCKET_IFNAME": "br7,eth0"}),
    "one that is not there": (f"10.9.0.7 {NAME}", {"GLOO_SOCKET_IFNAME": "eth7"}),
    "one without an address": (f"10.9.0.7 {NAME}", {"GLOO_SOCKET_IFNAME": "far0"}),
}


def listening():
    """Addresses of all sockets of this namespace that listen."""
    found = []
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        table = Path(f"/proc/self/net/{file}")
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == "0A":
                raw = bytes.fromhex(fields[1].partition(":")[0])  # words in the machine's order of bytes
                words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.append(socket.inet_ntop(family, words))
    return sorted(found)


def real(folder, number):
    """What Gloo does: the addresses that it listens on, or None if it cannot start."""
    store = dist.FileStore(f"{folder}/store{number}", 1)
    try:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    except (RuntimeError, ValueError):
        return None
    found = listening()
    dist.destroy_process_group()
    return found


def ip(line, check=True):
    return subprocess.run([tool("ip"), *line.split()[1:]], check=check).returncode == 0


def main():
    for line in SETUP.strip().split("\n"):
        ip(line)
    if not ip(IPV6, check=False):  # switched off on this machine
        del CASES["to IPv6"]
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts"
        hosts.write_text("")
        subprocess.run([tool("mount"), "--bind", str(hosts), "/etc/hosts"], check=True)
        for number, (case, (lines, variables)) in enumerate(CASES.items()):
            hosts.write_text(lines + "\n")
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
            os.environ.update(variables)
            choice = gloo_choice(collect_facts())
            told = {"case": case, "address": choice.address, "problem": choice.problem, "why": choice.why}
            told["cases"] = len(CASES)
            print(json.dumps({**told, "interfaces": choice.interfaces, "real": real(folder, number)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
