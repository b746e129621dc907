"""kill -9 of a worker, a leader at each point of the protocol, the server: training goes on, nothing counts twice."""

import os
import random
import signal
import threading
import time

import pytest

from spawned import fork, free_port

pytestmark = pytest.mark.dist
LEASE = 2.0


def settings(**options):
    from thinwire.systems.parameter_server.presets import inhad

    return inhad(2, start_nodes=2, lease_seconds=LEASE, **options)


def serve(port, folder, updates=None):
    """The server's process; a line per update in `versions`. It ends after so many, or once there is `enough`."""
    import torch
    from parameter_cluster import model, sgd

    from thinwire.systems.parameter_server import Service

    torch.set_num_threads(1)
    log = open(f"{folder}/versions", "a", buffering=1)  # noqa: SIM115  to the end of the process
    enough = os.path.join(folder, "enough")

    def on_update(version, theta):
        assert torch.isfinite(theta).all()
        log.write(f"{version}\n")
        if os.path.exists(enough):
            service.stop()

    service = Service(model(), settings(), port=port, host="127.0.0.1", outer=sgd(), updates=updates,
                      checkpoint_dir=f"{folder}/c", checkpoint_every=5,
                      journal=f"{folder}/j", nodes=2, on_update=on_update)  # fmt: skip
    service.run()


def lead(port, number, folder, dies=None):
    """A node's process, whose one worker is a thread; it may be made to die at a point of the protocol."""
    import torch
    from parameter_cluster import model, part_of

    from thinwire.systems.link.codec import FRAME
    from thinwire.systems.link.peer import Peer
    from thinwire.systems.parameter_server import Node, Worker
    from thinwire.systems.parameter_server import node as module
    from thinwire.systems.parameter_server.leader import Leader
    from thinwire.systems.parameter_server.messages import Grad, Pull, decode

    torch.set_num_threads(1)
    count = [0]

    def die(after):
        count[0] += 1
        if count[0] > after:
            os.kill(os.getpid(), signal.SIGKILL)

    class Dying(Leader):
        def report(self, now):
            if dies == "before IN":
                die(12)
            return super().report(now)

        def on(self, message, now):
            if dies == "between PULL and GRAD" and isinstance(message, Pull):
                die(4)
            return super().on(message, now)

    if dies == "in GRAD":  # the header has gone, the tensor never comes
        send_frame, send_tensor, announced = Peer.send_frame, Peer.send_tensor, threading.local()

        def sending_frame(pair, frame):
            announced.sum = isinstance(decode(frame[: FRAME.size])[0], Grad)
            send_frame(pair, frame)

        def sending_tensor(pair, x, seconds):
            if announced.sum:
                die(6)
            send_tensor(pair, x, seconds)

        Peer.send_frame, Peer.send_tensor = sending_frame, sending_tensor
    module.Leader = Dying
    node = Node(f"127.0.0.1:{port}", number, 1, leases=10.0)
    Worker(model(), *part_of(number, 0, 0.02), node.address, 0, check=lambda: node.wait(0)).run()
    node.wait(5)


def lead_apart(port, number, folder):
    """A node whose two workers are processes; their numbers are in a file."""
    import torch

    from thinwire.systems.parameter_server import Node

    torch.set_num_threads(1)
    node = Node(f"127.0.0.1:{port}", number, 2)
    workers = {}
    while not node.wait(0.05):
        for k in range(2):
            if k not in workers or not workers[k].is_alive():
                workers[k] = fork.Process(target=work, args=(node.address, number, k), daemon=True)
                workers[k].start()
                with open(f"{folder}/workers", "a") as file:
                    file.write(f"{workers[k].pid}\n")
    for worker in workers.values():
        worker.join(5)


def work(address, number, k):
    import torch
    from parameter_cluster import model, part_of

    from thinwire.systems.parameter_server import Worker

    torch.set_num_threads(1)
    Worker(model(), *part_of(number, k, 0.02), address, k).run()


class Processes:
    def __init__(self):
        self.all = []

    def start(self, target, *args):
        process = fork.Process(target=target, args=args)
        process.start()
        self.all.append(process)
        return process

    def end(self):
        for process in self.all:
            if process.is_alive():
                process.kill()
            process.join()


@pytest.fixture
def processes():
    made = Processes()
    yield made
    made.end()


def versions(folder):
    path = folder / "versions"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def reach(folder, version):
    wait_for(lambda: versions(folder) and versions(folder)[-1] >= version)


def go_on(folder, more):
    reach(folder, versions(folder)[-1] + more)


def end(folder, server):
    (folder / "enough").touch()
    server.join(90)
    assert server.exitcode == 0
    check_journal(folder, versions(folder)[-1])


def check_journal(folder, updates):
    from thinwire.systems.parameter_server import Journal

    lines = Journal.read(folder / "j").updates
    assert [line.version for line in lines] == list(range(updates))
    keys = [(part.node, row.worker, row.step) for line in lines for part in line.parts for row in part.rows]
    assert len(keys) == len(set(keys)), "a gradient was counted twice"
    assert all(0 <= line.version - row.base <= 2 for line in lines for part in line.parts for row in part.rows)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("before IN", marks=pytest.mark.slow),
        "between PULL and GRAD",
        pytest.param("in GRAD", marks=pytest.mark.slow),
    ],
)
def test_a_leader_dies_at_a_point_of_the_protocol(tmp_path, processes, point):
    port = free_port()
    server = processes.start(serve, port, tmp_path)
    processes.start(lead, port, 0, tmp_path)
    dying = processes.start(lead, port, 1, tmp_path, point)
    wait_for(lambda: not dying.is_alive())
    assert dying.exitcode == -signal.SIGKILL
    go_on(tmp_path, 10)
    processes.start(lead, port, 1, tmp_path)  # the node comes back
    go_on(tmp_path, 50)
    end(tmp_path, server)


@pytest.mark.slow
def test_a_worker_dies_and_its_node_goes_on(tmp_path, processes):
    port = free_port()
    server = processes.start(serve, port, tmp_path)
    processes.start(lead, port, 0, tmp_path)
    processes.start(lead_apart, port, 1, tmp_path)
    reach(tmp_path, 10)
    wait_for(lambda: (tmp_path / "workers").exists())
    for pid in [int(line) for line in (tmp_path / "workers").read_text().split()]:
        os.kill(pid, signal.SIGKILL)
    go_on(tmp_path, 50)
    end(tmp_path, server)


@pytest.mark.slow
def test_the_server_dies_and_its_nodes_wait_for_the_next(tmp_path, processes):
    port, updates = free_port(), 100
    server = processes.start(serve, port, tmp_path, updates)
    for number in range(2):
        processes.start(lead, port, number, tmp_path)
    reach(tmp_path, 40)
    server.kill()
    server.join()
    again = processes.start(serve, port, tmp_path, updates)
    again.join(90)
    assert again.exitcode == 0
    check_journal(tmp_path, updates)


@pytest.mark.slow
def test_a_stopped_node_is_dropped_and_comes_back(tmp_path, processes):
    port = free_port()
    server = processes.start(serve, port, tmp_path)
    processes.start(lead, port, 0, tmp_path)
    sleeper = processes.start(lead, port, 1, tmp_path)
    reach(tmp_path, 20)
    os.kill(sleeper.pid, signal.SIGSTOP)
    go_on(tmp_path, 20)  # at most 2 with it, the rest when its lease has ended
    os.kill(sleeper.pid, signal.SIGCONT)
    go_on(tmp_path, 50)
    end(tmp_path, server)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_random_kills(tmp_path, processes):
    draw = random.Random(0)
    port = free_port()
    alive = {"server": processes.start(serve, port, tmp_path)}
    for number in range(3):
        alive[number] = processes.start(lead, port, number, tmp_path)
    reach(tmp_path, 5)
    kills = 0
    while kills < 100:
        time.sleep(draw.uniform(0.2, 2.5))
        who = draw.choice([0, 1, 2, 0, 1, 2, "server"])
        alive[who].kill()
        alive[who].join()
        kills += 1
        again = (serve, port, tmp_path) if who == "server" else (lead, port, who, tmp_path)
        alive[who] = processes.start(*again)
    go_on(tmp_path, 20)
    alive["server"].kill()
    alive["server"].join()
    from thinwire.systems.parameter_server import Journal

    check_journal(tmp_path, len(Journal.read(tmp_path / "j").updates))
