"""kill -9 of a worker, a leader, the server: training goes on, nothing twice."""

import os
import random
import signal
import time

import pytest
import torch
from parameter_cluster import model, part_of, sgd, wait_until

from spawned import fork, free_port
from thinwire.systems.parameter_server import Journal, Node, Service, Worker
from thinwire.systems.parameter_server import node as node_module
from thinwire.systems.parameter_server.leader import Leader
from thinwire.systems.parameter_server.messages import Pull
from thinwire.systems.parameter_server.presets import inhad

pytestmark = pytest.mark.dist


def serve(port, folder):
    """The server's process; a line per update in `versions`. It ends once there is `enough`."""
    torch.set_num_threads(1)
    log = open(f"{folder}/versions", "a", buffering=1)  # noqa: SIM115  to the end of the process

    def on_update(version, theta):
        assert torch.isfinite(theta).all()
        assert theta.numel() == 44
        log.write(f"{version}\n")
        if os.path.exists(f"{folder}/enough"):
            service.stop()

    settings = inhad(2, start_nodes=2, lease_seconds=2.0)
    service = Service(model(), settings, port=port, host="127.0.0.1", outer=sgd(), nodes=2, on_update=on_update,
                      checkpoint_dir=f"{folder}/c", checkpoint_every=5, journal=f"{folder}/j")  # fmt: skip
    service.run()


def lead(port, number, dies=False):
    """A node's process, whose one worker is a thread; it may be made to die between PULL and GRAD."""
    torch.set_num_threads(1)
    pulls = []

    class Dying(Leader):
        def on(self, message, now):
            if isinstance(message, Pull):
                pulls.append(message)
                if len(pulls) > 4:
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().on(message, now)

    if dies:
        node_module.Leader = Dying
    node = Node(f"127.0.0.1:{port}", number, 1, patience=100.0)
    Worker(model(), *part_of(number, 0, 0.02), node, 0).run()
    node.wait(5)


class Training:
    """Processes of one training in a folder; whoever is alive at the end is killed."""

    def __init__(self, folder):
        self.folder, self.port, self.all = folder, free_port(), []

    def start(self, target, *args):
        process = fork.Process(target=target, args=(self.port, *args))
        process.start()
        self.all.append(process)
        return process

    def kill(self, process):
        process.kill()
        process.join()

    @property
    def versions(self):
        path = self.folder / "versions"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def reach(self, version):
        wait_until(lambda: self.versions and self.versions[-1] >= version)

    def go_on(self, more):
        self.reach(self.versions[-1] + more)

    def end(self, server):
        """Wait until it has ended, once there is ``enough``; check the journal."""
        (self.folder / "enough").touch()
        server.join(90)
        assert server.exitcode == 0
        self.check_journal(self.versions[-1])

    def check_journal(self, updates):
        lines = Journal.read(self.folder / "j").updates
        assert [line.version for line in lines] == list(range(updates))
        keys = [(part.node, row.worker, row.step) for line in lines for part in line.parts for row in part.rows]
        assert len(keys) == len(set(keys)), "a gradient was counted twice"
        assert all(0 <= line.version - row.base <= 2 for line in lines for part in line.parts for row in part.rows)


@pytest.fixture
def training(tmp_path):
    made = Training(tmp_path)
    yield made
    for process in made.all:
        made.kill(process)


def test_a_leader_dies_between_pull_and_grad(training):
    server = training.start(serve, training.folder)
    training.start(lead, 0)
    dying = training.start(lead, 1, True)
    wait_until(lambda: not dying.is_alive())
    assert dying.exitcode == -signal.SIGKILL
    training.go_on(10)
    training.start(lead, 1)  # the node comes back
    training.go_on(30)
    training.end(server)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_random_kills(training):
    draw = random.Random(0)

    def begin(who):
        return training.start(serve, training.folder) if who == "server" else training.start(lead, who)

    alive = {who: begin(who) for who in ("server", 0, 1, 2)}
    training.reach(5)
    for _ in range(100):
        time.sleep(draw.uniform(0.2, 2.5))
        who = draw.choice([0, 1, 2, 0, 1, 2, "server"])
        training.kill(alive[who])
        alive[who] = begin(who)
    training.go_on(20)
    training.kill(alive["server"])
    training.check_journal(len(Journal.read(training.folder / "j").updates))
