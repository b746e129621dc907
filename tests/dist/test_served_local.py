"""Local steps through a server: members are processes with loops of their own, over real sockets."""

import importlib.util
import json
import logging
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from parameter_cluster import batch_of, flat, held_out, loss, model, process, wait_until

import thinwire as tw
from spawned import free_port
from thinwire.systems.parameter_server import Node, Service, Worker, presets

pytestmark = pytest.mark.dist


class Server:
    """In a thread of this process."""

    def __init__(self, settings, network=None, port=None, **options):
        self.model = network or model()
        self.service = Service(self.model, settings, host="127.0.0.1", port=port or 0, **options)
        self.port = self.service.port
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        self.status = self.service.run()

    def join(self):
        self.thread.join(120)
        assert not self.thread.is_alive()
        return self.status

    @property
    def version(self):
        return self.service.machine.version

    def reach(self, version):
        wait_until(lambda: self.version >= version)


def train(network, port, number, *, seconds=0.0, patience=60.0, steps=None, lr=0.05, keys=None):
    """A member's loop, as a user writes it; returns its handle and the common steps that it saw."""
    optimizer, seen = torch.optim.SGD(network.parameters(), lr=lr), []
    sync = tw.attach(network, optimizer, "local", server=f"127.0.0.1:{port}", node=number, patience=patience, keys=keys)
    for step in sync.steps(steps):
        optimizer.zero_grad()
        x = batch_of(number, 0, len(seen))
        loss(network, x.to(next(network.parameters()).dtype)).backward()
        optimizer.step()
        seen.append(step)
        time.sleep(seconds)
    return sync, seen


def total(network):
    return float(flat(network).double().sum())


def serve(settings, port, folder):
    torch.set_num_threads(1)
    Service(model(), settings, port=port, updates=200, checkpoint_dir=folder, checkpoint_every=5).run()


def member(folder, port, number, options):
    torch.set_num_threads(1)
    network = model()
    sync, seen = train(network, port, number, **options)
    with sync:
        sync.finish()
        told = {
            "seen": seen,
            "sum": total(network),
            "rounds": sync.rounds,
            "note": sync.stats().note,
        }
        (folder / f"{number}.json").write_text(json.dumps(told))


@pytest.fixture
def members(tmp_path):
    """Starts members; their reports, once they have ended."""
    started = {}

    def start(port, number, **options):
        started[number] = process(member, tmp_path, port, number, options)
        return started[number]

    def reports():
        for one in started.values():
            one.join(120)
            assert one.exitcode == 0
        return [json.loads((tmp_path / f"{number}.json").read_text()) for number in started]

    start.reports = reports
    yield start
    for one in started.values():
        one.kill()
        one.join()


def exact(steps, **options):
    return presets.local(steps, grace=0.2, codec=None, compress_down=None, **options)


def test_one_member_trains_as_its_loop_does_alone():
    server = Server(exact(4), model().double(), updates=5)
    network = model(seed=3).double()
    sync, seen = train(network, server.port, 0)
    with sync:
        assert (seen, sync.over, sync.progress, sync.rounds) == (list(range(20)), True, 1.0, 5)
        sync.finish()
    assert server.join().gradients == 5
    alone = model().double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(20):
        optimizer.zero_grad()
        loss(alone, batch_of(0, 0, step).double()).backward()
        optimizer.step()
    torch.testing.assert_close(flat(network), flat(alone), rtol=1e-12, atol=1e-12)
    assert torch.equal(flat(network), flat(server.model))


@pytest.mark.parametrize("codec", ["int8", "int2"])
def test_members_of_different_speed_end_with_the_servers_weights(members, codec):
    before = held_out(model())
    server = Server(presets.local(8, quorum=2, codec=codec, start_nodes=3), updates=25)
    for number, seconds in enumerate((0.002, 0.002, 0.02)):
        members(server.port, number, seconds=seconds)
    status, told = server.join(), members.reports()
    assert {one["sum"] for one in told} == {total(server.model)}
    assert [one["seen"] == sorted(one["seen"]) and one["seen"][-1] < 200 for one in told] == [True] * 3
    assert len(told[2]["seen"]) < len(told[0]["seen"])
    assert re.search(r"25 rounds of the server, every 8 steps; own pace: [1-7] of 8 steps here", told[2]["note"])
    assert held_out(server.model) < 0.5 * before
    assert status.version == 25
    assert status.gradients > 50


def test_members_die_stand_still_return_and_come_late(members):
    server = Server(presets.local(4, quorum=2, start_nodes=3, lease_seconds=300.0), updates=200)
    first = [members(server.port, number, seconds=0.002) for number in range(3)]
    server.reach(20)
    os.kill(first[1].pid, signal.SIGKILL)
    os.kill(first[2].pid, signal.SIGSTOP)
    server.reach(server.version + 30)
    members(server.port, 1, seconds=0.002)
    members(server.port, 3, seconds=0.002)
    server.reach(server.version + 30)
    os.kill(first[2].pid, signal.SIGCONT)
    status, told = server.join(), members.reports()
    assert status.counters["joined"] >= 5
    assert {one["sum"] for one in told} == {total(server.model)}
    assert held_out(server.model) < 0.5 * held_out(model())


def test_a_server_that_comes_back_goes_on_from_its_checkpoint_and_members_train_alone_meanwhile(members, tmp_path):
    settings, port = presets.local(4, lease_seconds=2.0), free_port()
    first = process(serve, settings, port, tmp_path / "c")
    for number in range(2):
        members(port, number, seconds=0.005)
    wait_until((tmp_path / "c").exists)
    first.kill()
    first.join()
    time.sleep(1.0)
    second = Server(settings, port=port, updates=60, checkpoint_dir=tmp_path / "c")
    assert second.join().version == 60
    told = members.reports()
    assert [one["rounds"] for one in told] == [60, 60]
    assert {one["sum"] for one in told} == {total(second.model)}


def test_without_a_server_a_member_trains_for_its_patience_and_keeps_its_weights(caplog):
    server = Server(exact(2, lease_seconds=2.0), updates=10**6)
    ended = threading.Timer(1.0, server.service.close)
    ended.start()
    network = model()
    with caplog.at_level(logging.WARNING):
        sync, seen = train(network, server.port, 0, seconds=0.002, patience=1.0)
    own = flat(network)
    with sync:
        sync.finish()
        assert re.search(r"no server at 127\.0\.0\.1:\d+ for 1 s: .*; sync.steps\(\) ends", caplog.text)
        assert sync.over
        assert len(seen) > 2 * sync.rounds + 10
        assert torch.equal(flat(network), own)
        assert "training goes on alone until it is back, for up to 1 s" in caplog.text
        assert "sync.steps() ends, and the model holds what this member has trained alone" in caplog.text


def test_who_leaves_early_has_handed_in_all_and_the_others_go_on(members):
    server = Server(exact(4, quorum=1, start_nodes=2), updates=60)
    members(server.port, 1, seconds=0.001)
    network = model()
    sync, seen = train(network, server.port, 0, steps=10)
    with sync:
        sync.finish()
        with sync.outer_weights():
            assert torch.equal(flat(network), flat(network))
    assert len(seen) in range(8, 13)
    assert members.reports()[0]["rounds"] == 60
    assert server.join().counters["left"] >= 1


def test_running_statistics_are_averaged_and_steps_after_the_end_are_told(caplog):
    def network():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))

    server, mine = Server(exact(2), network(), updates=5), network()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.05)
    sync = tw.attach(mine, optimizer, "local", server=f"127.0.0.1:{server.port}", node=0)
    with sync, caplog.at_level(logging.WARNING):
        for step in range(11):
            if step == 10:
                ended = [x.clone() for x in (*mine.parameters(), *mine.buffers())]
            loss(mine, batch_of(0, 0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    server.join()
    served = [*server.model.parameters(), *server.model.buffers()]
    for x, y in zip(ended, served):
        torch.testing.assert_close(x.double(), y.double())
    assert caplog.text.count("steps from here on change this model alone") == 1


def test_a_checkpoint_brings_back_the_optimizer_and_not_the_weights(tmp_path):
    server, network = Server(exact(2), updates=50), model()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    address = f"127.0.0.1:{server.port}"

    def turn(step):
        loss(network, batch_of(0, 0, step)).backward()
        optimizer.step()
        optimizer.zero_grad()

    with tw.attach(network, optimizer, "local", server=address, node=0) as sync:
        for step in range(4):
            turn(step)
        tw.checkpoint.save(tmp_path, network, optimizer, sync, 4)
        kept = optimizer.state[network[0].weight]["exp_avg"].clone()
        for step in range(4):
            turn(step)
    network, after = model(seed=5), flat(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    with tw.attach(network, optimizer, "local", server=address, node=0) as sync:
        assert tw.checkpoint.load(tmp_path, network, optimizer, sync) == 4
        assert torch.equal(flat(network), after)
        assert torch.equal(optimizer.state[network[0].weight]["exp_avg"], kept)
    server.service.stop()
    assert torch.equal(flat(server.model) if server.join() else None, after)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_the_pages_callback_takes_a_trainer_to_a_server(tmp_path):
    from transformers import Trainer, TrainingArguments

    class Fits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model()

        def forward(self, x):
            return {"loss": loss(self.net, x)}

    server, space = Server(exact(2), Fits(), updates=6), {}
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    (code,) = re.findall(r"^<!-- run with a server -->\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(code.replace("10.0.0.1:29400", f"127.0.0.1:{server.port}"), space)
    rows = [{"x": x} for x in batch_of(0, 0, 0)]
    arguments = TrainingArguments(
        tmp_path, use_cpu=True, max_steps=100, per_device_train_batch_size=4, report_to=[], save_strategy="no"
    )
    trainer = Trainer(Fits(), arguments, train_dataset=rows, callbacks=[space["Joins"]()])
    trainer.train()
    assert server.join().version == 6
    assert trainer.state.global_step == 12
    assert torch.equal(flat(trainer.model), flat(server.model))


def test_what_does_not_go_together_is_refused_in_a_sentence(tmp_path):
    server = Server(exact(2), updates=2)
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    address = f"127.0.0.1:{server.port}"
    with pytest.raises(ValueError, match=r"leave out sync_every, codec, and start it with `thinwire ps server"):
        tw.attach(network, optimizer, "local", server=address, sync_every=4, codec="int2")
    with pytest.raises(ValueError, match=r'server= goes with "local" alone; .* leave out method \'diloco\''):
        tw.attach(network, optimizer, "diloco", server=address)
    other = model(width=9)
    with pytest.raises(ValueError, match=r"this node's model has 0\.weight"):
        tw.attach(other, torch.optim.SGD(other.parameters(), lr=0.1), "local", server=address)
    with pytest.raises(ValueError, match="local steps are counted by the optimizer's steps"):
        tw.attach(network, None, "local", server=address)
    node = Node(address, 7, 1)
    worker = Worker(network, lambda number: batch_of(0, 0, number), loss, node, 0)
    with pytest.raises(ValueError, match="train in a loop of your own with attach"):
        worker.run()
    node.close()
    with pytest.raises(ValueError, match="shards have slices"):
        Service(model(), presets.local(2), host="127.0.0.1", shards=2)
    sums = Server(presets.asp(), updates=2)
    with pytest.raises(ValueError, match=r"the server adds up gradients: use parameter_server.run"):
        tw.attach(network, optimizer, "local", server=f"127.0.0.1:{sums.port}")
    sums.service.stop()
    server.service.stop()
    sums.join()
    server.join()
