"""Run as every rank: rank r > 0 sends to rank 0 (or rank 0 to them), for BYTES bytes or SECONDS seconds.

``traffic.py to-zero|from-zero bytes N`` or ``... seconds S``. Prints the payload that this rank sent or received.
"""

import os
import socket
import sys
import threading
import time

direction, unit, amount = sys.argv[1], sys.argv[2], float(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def send(connection):
    payload, sent, end = bytes(1 << 14), 0, time.monotonic() + amount
    while sent < amount if unit == "bytes" else time.monotonic() < end:
        connection.sendall(payload)
        sent += len(payload)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # wait until the other side has read it all
    sys.stdout.write(f"{sent}\n")  # one write: threads share the stream


def receive(connection):
    total = 0
    while count := len(connection.recv(1 << 16)):
        total += count
    sys.stdout.write(f"{total}\n")


def connect():
    for _ in range(5000):
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise SystemExit("rank 0 does not listen")


if rank:
    with connect() as peer:
        (send if direction == "to-zero" else receive)(peer)
else:
    with socket.create_server(("", address[1]), backlog=world) as server:
        peers = [server.accept()[0] for _ in range(world - 1)]
    act = receive if direction == "to-zero" else send
    threads = [threading.Thread(target=act, args=(peer,)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread, peer in zip(threads, peers):
        thread.join()
        peer.close()
