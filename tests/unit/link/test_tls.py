"""TLS between two processes: who is let in by certificates, what each is told, and what crosses the socket."""

import os
import queue
import shutil
import socket
import ssl
from dataclasses import replace

import pytest
import torch
from parameter_cluster import started

from thinwire.core.duplex import Duplex, end_of
from thinwire.core.errors import NotAdmitted, PairError
from thinwire.core.tls import Credentials
from thinwire.systems.link.hello import PeerIdentity, check_host, find_trust
from thinwire.systems.link.keys import show_keys
from thinwire.systems.link.listener import MOST_NUMBERS, Caller, Listener, connect

SECRET = b"0123456789abcdef"


@pytest.fixture
def inn():
    """Makes a listener; what comes in is in its ``pairs``."""
    made = []

    def make(trust, **options):
        listener = Listener(roles=("node", "shard"), trust=trust, notes={"a": "b"}, **options)
        listener.pairs = queue.SimpleQueue()
        listener.serve(lambda pair, first: listener.pairs.put((pair, first)), 4)
        listener.address = f"127.0.0.1:{listener.port}"
        made.append(listener)
        return listener

    yield make
    for listener in made:
        listener.close()


def test_frames_and_tensors_cross_both_ways_at_once(of, inn):
    there = inn(of("server"))
    caller = Caller(there.address, PeerIdentity("node", 3, of("a")))
    assert caller.note("a") == "b"
    here = caller.connect(b"1234")
    other, first = there.pairs.get(timeout=10)
    assert (other.other.role, other.other.number, other.other.shown.name, first) == ("node", 3, "a", b"1234")
    sent = [torch.randn(1_300_001), torch.randn(700_003)]
    found = [torch.empty_like(x) for x in reversed(sent)]
    threads = [
        started(here.send_tensor, sent[0], 20.0),
        started(other.send_tensor, sent[1], 20.0),
        started(here.receive_tensor, found[0], 20.0),
        started(other.receive_tensor, found[1], 20.0),
    ]
    for n in range(200):
        here.send_frame(b"%04d" % n)
        assert other.receive_frame(4, 10.0) == b"%04d" % n
    for thread in threads:
        thread.join(30)
    assert torch.equal(found[0], sent[1])
    assert torch.equal(found[1], sent[0])


def both_ends():
    """Of one TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        return server.accept()[0], far


def test_what_crosses_is_counted_and_cannot_be_read(of):
    seen = [bytearray(), bytearray()]

    def carry(source, target, seen):
        while data := source.recv(5000):
            seen += data
            target.sendall(data)

    (near, first), (second, far) = both_ends(), both_ends()
    between = [started(carry, first, second, seen[0]), started(carry, second, first, seen[1])]
    caller, listener = Duplex(near), Duplex(far)
    listening = started(listener.secure, of("server"), end_of(10))
    caller.secure(of("a"), end_of(10), "localhost")
    listening.join(10)
    writing = started(caller.write, b"plain words " * 40_000, end_of(10))
    assert listener.read(480_000, end_of(10)) == b"plain words " * 40_000
    writing.join(10)
    listener.write(b"x" * 100, end_of(10))
    assert caller.read_some(end_of(10)) == b"x" * 100
    for end in (caller, listener):
        end.close()
    for thread in between:
        thread.join(10)
    for end in (first, second):
        end.close()
    assert (caller.sent, listener.sent) == (listener.received, caller.received) == (len(seen[0]), len(seen[1]))
    assert b"plain words" not in seen[0]
    assert len(seen[0]) - 480_000 < 4000  # records of 16 KiB, and the handshake


def refused(there, identity, sentence):
    for come in (lambda: Caller(there.address, identity), lambda: connect("127.0.0.1", there.port, b"1234", identity)):
        with pytest.raises(NotAdmitted, match=sentence):
            come()
    assert there.pairs.empty()


def test_strangers_are_told_why_not(of, inn):
    there = inn(of("server"))
    theirs = inn(of("server", "theirs"))
    cases = [
        (there, of("a", "theirs"), "127.0.0.1: the other end's certificate .* another authority"),
        (theirs, of("a"), "another authority"),
        (there, of("late"), r"refused this end's certificate \(.*expired\): compare the clocks of both machines$"),
        (there, of("early"), r"refused this end's certificate \(.*bad certificate\): compare the clocks of both"),
        (inn(of("a")), of("b"), "not valid for '127.0.0.1'.*--host"),  # no server's certificate
        (inn(of("late")), of("a").pinned("0" * 64), "has expired: compare the clocks of both machines"),
        (inn(of("early")), of("a").pinned("0" * 64), "not yet valid: compare the clocks of both machines"),
    ]
    for secret in (None, SECRET):
        cases.append((there, secret, "asks for a certificate: give --keys, or keys="))
        cases.append((inn(secret), of("a"), "does not speak TLS .*: give keys to both ends, or to neither"))
    for listener, trust, sentence in cases:
        refused(listener, PeerIdentity("node", 3, trust), sentence)
    refused(there, PeerIdentity("worker", 3, of("a")), "does not accept workers")
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(of("a").certificate, of("a").key)
    for context in (anonymous, old):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection(("127.0.0.1", there.port)) as raw,
            pytest.raises((ssl.SSLError, ConnectionError)),
            context.wrap_socket(raw) as stranger,
        ):
            assert stranger.recv(1)


def test_a_ca_that_only_this_side_trusts_is_named(keys, of, inn):
    """The caller trusts the listener, and the listener not the caller: TLS tells the caller after its handshake."""
    mixed = replace(of("a", "theirs"), ca=keys / "ours" / "ca.crt")
    refused(inn(of("server")), PeerIdentity("node", 3, mixed), r"refused this end's certificate \(.*unknown ca\)")


def test_a_number_belongs_to_the_name_that_first_came_with_it(of, inn):
    there = inn(of("server"))
    for _ in range(2):
        connect("127.0.0.1", there.port, b"1234", PeerIdentity("node", 3, of("a")))
        there.pairs.get(timeout=10)
    refused(there, PeerIdentity("node", 3, of("b")), "node 3 belongs to a name other than this certificate's")
    connect("127.0.0.1", there.port, b"1234", PeerIdentity("shard", 3, of("b")))
    connect("127.0.0.1", there.port, b"1234", PeerIdentity("node", 4, of("b")))


def test_a_name_has_so_many_numbers_and_no_more(of, inn):
    there = inn(of("server"))
    for number in range(MOST_NUMBERS):
        Caller(there.address, PeerIdentity("node", number, of("a")))
    with pytest.raises(NotAdmitted, match=f"node {MOST_NUMBERS} belongs"):
        Caller(there.address, PeerIdentity("node", MOST_NUMBERS, of("a")))
    Caller(there.address, PeerIdentity("node", MOST_NUMBERS - 1, of("a")))


def test_a_pinned_certificate_is_the_only_one(of, inn, keys):
    prints = {identity.name: identity.fingerprint for identity in show_keys(keys / "ours")}
    there = inn(of("b").own())  # as a leader and its workers: one certificate for all
    Caller(there.address, PeerIdentity("node", 0, of("b").own()))
    with pytest.raises(PairError, match=r"closed|gone"):
        Caller(there.address, PeerIdentity("node", 0, of("a").pinned(prints["b"])))
    refused(there, PeerIdentity("node", 0, of("b").pinned(prints["a"].upper())), "not the pinned one")


def test_a_handshake_that_does_not_end_has_one_time_limit(of, inn):
    there = inn(of("server"), seconds=0.5)
    with socket.create_connection(("127.0.0.1", there.port)) as slow:
        slow.settimeout(20.0)
        slow.sendall(bytes.fromhex("1603010200010001fc0303"))
        assert slow.recv(1) == b""


def test_the_other_side_goes_in_the_handshake(of):
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = started(lambda: server.accept()[0].close())
        with pytest.raises(PairError, match="nobody listens at"):
            Caller(f"127.0.0.1:{server.getsockname()[1]}", PeerIdentity("node", 0, of("a")), 5.0)
        thread.join(10)


def test_keys_or_a_secret(keys):
    assert find_trust("0123456789abcdef") == SECRET
    credentials = find_trust(keys=str(keys / "ours" / "a"))
    assert credentials == Credentials.of(keys / "ours" / "a") == find_trust(keys=credentials)
    check_host("0.0.0.0", credentials)
    with pytest.raises(ValueError, match="not both"):
        find_trust(SECRET, keys / "ours" / "a")
    with pytest.raises(ValueError, match=r"certificate: .*identity.crt cannot be read \(No such .*thinwire keys new"):
        find_trust(keys=keys / "ours")
    with pytest.raises(ValueError, match="64 hex digits"):
        credentials.pinned("ab")


def test_keys_of_another_user_are_named_as_such(keys, tmp_path):
    folder = shutil.copytree(keys / "ours" / "a", tmp_path / "a")
    (folder / "identity.key").chmod(0)
    if os.geteuid() == 0:  # who may read everything
        try:
            os.seteuid(65534)
        except OSError:
            pytest.skip("no other user in this namespace")
    try:
        with pytest.raises(ValueError, match=r"identity\.... cannot be read \(Permission denied\)"):
            Credentials.of(folder)
    finally:
        os.seteuid(os.getuid())
