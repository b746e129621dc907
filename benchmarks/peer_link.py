"""What a tensor's way between two peers costs: thinwire's link, plain and under TLS, beside Gloo's send and receive.

``python benchmarks/peer_link.py``: tensors of 64 MB one way, in turns, without a limit on the link and at 1 Gb/s.
Writes ``benchmarks/results/peer_link.json``. Half a minute.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from in_lab import told
from thinwire.core.tls import Credentials
from thinwire.systems.link.hello import INSECURE, PeerIdentity
from thinwire.systems.link.keys import new_keys
from thinwire.systems.link.listener import Caller, Listener
from thinwire.systems.link.peer import Peer

RESULTS = Path(__file__).parent / "results" / "peer_link.json"
LINKS = ("unlimited", "1gbit")
MEGABYTES, REPEATS, ROUNDS = 64, 4, 5
PORTS = {"plain": 29610, "TLS": 29611}
SECONDS = 60.0
HELLO = b"8 bytes."


def paired(rank: int, port: int, trust: Credentials | None) -> Peer:
    """One end of a connection; rank 0 listens."""
    if rank == 0:
        came: queue.SimpleQueue[Peer] = queue.SimpleQueue()
        listener = Listener(port, "0.0.0.0", roles=("node",), trust=trust or INSECURE)
        listener.serve(lambda pair, _: came.put(pair), len(HELLO))
        dist.barrier()
        return came.get()
    dist.barrier()
    return Caller(f"{os.environ['MASTER_ADDR']}:{port}", PeerIdentity("node", 0, trust)).connect(HELLO)


def rank_main(keys: Path) -> None:
    """Rank 0 receives, and tells the median rate of each way in MB/s."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trusts = {"plain": None, "TLS": Credentials.of(keys / ("server", "node")[rank])}
    pairs = {name: paired(rank, PORTS[name], trust) for name, trust in trusts.items()}
    x = torch.ones(MEGABYTES * 10**6 // 4)

    def once(way: str) -> None:
        if way == "gloo":
            dist.recv(x, 1) if rank == 0 else dist.send(x, 0)
        elif rank == 0:
            pairs[way].receive_tensor(x, SECONDS)
        else:
            pairs[way].send_tensor(x, SECONDS)

    rates: dict[str, list[float]] = {way: [] for way in ("gloo", *pairs)}
    for _ in range(1 + ROUNDS):
        for way, found in rates.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(REPEATS):
                once(way)
            found.append(MEGABYTES * REPEATS / (time.perf_counter() - began))
    if rank == 0:
        print(json.dumps({way: statistics.median(found[1:]) for way, found in rates.items()}), flush=True)
    dist.barrier()


def main() -> None:
    record: dict[str, Any] = {"load_average": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as folder:
        hosts = ("10.77.0.1", "127.0.0.1")  # of the lab's first machine, with namespaces and without
        new_keys(Path(folder) / "keys", ("server", "node"), hosts)
        for link in LINKS:
            ((_, _, record[link]),) = told([__file__, str(Path(folder) / "keys")], 2, link, 300.0)
    table = Table("link", "gloo", "plain", "TLS", title=f"tensors of {MEGABYTES} MB, MB/s")
    for link in LINKS:
        table.add_row(link, *(f"{rate:.0f}" for rate in record[link].values()))
    Console().print(table)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    rank_main(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
