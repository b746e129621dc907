"""Real sockets, TLS with certificates on both sides, and a cable that is cut."""

import hashlib
import socket
import ssl
import threading
import time
from dataclasses import replace

import pytest
import torch
from split_ends import (
    RECIPE,
    Noting,
    assert_same,
    batch_of,
    edge_end,
    guest,
    halves,
    held,
    in_process,
    linked,
    serving,
    trained,
    until_closed,
    visit,
)

from between import Between
from descriptors import many_open
from spawned import free_port, to_itself
from thinwire.systems.split import CloudClient, CloudEnd, CloudServer, SplitPlan
from thinwire.systems.split.errors import LinkError, LinkTimeout, SessionError
from thinwire.systems.split.frames import CODEC, Message, pack

CODED = SplitPlan(2, up=("delta:4", "pack"), down=("int8", "pack"))


@pytest.mark.parametrize(
    "plan, tls",
    [(SplitPlan(2), True), (CODED, False), (SplitPlan(2, labels="cloud"), True), (SplitPlan(2, "boundary"), False)],
)
def test_a_socket_changes_nothing_and_both_ledgers_count_what_crosses(of, plan, tls):
    """Of TLS, nothing can be read. In the clear no label crosses, and no integer wider than a length."""
    front, back = halves(plan)
    with serving(back, credentials=of("server") if tls else None) as server:
        cable = Between(server.port)
        with linked(server, edge_end(front), of("edge") if tls else None, cable.port, Noting) as (link, edge):
            losses = trained(edge, 6)
        cable.close()
    assert_same(losses, front, back, in_process(plan))
    up, down = cable.crossed
    assert sum(link.ledger.sent.values()) == sum(server.ledger.received.values()) == len(up)
    assert sum(link.ledger.received.values()) == sum(server.ledger.sent.values()) == len(down)
    for kind in ("activation", "lengths", "header", "dlogits"):
        assert link.ledger.sent[kind] == server.ledger.received[kind]
    assert (link.ledger.sent["link"] > 2000) == tls
    assert (link.noted[0].parts[0][1].numpy().tobytes() in up) != tls
    if plan.labels == "edge":
        asked = {kind for request in link.noted[::2] for kind, _ in request.parts}
        assert asked == {"z", "lengths", "dlogits", *(["slots"] if plan is CODED else [])}
    ids = batch_of(0).inputs["input_ids"][0]
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert ids.to(dtype).numpy().tobytes() not in up


def run_over(plan, credentials, cut_at=None, kind=CloudClient):
    """Four steps over a cable. Returns (losses, the edge's half, the cloud's, cable, reconnects)."""
    of_edge, of_cloud = held(plan)
    with serving(of_cloud, credentials=credentials[1]) as server:
        cable = Between(server.port, cut_at)
        with linked(server, edge_end(of_edge), credentials[0], cable.port, kind) as (link, edge):
            link.cable = cable
            losses = trained(edge, 4)
        cable.close()
    return losses, of_edge, of_cloud, cable, link.reconnects


@pytest.mark.parametrize("way", [0, 1], ids=["up", "down"])
@pytest.mark.parametrize("connection, place", [(0, 0), (0, 30), (1, 300)], ids=["kind", "number", "tensor"])
def test_a_byte_that_is_changed_on_the_way_changes_no_bit_of_the_result(way, connection, place):
    of_edge, of_cloud = halves()
    with serving(of_cloud) as server:
        cable = Between(server.port)
        with linked(server, edge_end(of_edge), port=cable.port) as (link, edge):
            cable.flip = connection, way, cable.carried[connection, way] + place
            losses = trained(edge, 6)
        cable.close()
    assert cable.flip is None
    assert link.reconnects == 1
    assert_same(losses, of_edge, of_cloud, in_process())


DELTA = ("delta:4", "pack")


@pytest.mark.filterwarnings("ignore:front_on='cloud'")
@pytest.mark.parametrize(
    "tls,plan,messages",
    [
        (True, SplitPlan(2, up=DELTA), 4),
        (False, SplitPlan(2, up=DELTA, labels="cloud"), 2),
        (False, SplitPlan(2, down=DELTA, front_on="cloud"), 4),
    ],
    ids=["default", "labels in the cloud", "front in the cloud"],
)
def test_cut_after_every_message(of, tls, plan, messages):
    credentials = (of("edge"), of("server")) if tls else (None, None)
    expected = in_process(plan, steps=4)
    places = []  # counts of bytes: a cable cut there loses a request, or the reply to one

    class Counting(CloudClient):
        def call(self, request):
            before = sum(map(len, self.cable.crossed)) + 1
            reply = super().call(request)
            if request.step in (1, 2):
                places.extend((before, sum(map(len, self.cable.crossed))))
            return reply

    run_over(plan, credentials, kind=Counting)
    assert len(places) == 2 * messages
    for place in places:
        losses, of_edge, of_cloud, cable, reconnects = run_over(plan, credentials, place)
        assert (cable.cuts, reconnects) == (1, 1)
        assert_same(losses, of_edge, of_cloud, expected)


def refused(server, edge_keys, says):
    with pytest.raises(LinkError, match=says):
        CloudClient("127.0.0.1", server.port, edge_keys, reconnect_seconds=0.5).attach(edge_end(halves()[0]))


def test_a_certificate_of_another_authority(of):
    for whose, others in (("ours", "theirs"), ("theirs", "ours")):
        front, back = halves()
        with serving(back, credentials=of("server", whose)) as server:
            refused(server, of("edge", others), "cannot be trusted|refused this end")
            visit(server, front, of("edge", whose))


def test_a_pinned_certificate(of, keys):
    pem = (keys / "ours" / "server" / "identity.crt").read_text()
    print_ = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()
    front, back = halves()
    with serving(back, credentials=of("server")) as server:
        pinned = replace(of("edge"), fingerprint=":".join(print_[i : i + 2] for i in range(0, 64, 2)).upper())
        refused(server, replace(of("edge"), fingerprint="0" * 64), "not the pinned one")
        visit(server, front, pinned)


def test_wrong_pair_and_oversized_and_corrupt_messages():
    front, back = halves()
    spoiled = replace(pack(Message("z", 0, 1, parts=(("z", torch.zeros(4)),))), check=5)
    with serving(back, limit=4096) as server:
        with pytest.raises(SessionError, match="not from the same surgery"):
            CloudClient("127.0.0.1", server.port).attach(edge_end(front, pair="another"))
        edge = edge_end(front)
        for frame, tensor in (
            (CODEC.encode(pack(Message("z", 0, 1, parts=(("z", torch.zeros(4096)),))), None, 4 * 4096), None),
            (CODEC.encode(spoiled, None, 16), torch.zeros(4)),
            (b"nonsense" * 16, None),
        ):
            peer = guest(server, edge)
            peer.send_frame(frame)
            if tensor is not None:
                peer.send_tensor(tensor, 60.0)
            until_closed(peer)  # the cloud closes
        visit(server, front)
    assert sum("is gone" in words for words in server.said) == 3


def test_a_second_edge_waits_for_the_first():
    back = halves()[1]
    with serving(back, edges=2) as server:
        with linked(server, edge_end(halves()[0], name="a")) as (_, first):
            waiting = CloudClient("127.0.0.1", server.port, reconnect_seconds=0.5)
            with pytest.raises(LinkError, match="busy with edge 'a'"):
                waiting.attach(edge_end(halves()[0], name="b"))
            trained(first, 1)
        visit(server, halves()[0], steps=1, name="b")
    assert server.cloud.steps_of("a") == server.cloud.steps_of("b") == 1


def test_names_are_those_of_the_certificates(of):
    front, back = halves()
    with serving(back, credentials=of("server")) as server:
        visit(server, front, of("other"), name="somebody")
    assert any("edge 'other' begins" in words for words in server.said)


@pytest.mark.timeout(60)
def test_a_process_with_many_files_open_serves(of):
    front, back = halves()
    with many_open(), serving(back, credentials=of("server")) as server:
        losses, _ = visit(server, front, of("edge"), 2)
    assert losses == in_process(steps=2)[0]


def test_no_call_waits_for_ever():
    front, _ = halves()
    silent = socket.create_server(("127.0.0.1", 0))
    link = CloudClient("127.0.0.1", silent.getsockname()[1], receive_seconds=0.3, reconnect_seconds=0.5)
    with pytest.raises(LinkError, match="the other side is silent"):
        link.attach(edge_end(front))
    silent.close()
    with pytest.raises(LinkError, match="no connection with 127"):
        link.attach(edge_end(front))


def test_an_edge_that_has_called_itself_has_found_no_cloud(monkeypatch):
    front, _ = halves()
    link = CloudClient("127.0.0.1", free_port(), reconnect_seconds=0.0)
    monkeypatch.setattr(socket, "create_connection", to_itself)
    with pytest.raises(LinkError, match="no connection with 127"):
        link.attach(edge_end(front))


def test_a_cloud_that_falls_silent_in_a_step_is_named():
    front, back = halves()
    with serving(back) as server:
        with linked(server, edge_end(front)) as (link, edge):
            link.receive_seconds, link.reconnect_seconds = 0.2, 0.3
            handle, heard = server.cloud.handle, threading.Event()
            server.cloud.handle = lambda request: heard.wait(60) and handle(request)
            with pytest.raises(LinkTimeout, match=r"the reply to 'z' of step 0: timed out.*; then, for 0\.3 s: "):
                edge.step(batch_of(0))
            with pytest.raises(SessionError, match="this session is over"):
                edge.step(batch_of(0))
            server.cloud.handle = handle
            heard.set()
        again = edge_end(front)
        with pytest.raises(SessionError, match="no step in common"):  # a step was begun and nothing was saved
            CloudClient("127.0.0.1", server.port).attach(again)
        server.cloud.__init__(back, "pair", server.cloud.recipe)
        with linked(server, again) as (_, edge):
            edge.bye()


def test_a_cloud_that_is_slow_for_once_is_waited_for():
    front, back = halves()
    with serving(back) as server, linked(server, edge_end(front)) as (link, edge):
        handle = server.cloud.handle

        def once_slow(request):
            server.cloud.handle = handle
            while link.ledger.messages["hello"] < 2:  # until the edge is tired of waiting
                time.sleep(0.01)
            link.receive_seconds = 60.0
            return handle(request)

        server.cloud.handle, link.receive_seconds = once_slow, 0.3
        losses = trained(edge, 2)
    assert link.reconnects >= 1  # a hello that was given up may be heard after the one that was not
    assert_same(losses, front, back, in_process(steps=2))


def test_an_edge_that_falls_silent_within_a_message_does_not_keep_the_cloud_from_listening():
    front, back = halves()
    with serving(back) as server:
        edge = edge_end(front)
        half = guest(server, edge)
        half.send_frame(CODEC.encode(pack(Message("z", 0, 1, parts=(("z", torch.zeros(9)),))), None, 36)[:40])
        with linked(server, edge):  # the same session, over another connection
            trained(edge, 1)
        half.close()
    assert any("is back" in words for words in server.said)


def test_in_the_clear_only_to_this_machine():
    with pytest.raises(ValueError, match=r"whoever reaches 10\.1\.2\.3 .*--insecure to send everything in the clear"):
        CloudClient("10.1.2.3", 1)
    with pytest.raises(ValueError, match=r"whoever reaches example\.org"):
        CloudClient("example.org", 1)
    CloudClient("10.1.2.3", 1, insecure=True)
    with pytest.raises(ValueError, match=r"whoever reaches 0\.0\.0\.0"), serving(halves()[1], host="0.0.0.0"):
        pass


@pytest.mark.parametrize("port", [70000, -1, "x"])
def test_what_is_no_port(port):
    with pytest.raises(ValueError, match=f"port={port!r} must be a whole number from 0 to 65535"):
        CloudServer(CloudEnd(halves()[1], "pair", RECIPE), port=port)
    with pytest.raises(ValueError, match=f"port={port!r} must be a whole number from 1 to 65535"):
        CloudClient("127.0.0.1", port)
