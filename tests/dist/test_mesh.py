"""Connections of our own between the ranks of a lane: made together or not at all, and exact."""

import functools
import os
import socket
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import logged

import thinwire as tw
from spawned import run
from thinwire.core.collectives import exchange as exchange_module
from thinwire.core.collectives import meeting as meeting_module
from thinwire.core.collectives.exchange import LanePool, issue
from thinwire.core.collectives.mesh import ordered_sum
from thinwire.core.collectives.socket_stream import socket_loop
from thinwire.core.program import AllGather, AllReduce, AllToAll, Broadcast, Exchange, ReduceScatter, Scope, Topology
from thinwire.core.tls import CipherSocket

pytestmark = pytest.mark.dist


def _lanes(rank, size):
    exchange_module.meshes.clear()
    exchange_module.unreachable.clear()
    return LanePool(tuple(range(size)), Topology(size), rank, None)


def _values(rank, n, dtype):
    return torch.randn(n, generator=torch.Generator().manual_seed(rank)).mul(40).to(dtype)


def _with_sockets(rank, size, count, do, *arguments):
    """Call on a rank with so many sockets to each other one."""
    with mock.patch.dict(os.environ, {"THINWIRE_SOCKETS": str(count)}):
        return do(rank, size, *arguments)


def _sums(rank, size, cases):
    held = _lanes(rank, size)
    lane = held.get("mesh-test", Scope.WORLD, 0, bidirectional=True)
    assert lane.mesh is not None
    assert lane.back is None
    pending = [issue(AllReduce(_values(rank, n, dtype)), lane, i) for i, (n, dtype) in enumerate(cases)]
    found = [p.wait() for p in reversed(pending)][::-1]  # all in flight at once, waited for in another order
    shard = issue(ReduceScatter(_values(rank, 30_000 * size, torch.float32)), lane, 0).wait()
    held.release()
    return found, shard


@pytest.mark.parametrize("sockets", [1, 4])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_in_rank_order_on_all_ranks(size, sockets):
    cases = [(n, t) for n in (1, 1_003, 70_001, 700_003) for t in (torch.float32, torch.bfloat16, torch.float64)] * 3
    results = run(_with_sockets, size, sockets, _sums, cases)
    for i, (n, dtype) in enumerate(cases):
        wanted = ordered_sum([_values(r, n, dtype) for r in range(size)])
        assert all(torch.equal(found[i], wanted) for found, _ in results)
    whole = ordered_sum([_values(r, 30_000 * size, torch.float32) for r in range(size)])
    assert torch.equal(torch.cat([shard for _, shard in results]), whole)


def _small(rank, size):
    held = _lanes(rank, size)
    first = held.get("mesh-test", Scope.WORLD, 0)
    groups = len(dist.distributed_c10d._world.pg_map)
    lane = held.get("mesh-test", Scope.WORLD, 1, mesh_only=True)
    assert lane.mesh_only
    assert lane.group is first.group, "a mesh-only lane has no group of its own"
    assert len(dist.distributed_c10d._world.pg_map) == groups
    x, rows, peer = torch.arange(3) + 10 * rank, torch.arange(2 * size).view(size, 2) + 100 * rank, rank ^ 1
    ops = [
        AllReduce(torch.tensor(rank + 1)),
        AllReduce(x.clone()),
        AllReduce(x[:0].clone()),
        AllGather(x),
        AllToAll(rows),
        ReduceScatter(rows.reshape(-1)),
        Broadcast(x.clone(), source=size - 1),
        Exchange(x, peer=peer if peer < size else None),
    ]
    pending = [issue(op, lane, i) for i, op in enumerate(ops)]
    found = [p.wait() for p in pending]
    held.release()
    return found


@pytest.mark.parametrize("sockets", [1, 4])
def test_a_lane_without_a_group_carries_small_tensors_of_all_kinds(sockets):
    size = 3
    own = [torch.arange(3) + 10 * r for r in range(size)]
    table = torch.stack([torch.arange(2 * size).view(size, 2) + 100 * r for r in range(size)])
    for rank, found in enumerate(run(_with_sockets, size, sockets, _small)):
        partner = rank ^ 1 if (rank ^ 1) < size else rank
        wanted = [
            torch.tensor(sum(range(1, size + 1))),
            sum(own),
            own[0][:0],
            torch.stack(own),
            table[:, rank],
            table.sum(0)[rank],
            own[size - 1],
            own[partner],
        ]
        for got, value in zip(found, wanted, strict=True):
            assert torch.equal(got, value), (rank, got, value)


def _over_four_sockets(rank, size):
    held, before = _lanes(rank, size), len(socket_loop().streams)
    lanes = [held.get("mesh-test", Scope.WORLD, i, mesh_only=bool(i)) for i in range(3)]
    lanes[0] = held.get("mesh-test", Scope.WORLD, 0, bidirectional=True)
    made = len(socket_loop().streams) - before
    found = []
    for step in range(12):
        if rank == 1 and step in (4, 8):  # the last socket, then the first
            (bundle, *_) = lanes[0].mesh.bundles.values()
            bundle.ends[3 if step == 4 else 0].socket.shutdown(socket.SHUT_RDWR)
        pending = [issue(AllReduce(_values(rank, 300_000, torch.float32) + step), lane, step) for lane in lanes]
        found.append([one.wait() for one in pending])
    held.release()
    return made, found


def test_lanes_share_their_sockets_and_a_lost_one_costs_no_step():
    size = 3
    results = run(_with_sockets, size, 4, _over_four_sockets)
    assert [made for made, _ in results] == [2 * 4] * size  # to two others
    for step in range(12):
        wanted = ordered_sum([_values(r, 300_000, torch.float32) + step for r in range(size)])
        assert all(torch.equal(x, wanted) for _, found in results for x in found[step])


def _asks(rank, size):
    with pytest.raises(ValueError) as caught:
        _lanes(rank, size).get("mesh-test", Scope.WORLD, 0, bidirectional=True)
    return str(caught.value)


@pytest.mark.parametrize("wish", ["0", "17", "many", "²"])
def test_a_number_of_sockets_that_cannot_be_is_refused(wish):
    assert run(_with_sockets, 2, wish, _asks) == [f"THINWIRE_SOCKETS={wish!r} must be a whole number from 1 to 16"] * 2


def _groups_of_attach(rank, size):
    net = torch.nn.Linear(4, 4)
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    sync = tw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "dear")
    made = len(groups) - before
    sync.close()
    return made


def test_attach_on_cpus_makes_one_group():
    assert run(_groups_of_attach, 3) == [1, 1, 1]


def _without_a_way(rank, size):
    real = meeting_module.listen
    meeting_module.listen = (lambda _: None) if rank == size - 1 else real
    try:
        held = _lanes(rank, size)
        lane = held.get("mesh-test", Scope.WORLD, 0, bidirectional=True)
        again = held.get("mesh-test", Scope.WORLD, 1, bidirectional=True)
        found = issue(AllReduce(_values(rank, 70_001, torch.float32)), lane, 0).wait()
        held.release()
        return lane.mesh is None and lane.back is not None and again.mesh is None, found
    finally:
        meeting_module.listen = real
        exchange_module.unreachable.clear()


def test_one_rank_that_cannot_be_reached_leaves_all_to_gloo():
    results = run(_without_a_way, 3)
    assert all(fell_back for fell_back, _ in results)
    assert all(torch.equal(found, results[0][1]) for _, found in results)


def _with_tls_asked_of_gloo(rank, size, who):
    """The group is there before the variable is: not every build of torch has this transport."""
    words, real, listened = logged(), meeting_module.listen, []

    def listening(backlog):
        listened.append(backlog)
        return real(backlog)

    meeting_module.listen = listening
    try:
        if rank in who:
            os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"
        mesh = meeting_module.open_mesh(dist.group.WORLD, range(size), rank, None)
        if mesh is not None:
            mesh.close()
        return mesh is not None, len(listened), words
    finally:
        os.environ.pop("GLOO_DEVICE_TRANSPORT", None)
        meeting_module.listen = real


def test_where_gloo_encrypts_no_plain_connection_is_made():
    assert all(made for made, _, _ in run(_with_tls_asked_of_gloo, 2, ()))
    for who in ((0, 1), (1,)):
        results = run(_with_tls_asked_of_gloo, 2, who)
        assert not any(made for made, _, _ in results)
        for rank in who:
            _, listened, said = results[rank]
            assert listened == 0
            assert said == ["thinwire: GLOO_DEVICE_TRANSPORT=TCP_TLS, so Gloo carries everything, encrypted"]


def _with_keys(rank, size, folders, do, *arguments):
    with mock.patch.dict(os.environ, {"THINWIRE_KEYS": str(folders[rank])} if folders[rank] else {}):
        return do(rank, size, *arguments)


def _fresh():
    for mesh in exchange_module.bundled.values():
        mesh.close()
    exchange_module.bundled.clear()
    exchange_module.meshes.clear()


def _encrypted_steps(rank, size, sockets):
    """Train some steps, in which a socket is cut; return the weights, and of which kinds the sockets are."""
    torch.manual_seed(rank)
    model = torch.nn.Linear(300, 700)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    _fresh()
    spoken = set()
    with mock.patch.dict(os.environ, {"THINWIRE_SOCKETS": str(sockets)}):
        sync = tw.attach(model, optimizer, "ssgd")
        for step in range(8):
            for bundle in (one for mesh in exchange_module.bundled.values() for one in mesh.bundles.values()):
                spoken |= {type(end.socket) for end in bundle.ends}
                if step == 3 and rank == 0:
                    socket.socket.shutdown(bundle.ends[0].socket, socket.SHUT_RDWR)
            optimizer.zero_grad()
            model(torch.full((4, 300), 1.0 + rank + step)).square().mean().backward()
            optimizer.step()
        sync.close()
    _fresh()
    return model.weight.detach().clone(), spoken


@pytest.mark.parametrize("sockets", [1, 4])
def test_with_keys_all_connections_are_encrypted_and_the_steps_are_the_same(keys, sockets):
    secret = run(_with_keys, 3, [keys / "ours" / name for name in ("a", "b", "edge")], _encrypted_steps, sockets)
    plain = run(_with_keys, 3, [None] * 3, _encrypted_steps, 4)
    for (weights, spoken), (wanted, openly) in zip(secret, plain):
        assert torch.equal(weights, wanted)
        assert (spoken, openly) == ({CipherSocket}, {socket.socket})


def _met_at(rank, size):
    """Return the address, port and family at which rank 0's connections meet rank 1's, and a sum over them."""
    held = _lanes(rank, size)
    lane = held.get("mesh-test", Scope.WORLD, 0, bidirectional=True)
    peer = lane.mesh.first[1 - rank].socket
    total = issue(AllReduce(torch.ones(5)), lane).wait()
    held.release()
    address, port = (peer.getsockname() if rank == 0 else peer.getpeername())[:2]
    return address, port, peer.family, total.tolist()


def _in_environment(rank, size, environments, do):
    with mock.patch.dict(os.environ, environments[rank]):
        return do(rank, size)


def test_a_rank_listens_at_the_ports_that_a_firewall_lets_through():
    results = run(_in_environment, 2, [{"THINWIRE_PORTS": "42310-42399"}] * 2, _met_at)
    for _, port, _, total in results:
        assert 42310 <= port <= 42399
        assert total == [2.0] * 5


def test_others_call_the_advertised_name():
    """A name, where a router forwards the ports; here it leads to the loopback, at which the rank listens."""
    inside = {"GLOO_SOCKET_IFNAME": "lo", "THINWIRE_ADVERTISE": "localhost"}
    for address, _, _, total in run(_in_environment, 2, [inside] * 2, _met_at):
        assert address == "127.0.0.1"
        assert total == [2.0] * 5


def _over_six(rank, size):
    listen = functools.partial(socket.create_server, ("::1", 0), family=socket.AF_INET6)
    with mock.patch.object(meeting_module, "listen", lambda backlog: listen(backlog=backlog)):
        return _met_at(rank, size)


def test_addresses_of_version_six():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    for address, _, family, total in run(_over_six, 2):
        assert (address, family) == ("::1", socket.AF_INET6)
        assert total == [2.0] * 5


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("THINWIRE_PORTS", "9-3", "must be two ports such as 30000-30100"),
        ("THINWIRE_PORTS", "1-x", "must be two ports such as 30000-30100"),
        ("THINWIRE_PORTS", "²-³", "must be two ports such as 30000-30100"),
        ("THINWIRE_ADVERTISE", 30 * "name.of.mine", "is too long for a name or an address"),
        ("THINWIRE_ADVERTISE", "no..name", "is neither a name nor an address"),
    ],
)
def test_wishes_that_cannot_be_are_refused_in_one_sentence(name, value, words, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words), meeting_module.listen(2) as server:
        meeting_module.endpoint_of(server, bytes(16))


def _refused(rank, size):
    _fresh()
    model = torch.nn.Linear(3, 3)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        tw.attach(model, torch.optim.SGD(model.parameters(), 0.1), "ssgd")
    return str(caught.value)


@pytest.mark.parametrize(
    "names, words",
    [
        (("ours/a", "theirs/a"), "cannot be trusted: another authority signed it"),
        (("ours/a", None), "THINWIRE_KEYS"),
        (("ours/a", "ours"), "cannot be read (No such file or directory); thinwire keys new makes"),
    ],
)
def test_who_has_no_keys_of_this_authority_is_not_let_in(keys, names, words):
    said = run(_with_keys, 2, [keys / name if name else None for name in names], _refused)
    assert any(words in one for one in said), said


def test_of_a_clock_that_is_wrong_both_ranks_speak(keys):
    """Keys made where it was tomorrow, as one rank or both see it."""
    for names in (("early", "early"), ("early", "a"), ("a", "early")):
        said = run(_with_keys, 2, [keys / "ours" / name for name in names], _refused)
        assert all("clocks" in one for one in said), said
        assert any("not yet valid: compare the clocks of both machines" in one for one in said), said


def _among_strangers(rank, size):
    real, callers = meeting_module.exchange_endpoints, []

    def exchange(card, group, count):
        cards = real(card, group, count)
        host, _, port = cards[0][16:].rstrip(b"\0").decode().rpartition(":")
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(19), cards[0][:16] + b"\x07\x00\x00"):
            caller = socket.create_connection((host, int(port)), 5)  # before this rank's own
            caller.sendall(words)
            if not words:
                caller.close()
            callers.append(caller)
        return cards

    meeting_module.exchange_endpoints = exchange if rank == 1 else real
    try:
        held = _lanes(rank, size)
        lane = held.get("mesh-test", Scope.WORLD, 0, bidirectional=True)
        found = issue(AllReduce(_values(rank, 70_001, torch.float32)), lane, 0).wait()
        held.release()
        return lane.mesh is not None, found
    finally:
        meeting_module.exchange_endpoints = real
        for caller in callers:
            caller.close()


def test_strangers_are_sent_away():
    results = run(_among_strangers, 2)
    wanted = ordered_sum([_values(r, 70_001, torch.float32) for r in range(2)])
    assert all(met and torch.equal(found, wanted) for met, found in results)


def _pooled(rank, size):
    first = _lanes(rank, size)
    mesh = first.get("mesh-test", Scope.WORLD, 0, bidirectional=True).mesh
    first.release()
    second = LanePool(tuple(range(size)), Topology(size), rank, None)
    again = second.get("mesh-test", Scope.WORLD, 0, bidirectional=True)
    same = again.mesh is mesh
    pending = issue(AllReduce(_values(0, 70_001, torch.float32)), again, 0) if rank == 0 else None
    second.release(broken=True)  # what is under way fails on both sides
    if pending is None:
        return same, ""
    try:
        pending.wait()
    except RuntimeError as error:
        return same, str(error)
    return same, "no error"


def test_meshes_are_used_again_and_end_with_an_error_when_given_up():
    (same, error), (also, _) = run(_pooled, 2)
    assert same
    assert also
    assert "connection to rank 1" in error
