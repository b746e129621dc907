"""Ranks find one another although strangers knock: those who say nothing, nonsense, or a word every now and then."""

import contextlib
import secrets
import socket
import threading

import pytest

from descriptors import many_open
from thinwire.core.collectives.meeting import Meeting, endpoint_of, listen
from thinwire.core.duplex import end_of


def silent(connection, ended):
    ended.wait()


def nonsense(connection, ended):
    connection.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 4)
    ended.wait()


def slowly(connection, ended):
    with contextlib.suppress(OSError):
        while not ended.wait(0.3):
            connection.sendall(b"\0")


def gone(connection, ended):
    connection.close()


def _together(strangers, kind):
    """Two ranks meet; every stranger is in the first one's queue before the second rank comes."""
    words = [secrets.token_bytes(16) for _ in range(2)]
    servers = [listen(max(8, 2 * strangers)) for _ in words]
    endpoints = [endpoint_of(server, word) for server, word in zip(servers, words)]
    address, ended, found = servers[0].getsockname(), threading.Event(), [None, None]
    knocking = [socket.create_connection(address) for _ in range(strangers)]
    threads = [threading.Thread(target=kind, args=(connection, ended)) for connection in knocking]

    def come(rank):
        with contextlib.closing(Meeting(servers[rank], words[rank], endpoints, rank)) as meeting:
            found[rank] = {}
            assert meeting.connect(found[rank])

    ranks = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    ended.set()
    for thread in threads:
        thread.join()
    for connection in knocking:
        connection.close()
    return found


@pytest.mark.timeout(60)  # heard one after another, forty silent ones took 80 s
@pytest.mark.parametrize("kind", [silent, nonsense, slowly, gone])
@pytest.mark.parametrize("strangers", [0, 3, 40, 200])  # of the last, some make room for others
def test_ranks_meet_among_strangers(kind, strangers):
    first, second = _together(strangers, kind)
    assert set(first) == {(1, 0), (1, 1)}
    assert set(second) == {(0, 0), (0, 1)}
    for channel in range(2):
        second[0, channel].write(b"hello", end_of(10.0))
        assert first[1, channel].read(5, end_of(10.0)) == b"hello"
    for connection in (*first.values(), *second.values()):
        connection.close()


@pytest.mark.timeout(60)
def test_ranks_meet_in_processes_with_many_files_open():
    with many_open():
        first, second = _together(3, silent)
        assert set(first) == {(1, 0), (1, 1)}
        assert set(second) == {(0, 0), (0, 1)}
        for connection in (*first.values(), *second.values()):
            connection.close()


def test_who_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("thinwire.core.collectives.meeting.MEETING_SECONDS", 0.3)
    word, server = secrets.token_bytes(16), listen(8)
    with socket.create_connection(server.getsockname()):
        meeting = Meeting(server, word, [endpoint_of(server, word), b"nobody"], 0)
        assert not meeting.connect({})
        meeting.close()
