"""A model in shards, each part alone: slices, pieces put together, arithmetic by slices, what a shard keeps."""

import pytest
import torch
from chaos import Violation
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.systems.link.codec import FRAME
from thinwire.systems.parameter_server import Fault, Link, simulate
from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.compress import ServerEnd, SumsOut
from thinwire.systems.parameter_server.effects import Contribution
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.outer import DelayedNesterov, FlatWeights, fingerprint
from thinwire.systems.parameter_server.presets import asp, bsp, diloco, inhad, ssp
from thinwire.systems.parameter_server.server import Server
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shard import WeightSlice
from thinwire.systems.parameter_server.shards import Assembly, ShardedWeights, slices


@given(st.integers(1, 10_000), st.data())
def test_slices_cover_all_once_and_are_of_equal_size_up_to_one(numel, data):
    count = data.draw(st.integers(1, min(numel, 50)))
    found = slices(numel, count)
    assert [i for piece in found for i in range(numel)[piece]] == list(range(numel))
    sizes = [piece.stop - piece.start for piece in found]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    for wrong in (0, -1, numel + 1):
        with pytest.raises(ValueError, match=f"at least 1 and at most the model's {numel}"):
            slices(numel, wrong)


@given(st.integers(1, 3), st.booleans(), st.lists(st.booleans(), max_size=12), st.randoms(use_true_random=False))
def test_messages_come_out_whole_and_in_order_whatever_comes_first(count, ordered, whole, draw):
    """``whole``: of each message, whether it has no pieces. One stream of messages, one of pieces from each shard."""
    streams = [[("message", i, None if alone else i) for i, alone in enumerate(whole)]]
    for index in range(count):
        streams.append([("piece", i, index) for i, alone in enumerate(whole) if not alone])
    assembly, out, seen, now = Assembly(count, ordered), [], set(), 0.0
    while any(streams):
        now += 1.0
        kind, number, extra = draw.choice([stream for stream in streams if stream]).pop(0)
        seen.add((kind, number, extra))
        if kind == "message":
            ready = assembly.message(number, extra, 5.0, now)
        else:
            ready = assembly.piece(number, extra, (number, extra), now)
        for message, pieces in ready:
            assert ("message", message, None if whole[message] else message) in seen
            assert pieces == (None if whole[message] else [(message, index) for index in range(count)])
            assert pieces is None or all(("piece", message, index) in seen for index in range(count))
        out += [message for message, _ in ready]
    assert sorted(out) == list(range(len(whole)))
    assert not ordered or out == sorted(out)
    for alone in (True, False):
        part = [message for message in out if whole[message] == alone]
        assert part == sorted(part)
    assert assembly.until is None


def test_control_passes_what_waits_for_its_pieces_only_on_two_channels():
    for ordered in (True, False):
        assembly = Assembly(2, ordered)
        assert assembly.message("weights", 1, 5.0, 0.0) == []
        assert bool(assembly.message("fence", None, 5.0, 1.0)) != ordered
        assert assembly.piece(1, 0, "a", 2.0) == []
        ready = assembly.piece(1, 1, "b", 3.0)
        assert ready[0] == ("weights", ["a", "b"])
        assert [message for message, _ in ready[1:]] == (["fence"] if ordered else [])


def test_a_message_has_its_time_from_when_nothing_is_before_it():
    assembly = Assembly(1, True)
    assembly.message("first", 1, 5.0, 0.0)
    assembly.message("second", 2, 5.0, 1.0)
    assert (assembly.until, assembly.overdue(5.0), assembly.overdue(5.1)) == (5.0, False, True)
    assembly.piece(1, 0, None, 4.0)
    assert assembly.until == 9.0
    assembly.piece(2, 0, None, 8.0)
    assert assembly.until is None
    assert not assembly.overdue(1e9)


def test_a_piece_that_comes_twice_is_refused():
    assembly = Assembly(2, True)
    assembly.piece(3, 0, None, 0.0)
    for number, index in ((3, 0), (4, 2)):
        with pytest.raises(ValueError, match="arrived twice or unexpectedly"):
            assembly.piece(number, index, None, 0.0)
    assembly.piece(3, 1, None, 0.0)
    assembly.message("whole", 3, 1.0, 0.0)
    with pytest.raises(ValueError, match="twice"):
        assembly.piece(3, 0, None, 0.0)


numbers = st.integers(1 - 2**62, 2**62 - 1)
factors = st.floats(allow_nan=False, allow_infinity=False, width=64)


@given(numbers, numbers, numbers, st.booleans(), st.lists(st.tuples(numbers, numbers, factors), max_size=5))
def test_frames_and_rows_say_what_the_message_said(version, port, gradients, flag, rows):
    terms = tuple(msg.SumOf(*row) for row in rows)
    for message in (msg.UpdateShard(version, gradients, flag, terms), msg.RemoveMember(version, terms)):
        frame = msg.encode(message)
        bare, count, _ = msg.decode(frame[: FRAME.size])
        assert count == len(terms)
        assert msg.CODEC.with_rows(bare, frame[FRAME.size :]) == message
    enlist = msg.RegisterShard(3, port, msg.PROTOCOL, flag, version)
    assert msg.decode(msg.encode(enlist))[0] == enlist


OUTERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "nesterov": lambda p: DelayedNesterov(p, lr=0.3, period=3),
}


@pytest.mark.parametrize(
    ("name", "numel", "count", "deterministic"),
    [("sgd", 7, 3, True), ("sgd", 70_001, 3, False), ("adamw", 1001, 2, True), ("adamw", 7, 3, False),
     ("nesterov", 70_001, 3, True), ("nesterov", 1001, 2, False)],
)  # fmt: skip
def test_slices_of_an_update_are_those_of_the_whole_bit_for_bit(name, numel, count, deterministic):
    outer = OUTERS[name]
    draw = torch.Generator().manual_seed(numel)
    options = Settings(deterministic=deterministic)
    theta = torch.randn(numel, generator=draw)
    whole = FlatWeights(theta, outer, options)
    pieces = slices(numel, count)
    parts = [FlatWeights(theta[piece], outer, options) for piece in pieces]
    for _ in range(5):
        sums = [
            Contribution(node, node, (msg.Row(0, 0, 0, 1),) * 2, scale, torch.randn(numel, generator=draw))
            for node, scale in ((1, 0.5), (0, 1.0), (2, 1 / 3))
        ]
        whole.apply(sums)
        for master, piece in zip(parts, pieces):
            sliced = [Contribution(*(list(vars(x).values())[:-1]), x.tensor[piece]) for x in sums]
            master.apply(sliced)
    assert torch.equal(torch.cat([master.theta for master in parts]), whole.theta)


@pytest.mark.parametrize(("kind", "deterministic"), [(None, False), (None, True), ("topk", False), ("int8", False)])
def test_sums_in_pieces_are_what_each_shard_reads_and_the_rest_follows(kind, deterministic):
    options = Settings(compress_up=kind, deterministic=deterministic, density=0.1)
    pieces, dtype = slices(1000, 3), torch.float64 if deterministic else torch.float32
    leader, draw = SumsOut(options, torch.float32, pieces), torch.Generator().manual_seed(0)
    ends = [ServerEnd(options, piece.stop - piece.start, torch.float32) for piece in pieces]
    received, total = torch.zeros(1000, dtype=dtype), torch.zeros(1000, dtype=dtype)
    nothing = [torch.zeros(1000)] * (0 if kind is None else 12)  # with these comes what was left out before
    for x in [*(torch.randn(1000, generator=draw) for _ in range(10)), *nothing]:
        messages = [part.contiguous().view(torch.uint8) for part in leader.pack(x)]
        received += torch.cat([end.sum(message) for end, message in zip(ends, messages)])
        total += x
    torch.testing.assert_close(received, total, rtol=0, atol=1e-4 if kind else 0)


def test_optimizers_differ_by_kind_and_options():
    def number(outer):
        return fingerprint(outer, torch.float32)

    found = [number(lambda p: torch.optim.SGD(p, lr=0.1)), number(lambda p: torch.optim.SGD(p, lr=0.2)),
             number(lambda p: torch.optim.Adam(p, lr=0.1)), number(lambda p: DelayedNesterov(p, lr=0.1))]  # fmt: skip
    assert len(set(found)) == 4
    assert found[0] == number(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0))


def keeper(folder=None, run=7, index=0):
    layout = Layout.of(torch.nn.Linear(4, 2))  # 10 elements
    return WeightSlice(Settings(), layout, OUTERS["sgd"], index, 2, folder)


def as_bytes(x):
    return x.view(torch.uint8)


def test_a_shard_adds_what_it_is_told_and_keeps_nothing_else():
    shard = keeper()
    assert shard.on(msg.ShardAccepted(3, 7, as_bytes(torch.arange(5.0)))) == [msg.ShardUpdated(3)]
    for member, seq in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 5), (3, 1)):
        shard.add(member, seq, as_bytes(torch.full((5,), float(10 * member + seq))))
    with pytest.raises(ValueError, match="does not fit"):
        shard.add(1, 9, as_bytes(torch.zeros(4)))
    shard.on(msg.DropSum(1, 1))
    shard.on(msg.RemoveMember(2, (msg.SumOf(2, 5),)))
    assert sorted(shard.held) == [(1, 2), (1, 4), (2, 5), (3, 1)]
    (made,) = shard.on(msg.UpdateShard(3, 2, True, (msg.SumOf(2, 5, 0.5), msg.SumOf(1, 2, 1.0))))
    assert made.version == shard.version == 4
    oracle = FlatWeights(torch.arange(5.0), OUTERS["sgd"], Settings())
    oracle.step([(torch.full((5,), 25.0), 0.5), (torch.full((5,), 12.0), 1.0)], 2)
    assert torch.equal(made.tensor, oracle.theta)
    assert sorted(shard.held) == [(1, 4), (3, 1)]
    shard.on(msg.RemoveMember(1))
    shard.on(msg.RemoveMember(3))
    assert not shard.held
    assert shard.on(msg.UpdateShard(4, 0)) == [msg.ShardUpdated(5)]  # nothing usable came
    assert torch.equal(shard.on(msg.ShowWeights(5))[0].tensor, oracle.theta)
    assert shard.piece(1, msg.LAST).tensor is shard.weights.snapshot


def test_a_shard_goes_on_from_exactly_the_servers_version_and_drops_newer_ones(tmp_path):
    shard = keeper(tmp_path)
    shard.on(msg.ShardAccepted(0, 7, as_bytes(torch.arange(5.0))))
    states = {}
    for version in range(3):
        assert shard.on(msg.SaveShard(version)) == [msg.ShardSaved(version)]
        states[version] = shard.weights.snapshot
        shard.add(1, version, as_bytes(torch.ones(5)))
        shard.on(msg.UpdateShard(version, 1, False, (msg.SumOf(1, version),)))
    names = ["shard-0-version-000000001.pt", "shard-0-version-000000002.pt"]
    assert [path.name for path in checkpoints.kept_in(tmp_path, 0).found().values()] == names
    again = keeper(tmp_path)
    assert again.on(msg.ShardAccepted(1, 7)) == [msg.ShardUpdated(1)]
    assert torch.equal(again.weights.snapshot, states[1])
    again.add(1, 1, as_bytes(torch.ones(5)))
    again.on(msg.UpdateShard(1, 1, False, (msg.SumOf(1, 1),)))
    assert torch.equal(again.weights.snapshot, states[2])  # the momentum too is that of version 1
    assert [path.name for path in checkpoints.kept_in(tmp_path, 0).found().values()] == names[:1]
    assert checkpoints.load(tmp_path) is None  # the server's would be others


@pytest.mark.parametrize(
    ("message", "index", "sentence"),
    [
        (msg.ShardAccepted(9, 7), 0, r"no checkpoint of shard 0 at version 9, from .* server continues \(found: 0\)"),
        (msg.ShardAccepted(0, 8), 0, "from another training"),
        (msg.ShardAccepted(0, 7), 1, "no checkpoint of shard 1"),
        (msg.ShardAccepted(0, 8, as_bytes(torch.zeros(5))), 0, "the server starts over"),
    ],
)
def test_checkpoints_that_are_not_the_servers_are_refused(tmp_path, message, index, sentence):
    first = keeper(tmp_path)
    first.on(msg.ShardAccepted(0, 7, as_bytes(torch.arange(5.0))))
    first.on(msg.SaveShard(0))
    with pytest.raises(ValueError, match=sentence):
        keeper(tmp_path, index=index).on(message)
    assert len(checkpoints.kept_in(tmp_path, 0).found()) == 1
    with pytest.raises(ValueError, match="give shard 0 its --checkpoint-dir"):
        keeper().on(msg.ShardAccepted(3, 7))


FITS = {"index": 1, "port": 9, "protocol": msg.PROTOCOL, "keeps": True, "outer": 5}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({}, 0),
        ({"protocol": msg.PROTOCOL - 1}, msg.SHARD_PROTOCOL),
        ({"index": 2}, msg.NO_INDEX),
        ({"index": -1}, msg.NO_INDEX),
        ({"outer": 6}, msg.OTHER_OUTER),
        ({"keeps": False}, msg.NO_DIRECTORY),
    ],
)
def test_why_a_shard_is_not_taken_in(other, reason):
    settings, layout = Settings(), Layout.of(torch.nn.Linear(4, 2))
    weights = ShardedWeights(
        2, layout, settings, Server(settings), None, outer=5, keeps=True, run=0, clock=float, tell=print,
        on_ready=print, on_failed=print,
    )  # fmt: skip
    assert weights.objection(msg.RegisterShard(**{**FITS, **other})) == reason
    assert reason == 0 or "{" not in msg.SHARD_REASONS[reason].format(index=1)


def uneven(node, worker, step, rng):
    return (3.0 if node == 1 else 1.0) * rng.lognormvariate(0, 0.3)


@given(
    seed=st.integers(0, 2**32),
    options=st.sampled_from(
        [*map(inhad, (0, 1, 4)), bsp(start_nodes=3), asp(), ssp(1), diloco(2),
         Settings(transfer="push", update_every=3, max_staleness=2)]
    ),
    shards=st.integers(1, 3),
    rate=st.sampled_from([None, 1e6]),
    faults=st.booleans(),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_in_virtual_time_the_bound_holds_with_shards_and_nothing_stalls(seed, options, shards, rate, faults):
    def link(node):
        return Link(0.3 if node == 2 else 0.01, rate, jitter=lambda rng: rng.expovariate(20.0))

    events = [Fault(6.0, "kill", 1), Fault(9.0, "return", 1), Fault(14.0, "cut", 0), Fault(18.0, "kill", 2, worker=0),
              Fault(20.0, "return", 2, worker=0), Fault(25.0, "pause", 0, for_seconds=6.0)]  # fmt: skip
    trace = simulate(options, nodes=3, seconds=60.0, step_seconds=uneven, link=link, server_link=Link(0.02, rate),
                     payload_bytes=20_000, seed=seed, shards=shards, faults=events if faults else ())  # fmt: skip
    keys = [row[:3] for _, _, rows in trace.updates for row in rows]
    if len(keys) != len(set(keys)):
        raise Violation("a gradient was applied twice")
    assert max(trace.staleness()) <= options.bound
    times = [at for _, at, _ in trace.updates]
    assert trace.seconds - times[-1] < 25.0
    assert len(times) > 5


@pytest.mark.parametrize("shards", [0, 1, 4])
def test_bytes_of_shards_are_those_of_the_cost_model(shards):
    def steps(node, worker, step, rng):
        return 1.0

    for options, updates, formula in (  # 128 bytes: a control message
        (asp(), 400, 2 * 4000 + 2 * 128 * (1 + shards)),
        (bsp(start_nodes=4), 100, 2 * 4000 + 128 * (1 + 3 + 2 * shards)),
    ):
        trace = simulate(options, nodes=4, updates=updates, step_seconds=steps, payload_bytes=4000, shards=shards)
        assert trace.bytes_per_gradient == pytest.approx(formula, rel=0.06)
        whole = trace.messages["Grad"] + trace.messages["Weights"]  # the last pieces are still to be sent
        assert shards * (whole - 8) <= trace.messages["Piece"] <= shards * whole


@pytest.mark.parametrize("shards", [0, 4])
def test_where_the_servers_link_is_the_bound_k_links_give_k_times_the_gradients(shards):
    link = Link(0.0005, 1e8)
    trace = simulate(asp(), nodes=32, seconds=30.0, step_seconds=lambda *a: 0.1, payload_bytes=1_000_000,
                     link=link, server_link=link, shards=shards)  # fmt: skip
    bound = max(shards, 1) * 1e8 / (8 * 1_000_000)
    assert trace.gradients / trace.seconds == pytest.approx(bound, rel=0.1)
