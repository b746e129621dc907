"""How near an emulated link comes to its rate: TCP payload per second over nominal, both directions at once.

Run ``python benchmarks/link_rate.py [RATE ...]``. Of 1500-byte packets TCP can use 95.6 % at best (1448 of 1514 bytes).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

from thinwire.tools import lab

SECONDS = 4.0
WARM_UP = 1.0
RATES = ("10mbit", "100mbit", "1gbit", "2.5gbit", "10gbit")


def receive(connection: socket.socket, report: dict[str, float]) -> None:
    """Read to the end; report payload bits per second after the warm-up."""
    buffer = bytearray(1 << 20)
    began = time.monotonic()
    total, first = 0, None
    while count := connection.recv_into(buffer):
        total += count
        now = time.monotonic()
        if now - began > WARM_UP:
            first = first or (now, total)
            report["rate"] = 8 * (total - first[1]) / max(now - first[0], 1e-9)
    report["bytes"] = total


def rank_main() -> None:
    """Connect the two ranks and send for some seconds while receiving."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":
        with socket.create_server(("", address[1])) as server:
            connection, _ = server.accept()
    else:
        for _ in range(200):
            try:
                connection = socket.create_connection(address)
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
    report: dict[str, float] = {}
    reader = threading.Thread(target=receive, args=(connection, report))
    reader.start()
    payload = bytes(1 << 18)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        connection.sendall(payload)
    connection.shutdown(socket.SHUT_WR)
    reader.join()
    print(json.dumps(report))


def measure(rate: str) -> None:
    lines: dict[int, str] = {}
    result = lab.run(
        lab.Cluster.parse(2, 1, rate), [sys.executable, __file__, "--rank"], on_line=lambda r, t: lines.update({r: t})
    )
    if result.exit_code:
        sys.exit("\n".join(lines.values()))
    reports = [json.loads(lines[rank]) for rank in (0, 1)]
    nominal = lab.parse_rate(rate)
    shares = " ".join(f"{report['rate'] / nominal:6.1%}" for report in reports)
    headers = [r / report["bytes"] - 1 for r, report in zip(result.received_bytes, reports)]
    print(
        f"{rate:>8}  achieved/nominal {shares}   counted over payload {headers[0]:+.1%} {headers[1]:+.1%}", flush=True
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        rank_main()
    else:
        print(f"mode: {lab.available()}")
        for name in sys.argv[1:] or RATES:
            measure(name)
