"""A parameter server with its nodes and workers as threads of one process, over real sockets.

What is to be killed, the server or a shard, is a process of its own.
"""

import os
import threading
import time
from itertools import count
from types import SimpleNamespace

import torch

from spawned import fork, free_port
from thinwire.systems.link.hello import find_trust
from thinwire.systems.link.listener import Caller, Listener
from thinwire.systems.link.peer import Peer
from thinwire.systems.parameter_server import Layout, Node, Service, Shard, Worker
from thinwire.systems.parameter_server.messages import decode


def model(seed=0, width=6):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))


def batch_of(node, worker, step):
    draw = torch.Generator().manual_seed(1_000_003 * step + 7919 * node + 31 * worker)
    return torch.randn(8, 4, generator=draw)


def loss(network, x):
    return (network(x) - x[:, :2]).square().mean()


def sgd(**options):
    return lambda params: torch.optim.SGD(params, **{"lr": 0.05, **options})


def part_of(node, worker, delay=0.0, spoil=None):
    """A worker's batches, and the loss of one."""

    def batch(number):
        if delay:
            threading.Event().wait(delay)
        x = batch_of(node, worker, number)
        return x * float("nan") if spoil and spoil(number) else x

    return batch, loss


def gradient_of(network, layout):
    """As the workers compute it, for the replay."""

    def gradient(theta, node, worker, step):
        layout.write(theta, network)
        network.zero_grad()
        loss(network, batch_of(node, worker, step)).backward()
        return layout.gradient(network)

    return gradient


def synchronous(nodes, workers, steps, **options):
    """Plain torch SGD on the mean of all workers' gradients, in fp64 sums per node."""
    network = model()
    layout = Layout.of(network)
    theta = layout.flat(network)
    optimizer = torch.optim.SGD([theta], **{"lr": 0.05, **options})
    gradient = gradient_of(network, layout)
    for step in range(steps):
        total = torch.zeros(layout.numel, dtype=torch.float64)
        for node in range(nodes):
            total += sum(gradient(theta, node, worker, step).double() for worker in range(workers))
        theta.grad = (total / (nodes * workers)).float()
        optimizer.step()
    return theta


@torch.no_grad()
def held_out(network):
    return float(torch.stack([loss(network, batch_of(9, 9, i)) for i in range(20)]).mean())


def flat(network):
    return Layout.of(network).flat(network)


def introductions(patch):
    """From here on: each connection that is made, at both of its ends, with the first message that went over it.

    A peer's ``wire`` is its socket for frames: whoever closes it, both sides notice, as if a cable had been cut.
    """
    made, connect, serve, begin = [], Caller.connect, Listener.serve, Peer.__init__

    def beginning(peer, frames, tensors, other):
        begin(peer, frames, tensors, other)
        peer.wire = frames

    def connecting(caller, hello):
        pair = connect(caller, hello)
        made.append((decode(hello)[0], pair))
        return pair

    def serving(listener, came, hello_bytes):
        def coming(pair, hello):
            made.append((decode(hello)[0], pair))
            came(pair, hello)

        serve(listener, coming, hello_bytes)

    patch.setattr(Peer, "__init__", beginning)
    patch.setattr(Caller, "connect", connecting)
    patch.setattr(Listener, "serve", serving)
    return made


def impatient():
    """In place of a module's ``time``: half a minute passes between two looks at the clock, and nobody sleeps."""
    return SimpleNamespace(monotonic=count(0.0, 30.0).__next__, sleep=lambda seconds: None)


def serve_apart(settings, port, options):
    torch.set_num_threads(1)
    Service(model(), settings, port=port, host="127.0.0.1", outer=sgd(), **options).run()


def keep_apart(address, index, folder):
    torch.set_num_threads(1)
    Shard(address, index, host="127.0.0.1", outer=sgd(), checkpoint_dir=folder).run()


def process(target, *args):
    started = fork.Process(target=target, args=args, daemon=True)
    started.start()
    return started


def started(target, *args):
    """A thread of its own for it."""
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def wait_until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def memory():
    """Bytes that this process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_thread(failures, target, *args):
    """Starts it in a thread; what it raises is added to ``failures``."""

    def guarded():
        try:
            target(*args)
        except BaseException as error:
            failures.append(error)

    return started(guarded)


class Cluster:
    """Starts all; ``join`` waits for the end and returns the server's last status.

    Args:
        shard_folder: for shards' checkpoints.
        apart: the server is ``process``, to be killed, and there is no ``service``.
        shards_apart: of these shards too; each is in ``shard_processes``, by its number, and not in ``shards``.
        keys: directory with identities server, shard0, ..., node0, ...
    """

    def __init__(
        self, settings, nodes, workers=1, *, delays=(), port=0, spoil=None, outer=None, width=6, shard_folder=None,
        apart=False, shards_apart=(), keys=None, **options,
    ):  # fmt: skip
        self.status = self.service = self.process = None
        self.failures = []
        self.nodes, self.workers, self.models = {}, [], {}
        self._keys = keys
        self._settings, self._spoil, self._width = settings, spoil, width
        self._threads = []
        self.shards, self.shard_processes = [], {}
        if apart:
            port = port or free_port()
            more = {"nodes": nodes, "trust": self.trust_of("server"), **options}
            self.process = process(serve_apart, settings, port, more)
        else:
            self.model = model(width=width)
            self.service = Service(self.model, settings, port=port, host="127.0.0.1", outer=outer or sgd(),
                                   nodes=nodes, trust=self.trust_of("server"), **options)  # fmt: skip
            port = self.service.port
        self.address = f"127.0.0.1:{port}"
        for index in range(options.get("shards", 0)):
            if index in shards_apart:
                self.shard_processes[index] = process(keep_apart, self.address, index, shard_folder)
            else:
                self.add_shard(index, outer=outer or sgd(), checkpoint_dir=shard_folder)
        for n in range(nodes):
            self.add(n, workers, delays[n] if n < len(delays) else 0.0)
        # a node joins with its first worker: on a busy machine the first update would lack what the others compute
        wait_until(lambda: all(len(node.leader.alive) >= workers for node in self.nodes.values()))
        self.serving = None if apart else self._thread(self._serve)

    def trust_of(self, name):
        return None if self._keys is None else find_trust(keys=self._keys / name)

    def _thread(self, target, *args):
        return in_thread(self.failures, target, *args)

    def _serve(self):
        self.status = self.service.run()

    def serve(self, service):
        """Begin a server in place of the one that was killed."""
        self.service = service
        self.serving = self._thread(self._serve)

    def add_shard(self, index, **options):
        shard = Shard(self.address, index, host="127.0.0.1", trust=self.trust_of(f"shard{index}"), **options)
        self.shards.append(shard)
        self._threads.append(self._thread(shard.run))

    def add(self, number, workers=1, delay=0.0, **options):
        trust = self.trust_of(f"node{number}")
        node = self.nodes[number] = Node(self.address, number, workers, **{"trust": trust, **options})
        for k in range(workers):
            network = self.models[number, k] = model(99, self._width)
            worker = Worker(
                network,
                *part_of(number, k, delay, self._spoil),
                node.address if k else node,
                k,
                trust=trust,
                check=lambda: node.wait(0),
            )
            self.workers.append(worker)
            self._threads.append(self._thread(worker.run))

    def kill(self):
        """The server's process: nothing more is written, all its connections break at once."""
        self.process.kill()
        self.process.join()

    @property
    def version(self):
        """The newest that a node has."""
        return max(node.leader.version for node in self.nodes.values())

    def stop_after(self, more=5):
        """End when so many more updates have been made, however late that is said."""
        version = self.service.machine.version
        wait_until(lambda: self.service.machine.version >= version + more)
        self.service.stop()

    def join(self):
        server = self.serving or self.process
        server.join(120.0)
        assert not server.is_alive(), "the server does not end"
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a worker does not end"
        for node in self.nodes.values():
            node.close()
        if self.failures:
            raise self.failures[0]
        return self.status
