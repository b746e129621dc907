"""Who a listener lets in: those who know its secret, as who they are; and what it says to the others."""

import os
import queue
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from spawned import free_port, to_itself
from thinwire.core.connect import MOST_UNKNOWN, ListeningPort
from thinwire.core.duplex import Duplex
from thinwire.core.errors import NotAdmitted, PairError
from thinwire.core.secret_file import VARIABLE, fresh_secret_file
from thinwire.systems.link.hello import INSECURE, PeerIdentity, check_host, find_trust, read_secret
from thinwire.systems.link.listener import Caller, Listener, connect, server_of

SECRET, OTHER = b"0123456789abcdef", b"fedcba9876543210"
KNOCK, ANSWER, PROOF, VERDICT = 68, 43, 32, 33  # bytes of the four messages of a hello
NODE = PeerIdentity("node", 3, SECRET)


class Inn:
    """A listener, and the pairs that have come in."""

    def __init__(self, **options):
        self.listener = Listener(notes={"a": "b"}, **{"roles": ("node", "shard"), "trust": SECRET, **options})
        self.came = queue.SimpleQueue()
        self.address = f"127.0.0.1:{self.listener.port}"

    def serve(self):
        self.listener.serve(lambda pair, first: self.came.put((pair, first)), 4)
        return self


@pytest.fixture
def inn():
    made = []

    def make(**options):
        made.append(Inn(**options))
        return made[-1].serve()

    yield make
    for one in made:
        one.listener.close()


def test_who_knows_the_secret_comes_in_as_who_it_is(inn):
    there = inn()
    caller = Caller(there.address, NODE)
    assert caller.note("a") == "b"
    pair = caller.connect(b"1234")
    other, first = there.came.get(timeout=10)
    assert (other.other.role, other.other.number, first) == ("node", 3, b"1234")
    pair.send_frame(b"abcd")
    assert other.receive_frame(4, 10.0) == b"abcd"
    assert pair.sent_bytes == other.received_bytes == 4  # the hello does not count
    there.listener.note("a", "c")
    caller.refresh()
    assert caller.note("a") == "c"
    with pytest.raises(PairError, match="does not give its z"):
        caller.note("z")


@pytest.mark.parametrize(
    ("secret", "identity", "sentence"),
    [
        (SECRET, PeerIdentity("node", 3), "asks for a secret: give --secret-file"),
        (SECRET, PeerIdentity("node", 3, OTHER), "has another secret"),
        (None, NODE, "lets everybody in"),
        (SECRET, PeerIdentity("worker", 3, SECRET), "does not accept workers"),
    ],
)
def test_others_are_told_why_not(inn, caplog, secret, identity, sentence):
    there, began = inn(trust=secret), time.monotonic()
    with pytest.raises(NotAdmitted, match=sentence):
        Caller(there.address, identity)
    with pytest.raises(NotAdmitted, match=sentence):
        connect("127.0.0.1", there.listener.port, b"1234", identity)
    assert there.came.empty()
    if identity.trust == OTHER:
        told = "turned away 127.0.0.1: it does not know the secret"
        while told not in caplog.messages:  # by a thread, after the caller knows
            time.sleep(0.01)
        count = caplog.messages.count(told)
        assert count == 1 or time.monotonic() - began > 1.0  # of both callers, who came within a second


def through(port, change, identity=NODE):
    """A caller whose hello passes somebody who changes the messages: (number of the message, bytes) -> bytes."""
    between = socket.create_server(("127.0.0.1", 0))

    def relay():
        near, _ = between.accept()
        with between, near, socket.create_connection(("127.0.0.1", port)) as far:
            for number, size in enumerate((KNOCK, ANSWER, PROOF, VERDICT)):
                source, target = (near, far) if number % 2 == 0 else (far, near)
                data = source.recv(size, socket.MSG_WAITALL)
                if not data:
                    return
                target.sendall(change(number, data))

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    try:
        return connect("127.0.0.1", between.getsockname()[1], b"1234", identity, 20.0)
    finally:
        between.close()
        thread.join(10)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("place", range(0, KNOCK, 5))
def test_a_hello_with_one_changed_byte_lets_nobody_in(inn, number, place):
    there = inn()

    def change(message, data):
        if message != number:
            return data
        at = place % len(data)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    with pytest.raises(PairError):
        through(there.listener.port, change)
    assert there.came.empty()


def test_without_a_secret_nobody_is_told_that_it_has_another(inn):
    """A byte was changed on the way: the next try may do, so it is not a refusal."""
    there = inn(trust=None)

    def change(message, data):
        return data[:20] + bytes([data[20] ^ 1]) + data[21:] if message == 2 else data

    with pytest.raises(PairError, match="changed on the way") as caught:
        through(there.listener.port, change, PeerIdentity("node", 3))
    assert not isinstance(caught.value, NotAdmitted)


def said(port):
    """What a member sends to come in: its first words and its proof."""
    words = {}

    def note(number, data):
        words[number] = data
        return data

    with pytest.raises(PairError):  # the relay carries one of the two connections, and ends
        through(port, note)
    return words


@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.parametrize("number", [3, 4])
def test_a_hello_that_is_played_again_lets_nobody_in(inn, role, number):
    there = inn()
    words = said(there.listener.port)
    knock = words[0][:11] + struct.pack("<Bq", role, number) + words[0][20:]
    for proof in (words[2], words[3][1:], bytes(32)):  # also the listener's own proof, turned round
        with socket.create_connection(("127.0.0.1", there.listener.port)) as stranger:
            stranger.sendall(knock)
            stranger.recv(ANSWER, socket.MSG_WAITALL)
            stranger.sendall(proof)
            assert stranger.recv(VERDICT, socket.MSG_WAITALL)[0] == 1
    assert there.came.empty()


@pytest.mark.parametrize("echo", [True, False])
def test_who_only_pretends_to_be_the_listener_is_found_out(echo):
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer():
            caller, _ = impostor.accept()
            with caller:
                knock = caller.recv(KNOCK, socket.MSG_WAITALL)
                caller.sendall(knock[:10] + b"\x01" + bytes(32))
                proof = caller.recv(PROOF, socket.MSG_WAITALL)
                caller.sendall(b"\0" + (proof if echo else bytes(32)))
                caller.recv(1)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(NotAdmitted, match="does not know the secret"):
            Caller(f"127.0.0.1:{impostor.getsockname()[1]}", NODE)
        thread.join(10)


def test_silent_connections_are_bounded_and_keep_nobody_out(inn):
    there = inn(seconds=600.0)
    idle = [socket.create_connection(("127.0.0.1", there.listener.port)) for _ in range(500)]
    Caller(there.address, NODE, 60.0).connect(b"1234")
    assert there.came.get(timeout=60)
    for connection in idle[: 500 - MOST_UNKNOWN]:
        connection.settimeout(60.0)
        assert connection.recv(1) == b""  # sent away
    while len([thread for thread in threading.enumerate() if thread.name == "thinwire-hello"]) > MOST_UNKNOWN:
        time.sleep(0.01)
    for connection in idle:
        connection.close()


def test_who_is_no_stranger_any_more_is_not_closed_afterwards(monkeypatch):
    close, forgotten, ended = Duplex.close, [], threading.Event()

    def closing(duplex, *why):
        if why:  # another thread says just now that it is known
            forgetting = threading.Thread(target=port.forget, args=(duplex,))
            forgetting.start()
            forgetting.join(0.5)
            forgotten.append(not forgetting.is_alive())
        close(duplex, *why)

    monkeypatch.setattr(Duplex, "close", closing)
    port = ListeningPort(server_of(0, "127.0.0.1"), lambda duplex, end: ended.wait(10.0) and None, most=1)
    port.open()
    with socket.create_connection(("127.0.0.1", port.port)) as first, socket.create_connection(first.getpeername()):
        assert first.recv(1) == b""
    ended.set()
    port.close()
    assert forgotten == [False]  # it hears of it when the connection has been closed


def test_a_listener_that_could_not_start_a_thread_for_one_hears_the_next(inn, monkeypatch):
    begin, failed = threading.Thread.start, []

    def starting(thread):
        if thread.name == "thinwire-hello" and not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")  # as Python says where the kernel allows no more
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    there = inn()
    with pytest.raises(PairError, match="nobody listens"):
        Caller(there.address, NODE, 5.0)
    assert failed
    assert Caller(there.address, NODE, 5.0).note("a") == "b"


def test_who_has_called_itself_has_found_nobody(monkeypatch):
    """Of a port that nobody listens at, the kernel may make the caller's own end too; TCP lets the two meet."""
    port = free_port()
    monkeypatch.setattr(socket, "create_connection", to_itself)
    for identity in (NODE, PeerIdentity("node", 3)):
        with pytest.raises(PairError, match="nobody listens") as caught:
            Caller(f"127.0.0.1:{port}", identity, 5.0)
        assert not isinstance(caught.value, NotAdmitted)  # else it would not be tried again


def test_a_slow_hello_has_one_time_limit_in_all(inn):
    there = inn(seconds=0.5)
    with socket.create_connection(("127.0.0.1", there.listener.port)) as slow:
        slow.settimeout(0.1)
        end = time.monotonic() + 20.0
        while time.monotonic() < end:
            try:
                slow.sendall(b"t")
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert time.monotonic() < end


def test_before_it_serves_a_listener_tells_its_notes_and_lets_others_wait():
    there = Inn()
    assert Caller(there.address, NODE).note("a") == "b"
    with pytest.raises(PairError, match="did not let this process in"):
        connect("127.0.0.1", there.listener.port, b"1234", NODE, 0.3)
    waiting = threading.Thread(target=Caller(there.address, NODE, 20.0).connect, args=(b"5678",), daemon=True)
    waiting.start()
    there.serve()
    assert there.came.get(timeout=20)[1] == b"5678"
    waiting.join(20)
    there.listener.close()


def test_a_listener_at_an_address_of_version_six_is_found(inn):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    there = inn(host="::1")
    for host in ("::1", "[::1]"):
        caller = Caller(f"{host}:{there.listener.port}", NODE)
        assert (caller.note("a"), caller.found_at) == ("b", "::1")


@pytest.mark.parametrize("host", ["no..name", "x" * 64])
def test_what_can_be_no_name_is_refused_as_such(host):
    with pytest.raises(ValueError, match=f"host '{host}' is neither a name nor an address"):
        server_of(0, host)
    with pytest.raises(ValueError, match=f"host '{host}' is neither a name nor an address"):
        Caller(f"{host}:29400", NODE)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "a.example.org", ""])
def test_no_other_address_without_a_secret(host):
    with pytest.raises(ValueError, match=r"--secret-file FILE, THINWIRE_SECRET_FILE or secret=.*--insecure"):
        check_host(host, None)
    check_host(host, SECRET)
    check_host(host, INSECURE)
    for here in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        check_host(here, None)


def test_secrets_that_killed_processes_left_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with fresh_secret_file() as name:
        own = Path(name).parent
    assert (own.parent, own.stat().st_mode & 0o777) == (tmp_path, 0o700)
    old, new, other = (own / name for name in ("thinwire-secret-old", "thinwire-secret-new", "other"))
    for path in (old, new, other):
        path.write_text("x")
        os.utime(path, (0, time.time() if path is new else 0))
    with fresh_secret_file() as needed, fresh_secret_file() as name:
        os.utime(needed, (0, 0))
        with fresh_secret_file():
            assert os.path.exists(needed)
        assert not old.exists()
        assert new.exists()
        assert other.exists()
    assert sorted(own.iterdir()) == sorted([new, other]), name


def _pipe(path):
    os.mkfifo(path, 0o666)


@pytest.mark.parametrize("leave", [_pipe, os.mkdir, lambda path: os.symlink("/", path)])
def test_what_others_leave_in_the_temporary_folder_stops_no_secret(leave, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old = os.umask(0)
    try:
        for name in ("thinwire-secret-x", f"thinwire-{os.geteuid()}"):
            leave(tmp_path / name)
        with fresh_secret_file() as name:
            assert os.stat(name).st_mode & 0o777 == 0o600
            assert Path(name).parent.parent == tmp_path
            assert Path(name).parent.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(old)


def test_where_a_secret_comes_from(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (find_trust(), find_trust(insecure=True)) == (None, INSECURE)
    with fresh_secret_file() as name:
        assert len(read_secret(name)) == 64
        monkeypatch.setenv(VARIABLE, name)
        assert find_trust(insecure=True) == read_secret(name)
        assert find_trust("x" * 16) == b"x" * 16
    with pytest.raises(ValueError, match="cannot be read"):
        find_trust()
    (tmp_path / "short").write_text(" abc \n")
    with pytest.raises(ValueError, match="has 3 bytes and needs at least 16"):
        read_secret(tmp_path / "short")
    with pytest.raises(ValueError, match="secret= has 1 bytes"):
        find_trust(b"x")
    with pytest.raises(ValueError, match="secret= must be a string"):
        find_trust(5)
    assert "0123" not in repr(NODE)
