"""A parameter server with its nodes and workers as threads of one process, over real sockets and Gloo groups."""

import threading

import torch

from thinwire.parameter_server import Node, Service, Worker


def model(seed=0, width=6):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))


def loss(network, node, worker, step):
    draw = torch.Generator().manual_seed(1_000_003 * step + 7919 * node + 31 * worker)
    x = torch.randn(8, 4, generator=draw)
    return (network(x) - x[:, :2]).square().mean()


def sgd(**options):
    return lambda params: torch.optim.SGD(params, **{"lr": 0.05, **options})


def loss_of(node, worker, delay=0.0, spoil=None):
    def step(network, number):
        if delay:
            threading.Event().wait(delay)
        value = loss(network, node, worker, number)
        if spoil and spoil(number):
            value = value * float("nan")
        return value, 8

    return step


class Cluster:
    """Starts all; ``join`` waits for the end and returns the server's last status."""

    def __init__(self, settings, nodes, workers=1, *, delays=(), port=0, spoil=None, outer=None, width=6, **options):
        self.model, self._width = model(width=width), width
        self.service = Service(self.model, settings, port=port, host="127.0.0.1", outer=outer or sgd(),
                               nodes=nodes, **options)  # fmt: skip
        self.status = None
        self.failures = []
        self.nodes, self.workers, self.models = {}, [], {}
        self._settings, self._spoil = settings, spoil
        self._server = self._thread(self._serve)
        self._threads = []
        for n in range(nodes):
            self.add(n, workers, delays[n] if n < len(delays) else 0.0)

    def _thread(self, target, *args):
        def guarded():
            try:
                target(*args)
            except BaseException as error:
                self.failures.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def _serve(self):
        self.status = self.service.run()

    def add(self, number, workers=1, delay=0.0, **options):
        node = self.nodes[number] = Node(f"127.0.0.1:{self.service.port}", number, workers, **options)
        for k in range(workers):
            network = self.models[number, k] = model(99, self._width)
            worker = Worker(
                network, loss_of(number, k, delay, self._spoil), node.address, k, check=lambda: node.wait(0)
            )
            self.workers.append(worker)
            self._threads.append(self._thread(worker.run))

    def join(self, seconds=40.0):
        self._server.join(seconds)
        assert not self._server.is_alive(), "the server does not end"
        for thread in self._threads:
            thread.join(10.0)
            assert not thread.is_alive(), "a worker does not end"
        for node in self.nodes.values():
            node.close()
        if self.failures:
            raise self.failures[0]
        return self.status
