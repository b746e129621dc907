"""Long wires without netem: a TUN device for each node, and one loop that holds, limits and loses their packets.

Run as a script in an isolated interpreter, in the namespace of the switch; it imports nothing from thinwire. The first
line of its standard input describes the links; it answers ``ready``, or why not. Each further line is a request and is
answered by one line: ``counts``, or ``carry NODE 0`` and ``carry NODE 1``. It ends when its input does.

A packet waits for its sender's link, travels, and waits for its receiver's link. Linux hands over several segments of a
TCP stream in one piece (GSO) and takes them in one piece. They stay together, unless one of them is lost: then it is
cut out, so a loss is of one packet of 1500 bytes, as on a wire.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from typing import Any

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETCARRIER = 0x400454CA, 0x400454D0, 0x400454E2
_NAPI = 0x0010  # one queue for what is written, whatever core the relay is on: packets keep their order
_DEVICE = 0x0001 | _NAPI | 0x1000 | 0x4000  # TUN, packets with virtio's header before them and no other
_CHECKSUMS, _TCP4_SEGMENTS = 1, 2  # offloads: what a device may be given
_NEW_NETWORK = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
# What Linux puts before a packet: flags, kind of segments, bytes of headers and of a segment, place of the checksum.
_VIRTIO = struct.Struct("=BBHHHH")
_KIND, _TCP4, _IP, _ETHERNET = 1, 1, _VIRTIO.size, 14
_LARGEST = _IP + 65536
_BATCH = 256  # packets from one device before others, and before those that are due
_FIN_PUSH = 0x09
_TIMER_SLACK = 29


def checksum(data: bytes) -> int:
    """Return the ones' complement sum of 16-bit words, which IP and TCP use."""
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def headers(packet: bytes) -> int:
    """Return where the payload of a TCP packet begins."""
    tcp = _IP + 4 * (packet[_IP] & 15)
    return tcp + 4 * (packet[tcp + 12] >> 4)


def cut(packet: bytes, first: int, end: int, segment: int) -> bytes:
    """Return segments ``first`` to ``end`` of a TCP packet that holds more of them, as a packet of its own."""
    start, tcp = headers(packet), _IP + 4 * (packet[_IP] & 15)
    payload = packet[start + first * segment : start + end * segment]
    head, last = bytearray(packet[:start]), start + end * segment >= len(packet)
    if len(payload) <= segment:
        head[_KIND : _KIND + 5] = bytes(5)  # not segments, so neither their headers nor their size
    length = len(head) - _IP + len(payload)
    (number,), (sequence,) = struct.unpack_from(">H", head, _IP + 4), struct.unpack_from(">I", head, tcp + 4)
    struct.pack_into(">HH", head, _IP + 2, length, (number + first) & 0xFFFF)
    struct.pack_into(">H", head, _IP + 10, 0)
    struct.pack_into(">H", head, _IP + 10, checksum(bytes(head[_IP:tcp])) ^ 0xFFFF)
    struct.pack_into(">I", head, tcp + 4, (sequence + first * segment) & 0xFFFFFFFF)
    if not last:
        head[tcp + 13] &= ~_FIN_PUSH
    # The kernel left the sum of the addresses, the protocol and the length here; who takes the packet adds the rest.
    addresses = bytes(head[_IP + 12 : _IP + 20])
    struct.pack_into(">H", head, tcp + 16, checksum(addresses + struct.pack(">HH", 6, length - (tcp - _IP))))
    return bytes(head) + payload


class Port:
    """A node's device, its link in both directions, and what became of the packets that it sent."""

    def __init__(self, link: dict[str, Any], draw: random.Random) -> None:
        self.delay, self.jitter, self.loss, self._draw = link["delay"], link["jitter"], link["loss"], draw
        self.per_byte = 8 / link["rate"] if link["rate"] else 0.0
        self.longest_wait = link["queue"] * self.per_byte
        self.sends_at = self.arrives_at = self.takes_at = 0.0  # end of the last packet, in both directions
        self.carries = True
        self.counts = {"forwarded": 0, "lost": 0, "dropped": 0}
        self.fd = self._device(link["namespace"], link["device"])

    @staticmethod
    def _device(namespace: str, name: str) -> int:
        place = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        if _LIBC.setns(place, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "no entry into the namespace")
        os.close(place)
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _DEVICE))
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _CHECKSUMS | _TCP4_SEGMENTS)
        return fd

    def carry(self, carries: bool) -> None:
        self.carries = carries
        fcntl.ioctl(self.fd, _TUNSETCARRIER, struct.pack("i", carries))

    def leaves(self, size: int, now: float) -> float | None:
        """Return when a packet of so many bytes has left, if it is sent now; None: the queue is full."""
        begins = max(now, self.sends_at)
        if self.per_byte and begins - now > self.longest_wait:
            return None
        self.sends_at = begins + size * self.per_byte
        return self.sends_at

    def arrives(self, leaves: float) -> float:
        """Return when what leaves then is on the other side: never before what left earlier."""
        travels = self.delay + (self._draw.uniform(-self.jitter, self.jitter) if self.jitter else 0.0)
        self.arrives_at = max(self.arrives_at, leaves + travels)
        return self.arrives_at

    def taken(self, size: int, arrives: float) -> float | None:
        """Return when the node of this port has what arrives then; None: its queue is full."""
        takes = max(arrives, self.takes_at + size * self.per_byte)
        if self.per_byte and takes - arrives > self.longest_wait:
            return None
        self.takes_at = takes
        return takes

    def pieces(self, packet: bytes) -> list[tuple[bytes, int, int]]:
        """Return what the wire does not lose of a packet: pieces, their number of segments and bytes on the wire."""
        count, head = 1, 0
        if packet[_KIND]:
            (segment,), head = struct.unpack_from("=H", packet, 4), headers(packet)
            count = max(1, -((head - len(packet)) // segment))
        random_ = self._draw.random
        lost = [place for place in range(count) if random_() < self.loss] if self.loss else ()
        self.counts["lost"] += len(lost)
        if not lost:
            return [(packet, count, len(packet) - _IP + (count - 1) * (head - _IP) + count * _ETHERNET)]
        kept, begin = [], 0
        for place in (*lost, count):
            if place > begin:
                piece, segments = cut(packet, begin, place, segment), place - begin
                size = len(piece) - _IP + (segments - 1) * (head - _IP) + segments * _ETHERNET
                kept.append((piece, segments, size))
            begin = place + 1
        return kept


class Relay:
    """All ports, and the packets under way, in the order in which something is due with them."""

    def __init__(self, links: list[dict[str, Any]]) -> None:
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.ports = [Port(link, random.Random(node)) for node, link in enumerate(links)]
        self._by_address = {bytes(map(int, link["address"].split("."))): port for link, port in zip(links, self.ports)}
        _LIBC.setns(home, _NEW_NETWORK)
        self._under_way: list[tuple[float, int, bool, bytes, int, int, Port, Port]] = []
        self._number = 0

    def run(self) -> None:
        """Move packets and answer requests until standard input ends."""
        by_fd = {port.fd: port for port in self.ports}
        while True:
            first = self._under_way[0][0] - time.monotonic() if self._under_way else 3600.0
            ready, _, _ = select.select([0, *by_fd], [], [], max(0.0, first))
            for fd in ready:
                if fd:
                    self._read(by_fd[fd])
                elif not self._answer():
                    return
            self._deliver()

    def _answer(self) -> bool:
        words = os.read(0, 4096).decode().split()
        if words[:1] == ["carry"]:
            self.ports[int(words[1])].carry(words[2] == "1")
        if words:
            print(json.dumps([port.counts for port in self.ports]), flush=True)
        return bool(words)

    def _push(self, due: float, *what: Any) -> None:
        self._number += 1
        heapq.heappush(self._under_way, (due, self._number, *what))

    def _read(self, port: Port) -> None:
        now, by_address = time.monotonic(), self._by_address
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BATCH):
                packet = os.read(port.fd, _LARGEST)
                receiver = by_address.get(packet[_IP + 16 : _IP + 20]) if packet[_IP] >> 4 == 4 else None
                if receiver is None or not port.carries:
                    continue
                for piece, count, size in port.pieces(packet):
                    if (leaves := port.leaves(size, now)) is None:
                        port.counts["dropped"] += count
                    else:
                        self._push(port.arrives(leaves), False, piece, count, size, port, receiver)

    def _deliver(self) -> None:
        under_way, now = self._under_way, time.monotonic()
        while under_way and under_way[0][0] <= now:
            due, _, taken, packet, count, size, sender, receiver = heapq.heappop(under_way)
            at = due if taken else receiver.taken(size, due)
            if at is None or not receiver.carries:
                sender.counts["dropped"] += count
            elif at > due:  # even if that is over by now: earlier ones may still be in the heap
                self._push(at, True, packet, count, size, sender, receiver)
            else:
                try:
                    os.write(receiver.fd, packet)
                    sender.counts["forwarded"] += count
                except OSError:  # the device is down
                    sender.counts["dropped"] += count


def main() -> int:
    try:
        with open(0, "rb", buffering=0, closefd=False) as requests:
            relay = Relay(json.loads(requests.readline()))
    except OSError as error:
        print(error.strerror, flush=True)
        return 1
    _LIBC.prctl(_TIMER_SLACK, 1, 0, 0, 0)
    print("ready", flush=True)
    relay.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
