"""Frames, settings, presets, compression and checkpoints, each alone."""

import contextlib
import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.systems.link.codec import FRAME
from thinwire.systems.parameter_server import Service, serve, serve_shard
from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.compress import Difference, Feedback, VectorCodec
from thinwire.systems.parameter_server.layout import Layout, LayoutMismatch
from thinwire.systems.parameter_server.leader import Leader
from thinwire.systems.parameter_server.outer import DelayedNesterov, FlatWeights
from thinwire.systems.parameter_server.presets import PRESETS, preset
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shard import WeightSlice

numbers = st.integers(-(2**62), 2**62)


@given(numbers, numbers, numbers, st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 2**40))
def test_a_frame_says_what_the_message_said(member, low, grant, loss, size):
    message = msg.IterationNumber(member, 1, 2, low, low, grant, loss_sum=loss)
    assert msg.decode(msg.encode(message)) == (message, 0, 0)
    assert len(msg.encode(message)) == FRAME.size == 128
    grad = msg.Grad(member, 1, 2, 3, low, grant)
    assert msg.decode(msg.encode(grad, 5, size)) == (grad, 5, size)


@given(st.binary(min_size=128, max_size=128))
def test_any_128_bytes_are_a_message_or_refused(frame):
    with contextlib.suppress(ValueError):
        message, rows, size = msg.decode(frame)
        assert isinstance(message, msg.CODEC.kinds)
        assert min(rows, size) >= 0


@pytest.mark.parametrize("name", PRESETS)
def test_settings_survive_their_json(name):
    assert Settings.from_json(PRESETS[name]().to_json()) == PRESETS[name]()


HUGE = '{"lease_seconds": 1' + "0" * 400 + "}"


@pytest.mark.parametrize(
    "text",
    ["", "5", "[]", "[" * 100_000, '{"x": 1}', '{"sync_every": {"kind": []}}', '{"pull": 5}', HUGE],
    ids=lambda text: text[:9],
)
def test_other_json_is_no_settings(text):
    with pytest.raises(ValueError, match="this is not a parameter server's settings"):
        Settings.from_json(text)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"update_every": "nodes/0.5"}, "update_every='nodes/0.5'"),
        ({"update_every": []}, "update_every=[] must be a whole number"),
        ({"update_every": None}, "update_every=None must be a whole number of at least 1"),
        ({"update_every": 0}, "update_every=0 must be a whole number of at least 1"),
        ({"update_every": "2"}, 'update_every=\'2\' must be a number of gradients, "nodes", "workers"'),
        ({"update_every": "0 nodes"}, "update_every='0 nodes' must be a number of gradients"),
        ({"max_staleness": -1}, "max_staleness=-1"),
        ({"max_staleness": "4"}, "max_staleness='4' must be a whole number of at least 0"),
        ({"max_staleness": 2.5}, "max_staleness=2.5 must be a whole number"),
        ({"start_nodes": None}, "start_nodes=None must be a whole number of at least 1"),
        ({"buffer": "8"}, "buffer='8' must be a whole number"),
        ({"transfer": "fetch"}, "transfer='fetch'"),
        ({"density": 0.0}, "density=0.0"),
        ({"density": "x"}, "density='x' must be a finite number and above 0"),
        ({"lease_seconds": float("nan")}, "lease_seconds"),
        ({"lease_seconds": "10"}, "lease_seconds='10' must be a finite number and above 0"),
        ({"sync_every": 0, "transfer": "push"}, "sync_every=0"),
        ({"sync_every": "x", "transfer": "push"}, "sync_every='x' must be a whole number"),
        ({"sync_every": 1.5, "transfer": "push"}, "sync_every=1.5 must be a whole number"),
        ({"sync_every": 4}, 'sync_every needs transfer="push"'),
        ({"grace": "x"}, "grace='x' must be a finite number"),
        ({"grace": -1.0}, "grace=-1.0"),
        ({"grace": 1.0}, 'grace needs transfer="push"'),
        ({"robust": "trim"}, "robust='trim'"),
        ({"compress_up": "int3"}, "compress_up='int3'"),
        ({"enforce": "drop"}, 'transfer="push"'),
        ({"clock_limit": 2}, "clock_limit"),
        ({"deterministic": True, "compress_up": "topk"}, "deterministic"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Settings(**options)
    with pytest.raises(ValueError, match=next(iter(options))):  # by its name, in a file too
        Settings.from_json(json.dumps(json.loads(Settings().to_json()) | options))


def test_other_refusals():
    for make, sentence in [
        (lambda: DelayedNesterov([torch.zeros(1)], 0.1, period=4, activation=0.3), "activation=0.3"),
        (lambda: Leader(Settings(), 0, 0), "workers=0"),
        (lambda: Layout.of(torch.nn.Identity()), "no trainable parameter"),
        (lambda: Layout.of(torch.nn.Linear(2, 2).half()), "model.float"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            make()


def test_presets_by_text():
    assert preset("inhad:max_staleness=2:update_every=nodes") == PRESETS["inhad"](2, "nodes")
    assert preset("asp:compress_up=topk:density=0.05").compress_up == "topk"
    assert preset("inhad:max_staleness=none").max_staleness is None
    assert preset("ssp:clock_limit=0").clock_limit == 0


def test_what_makes_an_update():
    assert [preset("inhad").needed(p) for p in (1, 2, 3, 8)] == [1, 1, 1, 4]
    assert preset("bsp").needed(7) == 7
    assert preset("inhad:update_every=5 nodes").needed(3) == 3  # never more than there are
    assert preset("inhad:update_every=nodes/1.5").needed(7) == 4
    assert preset("n_softsync:n=2").needed(7) == 3
    assert preset("n_softsync").needed(7) == 7
    assert preset("fedbuff:size=5").needed(3) == 5
    assert [preset(text).counts_nodes for text in ("inhad", "bsp", "asp", "n_softsync", "fedbuff", "diloco")] == [
        True, True, False, False, False, True
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["topk", "int8", "int4", "int2", "int1"])
@pytest.mark.parametrize("size", [1, 255, 1000])
def test_what_is_not_sent_is_owed(kind, size):
    codec, draw = VectorCodec(kind, 0.1), torch.Generator().manual_seed(0)
    sender, received, total = Feedback(codec), torch.zeros(size), torch.zeros(size)
    for _ in range(20):
        x = torch.randn(size, generator=draw)
        message = sender.encode(x)
        assert message.numel() == codec.size(size, x.dtype)
        received += codec.decode(message, size, x.dtype)
        total += x
    torch.testing.assert_close(received + sender.residual, total, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["topk", "int8", "int2"])
def test_both_ends_of_the_weights_hold_the_same_bits_and_come_close(kind):
    draw = torch.Generator().manual_seed(0)
    theta = torch.randn(500, generator=draw)
    server, leader = Difference(VectorCodec(kind, 0.2)), Difference(VectorCodec(kind, 0.2))
    for _ in range(40):
        message, delta = server.encode(theta)
        held = leader.receive(message) if delta else setattr(leader, "held", theta) or theta
        assert torch.equal(held, server.held)
        theta = theta + 0.001 * torch.randn(500, generator=draw)
    for _ in range(20):
        held = leader.receive(server.encode(theta)[0])
    torch.testing.assert_close(held, theta, rtol=0, atol=1e-5)


def test_messages_that_do_not_fit_the_model_are_refused():
    for kind in ("topk", "int8"):
        with pytest.raises(ValueError, match="bytes arrived"):
            VectorCodec(kind, 0.1).decode(torch.zeros(7, dtype=torch.uint8), 100, torch.float32)
    codec = VectorCodec("topk", 0.1)
    message = codec.encode(torch.arange(100.0))
    message[-1] = 64
    with pytest.raises(ValueError, match="outside"):
        codec.decode(message, 100, torch.float32)


def test_a_layout_is_flat_once_per_shared_parameter_and_back():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    layout = Layout.of(model)
    assert layout.numel == 9 + 3 + 3
    assert Layout.from_json(layout.to_json()) == layout
    flat = layout.flat(model)
    layout.write(flat * 2, model)
    assert torch.equal(layout.flat(model), flat * 2)
    model(torch.ones(1, 3)).sum().backward()
    assert layout.gradient(model).shape == (15,)


def test_other_json_is_no_layout():
    infinite = Layout.of(torch.nn.Linear(3, 2)).to_json().replace('"floats": 0', '"floats": Infinity')
    for text in ("", "[]", "{}", infinite):
        with pytest.raises(ValueError, match="is not the layout of a model"):
            Layout.from_json(text)


def test_layouts_differ_by_name():
    one, two = Layout.of(torch.nn.Linear(3, 2)), Layout.of(torch.nn.Linear(3, 2, bias=False))
    with pytest.raises(LayoutMismatch, match="2 parameters, the server's 1"):
        one.check(two)
    with pytest.raises(LayoutMismatch, match="float64"):
        one.check(Layout.of(torch.nn.Linear(3, 2).double()))


def test_a_checkpoint_is_whole_or_absent(tmp_path):
    master = FlatWeights(torch.arange(4.0), lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), Settings())
    layout = Layout.of(torch.nn.Linear(3, 1)).to_json()
    for version in range(1, 5):
        saved = checkpoints.Saved(
            master.theta + version, master.optimizer.state_dict(), version, 9, {0: 3}, {"in": 2}, layout
        )
        checkpoints.save(tmp_path, saved)
    (tmp_path / ".partial-version-000000009.pt").write_bytes(b"cut off")
    found = checkpoints.kept_in(tmp_path).found()
    assert [path.name for path in found.values()] == ["version-000000003.pt", "version-000000004.pt"]
    again = checkpoints.load(tmp_path)
    assert (again.version, again.positions, again.next_member) == (4, {0: 3}, 9)
    assert torch.equal(again.theta, torch.arange(4.0) + 4)
    (tmp_path / "version-000000005.pt").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"version-000000005\.pt is damaged, or was not written by thinwire"):
        checkpoints.load(tmp_path)
    assert checkpoints.load(tmp_path / "nowhere") is None


def test_numpy_numbers_in_the_optimizer_are_saved_and_loaded(tmp_path):
    network = torch.nn.Linear(3, 1)

    def outer(params):
        return torch.optim.SGD(params, np.float64(0.5), momentum=np.float32(0.25))

    def service():
        return Service(network, Settings(), outer=outer, updates=1, checkpoint_dir=tmp_path)

    first = service()
    first.saves.resumed = -1  # so that the end is worth a checkpoint
    first.close()
    (group,) = checkpoints.load(tmp_path).optimizer["param_groups"]
    assert (group["lr"], group["momentum"]) == (0.5, 0.25)
    service().close()


def test_an_optimizer_that_no_checkpoint_could_hold_is_refused_by_key(tmp_path):
    def outer(params):
        return torch.optim.SGD([{"params": params, "folder": tmp_path}], 0.5)

    with pytest.raises(ValueError, match=r"optimizer\['param_groups'\]\[0\]\['folder'\] is a pathlib"):
        Service(torch.nn.Linear(3, 1), Settings(), outer=outer, updates=1, checkpoint_dir=tmp_path)


def saved_options(network, **changes):
    layout = Layout.of(network)
    master = FlatWeights(layout.flat(network), lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), Settings())
    whole = checkpoints.Saved(master.theta, master.optimizer.state_dict(), 5, 9, {0: 3}, {"in": 2}, layout.to_json())
    return vars(whole) | changes


WRONG = [
    ("theta", None), ("theta", "x"), ("theta", torch.zeros(3)), ("theta", torch.zeros(8, dtype=torch.float64)),
    ("optimizer", None), ("optimizer", {}), ("optimizer", {"state": 5, "param_groups": 5}), ("version", "x"),
    ("version", 2.5), ("version", -1), ("next_member", None), ("positions", []), ("positions", {"a": "b"}),
    ("counters", None), ("counters", {"in": "b"}), ("layout", None), ("layout", ""), ("layout", "5"), ("layout", "{}"),
    ("layout", '{"names": 5, "shapes": 5, "dtype": "x"}'), ("layout", "[" * 100_000), ("buffers", "x"),
    ("buffers", torch.zeros(3)), ("shards", "x"), ("index", None), ("run", "x"), ("unheard", 1),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(WRONG)), ids=[f"{name} {str(value)[:20]}" for name, value in WRONG])
def test_a_checkpoint_with_wrong_content_is_named(tmp_path, place):
    name, value = WRONG[place]
    network = torch.nn.Linear(3, 2)
    torch.save(saved_options(network, **{name: value}), tmp_path / "version-000000005.pt")
    with pytest.raises(ValueError, match=r"version-000000005\.pt is not a checkpoint of a parameter server"):
        Service(
            network, Settings(), outer=lambda params: torch.optim.SGD(params, 0.1), updates=1, checkpoint_dir=tmp_path
        )


def test_a_shards_checkpoint_with_wrong_content_is_named(tmp_path):
    network = torch.nn.Linear(3, 2)
    for name, value in (("theta", torch.zeros(3)), ("optimizer", {}), ("layout", "5")):
        wrong = {"index": 0, "shards": 2, "run": 7, "theta": torch.zeros(4), name: value}
        torch.save(saved_options(network, **wrong), tmp_path / "shard-0-version-000000005.pt")
        shard = WeightSlice(Settings(), Layout.of(network), lambda p: torch.optim.SGD(p, 0.1), 0, 2, tmp_path)
        with pytest.raises(
            ValueError, match=r"shard-0-version-000000005\.pt is not a checkpoint of a parameter server"
        ):
            shard.on(msg.ShardAccepted(5, 7))


@pytest.mark.parametrize("port", [70000, -1, "x", None, 2.5])
def test_a_port_that_cannot_be_is_refused_with_a_sentence(port):
    says = re.escape(f"port={port!r} must be a whole number from 0 to 65535")
    with pytest.raises(ValueError, match=says):
        serve(torch.nn.Linear(3, 2), port=port, updates=1)
    with pytest.raises(ValueError, match=says):
        serve_shard("127.0.0.1:9", index=0, port=port)


@pytest.mark.parametrize(
    ("kind", "rows", "tensor", "values", "sentence"),
    [
        (msg.Welcome, 0, 8, (1, 0, 0), "a Welcome with a tensor"),
        (msg.Buffers, 0, 0, (1,), "Buffers without a tensor"),
        (msg.IterationNumber, 1, 0, (1,), "IterationNumber with rows"),
        (msg.Grad, 0, 0, (1, 0, 2**62 + 1), "larger than anything"),
    ],
)
def test_a_frame_that_cannot_be_is_refused(kind, rows, tensor, values, sentence):
    frame = FRAME.pack(msg.CODEC.kinds.index(kind), rows, tensor, *values, *[0] * (13 - len(values)))
    with pytest.raises(ValueError, match=sentence):
        msg.decode(frame)
