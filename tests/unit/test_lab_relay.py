"""The relay of long links: how it cuts a lost segment out of what Linux hands over in one piece."""

import struct

import pytest

from thinwire.tools.lab.relay import checksum, cut, headers

SEGMENT, PSH_ACK = 1448, 0x18


def tcp_packet(payload):
    """A packet as a TUN device gives it: virtio's header, 20 bytes of IP, 32 of TCP, checksums left to the device."""
    length = 52 + len(payload)
    address = bytes([10, 77, 0, 1, 10, 77, 0, 2])
    ip = struct.pack(">BBHHHBBH", 0x45, 0, length, 65535, 0x4000, 64, 6, 0) + address
    ip = ip[:10] + struct.pack(">H", checksum(ip) ^ 0xFFFF) + ip[12:]
    partial = checksum(address + struct.pack(">HH", 6, length - 20))
    tcp = struct.pack(">HHIIBBHHH", 5, 6, 2**32 - 1000, 7, 0x80, PSH_ACK, 512, partial, 0) + bytes(range(12))
    return struct.pack("=BBHHHH", 1, 1, 52, SEGMENT, 20, 16) + ip + tcp + payload


@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 2), (1, 3), (2, 4), (3, 4), (0, 4)])
def test_what_is_cut_out_is_a_packet_of_its_own(first, end):
    payload = bytes(i % 251 for i in range(3 * SEGMENT + 100))
    packet = tcp_packet(payload)
    found = cut(packet, first, end, SEGMENT)
    flags, kind, _, segment, start, place = struct.unpack_from("=BBHHHH", found)
    assert (flags, start, place) == (1, 20, 16)
    assert (kind, segment) == ((1, SEGMENT) if end - first > 1 else (0, 0))
    assert headers(found) == headers(packet) == 62
    assert found[62:] == payload[first * SEGMENT : end * SEGMENT]
    ip, tcp = found[10:30], found[30:62]
    assert checksum(ip) == 0xFFFF  # right
    assert struct.unpack_from(">HH", ip, 2) == (len(found) - 10, (65535 + first) % 65536)
    assert struct.unpack_from(">I", tcp, 4)[0] == (2**32 - 1000 + first * SEGMENT) % 2**32
    assert tcp[13] == (PSH_ACK if end == 4 else 0x10)
    assert struct.unpack_from(">H", tcp, 16)[0] == checksum(ip[12:] + struct.pack(">HH", 6, len(found) - 30))
    if (first, end) == (0, 4):
        assert found == packet
