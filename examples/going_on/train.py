"""What each rank of run.py runs: plain DDP, or a replica under torchft; rank 0 of the latter is the lighthouse.

Prints a line of JSON every tenth step: step, quorum, replicas, loss.
"""

import json
import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = timedelta(seconds=5)
LIGHTHOUSE_PORT = 29510
TELL_EVERY = 10
HELD = 10**9  # the seed of what nobody trains on

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def drawn(count, seed):
    """Which of ten directions is the nearest."""
    teacher = torch.nn.Linear(64, 10)
    torch.nn.init.normal_(teacher.weight, generator=torch.Generator().manual_seed(1))
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return x, teacher(x).argmax(1)


def built():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def tell(model, held, step, replicas, quorum=0):
    """Print how far it is, every tenth step."""
    if step % TELL_EVERY == 0:
        x, y = held
        with torch.no_grad():
            loss = float(cross_entropy(model(x), y))
        print(json.dumps({"step": step, "quorum": quorum, "replicas": replicas, "loss": loss}), flush=True)


def plain():
    dist.init_process_group("gloo", timeout=TIMEOUT)
    model, optimizer = built()
    wrapped, held, step = DistributedDataParallel(model), drawn(512, HELD), 0
    while True:
        x, y = drawn(64, 1000 * step + RANK)
        optimizer.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        step += 1
        tell(model, held, step, WORLD)


def own_address():
    """Of this machine, as the others reach it: in the lab the interface is named, and has one address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        return probe.getsockname()[0]


def lighthouse():
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000
    )
    print(f"lighthouse: {server.address()}", flush=True)
    while True:
        time.sleep(1)


def under_torchft(method, **options):
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.checkpointing.http_transport import HTTPTransport

    import thinwire as tw

    here = own_address()

    class Transport(
        HTTPTransport
    ):  # torchft tells others the host's name, which all machines of the lab have in common
        def metadata(self):
            return super().metadata().replace(socket.gethostname(), here)

    store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        timeout=TIMEOUT,
        min_replica_size=1,
        use_async_quorum=False,
        load_state_dict=None,
        state_dict=None,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        hostname=here,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}",
        replica_id=f"replica{RANK}",
        checkpoint_transport=Transport(timeout=TIMEOUT, num_chunks=0),
    )
    model, inner = built()
    optimizer = Optimizer(manager, inner)
    sync = tw.adapters.torchft.attach(model, optimizer, method, manager=manager, **options)
    held = drawn(512, HELD)
    while True:
        step = manager.current_step()
        x, y = drawn(64, 1000 * step + RANK)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if manager.current_step() > step:
            tell(model, held, step + 1, sync.quorum.size, sync.quorum.number)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "ddp":
        plain()
    elif RANK == 0:
        lighthouse()
    else:
        under_torchft("acp", rank=4)
