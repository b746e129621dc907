"""What each rank of run.py runs, by its first argument: see the tables below. Under torchft rank 0 is the lighthouse.

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
ROUND = 16  # steps between two exchanges of local steps
HELD = 10**9  # the seed of what nobody trains on

WIDTH, BATCH = (int(x) for x in sys.argv[2:4]) if sys.argv[3:] else (512, 64)
KEPT = []  # what has to live as long as the process
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
    layers = [torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def tell(model, held, step, replicas, quorum=0):
    """Print how far it is, every tenth step."""
    if step % TELL_EVERY == 0:
        x, y = held
        with torch.no_grad():
            loss = float(cross_entropy(model(x), y))
        print(json.dumps({"step": step, "quorum": quorum, "replicas": replicas, "loss": loss}), flush=True)


def plain(method=None, **options):
    """DDP, or a method of thinwire's, on ranks that stay."""
    import thinwire as tw

    dist.init_process_group("gloo", timeout=TIMEOUT)
    model, optimizer = built()
    if method is None:
        forward = DistributedDataParallel(model)
    else:
        forward = model
        tw.attach(model, optimizer, method, **options)
    held, step = drawn(512, HELD), 0
    while True:
        x, y = drawn(BATCH, 1000 * step + RANK)
        optimizer.zero_grad()
        cross_entropy(forward(x), y).backward()
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


def manager_of(*, state_dict=None, load_state_dict=None):
    from torchft import Manager, ProcessGroupGloo
    from torchft.checkpointing.http_transport import HTTPTransport

    here = own_address()

    class Transport(
        HTTPTransport
    ):  # torchft tells others the host's name, which all machines of the lab have in common
        def metadata(self):
            return super().metadata().replace(socket.gethostname(), here)

    store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
    KEPT.append(store)
    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        timeout=TIMEOUT,
        min_replica_size=1,
        use_async_quorum=False,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        hostname=here,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}",
        replica_id=f"replica{RANK}",
        checkpoint_transport=Transport(timeout=TIMEOUT, num_chunks=0),
    )


def train(manager, model, forward, optimizer, every=1, sync=None):
    """Without end; the manager counts exchanges, of which there is one in ``every`` steps."""
    held, since = drawn(512, HELD), 0
    while True:
        exchanges = manager.current_step()
        step = exchanges * every + since
        x, y = drawn(BATCH, 1000 * step + RANK)
        optimizer.zero_grad()
        cross_entropy(forward(x), y).backward()
        optimizer.step()
        since = 0 if manager.current_step() > exchanges else (since + 1) % every
        now = manager.current_step() * every + since
        if now > step:
            tell(model, held, now, manager.num_participants(), sync.quorum.number if sync else 0)


def thinwire_gradients(method, **options):
    from torchft import Optimizer

    import thinwire as tw

    manager, (model, inner) = manager_of(), built()
    optimizer = Optimizer(manager, inner)
    sync = tw.adapters.torchft.attach(model, optimizer, method, manager=manager, **options)
    train(manager, model, model, optimizer, sync=sync)


def thinwire_rounds(method, **options):
    import thinwire as tw

    manager, (model, optimizer) = manager_of(), built()
    sync = tw.adapters.torchft.attach(model, optimizer, method, sync_every=ROUND, manager=manager, **options)
    train(manager, model, model, optimizer, ROUND, sync)


def torchft_itself(way):
    """Its DistributedDataParallel, its manager's all-reduce, or its DiLoCo with an outer optimizer that averages.

    Where an all-reduce fails on Gloo, torchft 0.2.0's DistributedDataParallel raises in its hook and ends the survivor.
    """
    from torchft import DistributedDataParallel, Optimizer
    from torchft.local_sgd import DiLoCo

    model, inner = built()

    def load(states):
        model.load_state_dict(states["model"])
        inner.load_state_dict(states["optimizer"])

    manager = manager_of(
        load_state_dict=load, state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()}
    )
    if way == "diloco":
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(manager, [model], inner, outer, sync_every=ROUND, use_bucketization=True):
            train(manager, model, model, inner, ROUND)
    if way == "allreduce":

        def average(x):
            manager.allreduce(x.grad).wait()

        for x in model.parameters():
            x.register_post_accumulate_grad_hook(average)
        train(manager, model, model, Optimizer(manager, inner))
    train(manager, model, DistributedDataParallel(manager, model), Optimizer(manager, inner))


WITHOUT_TORCHFT = {
    "ddp": plain,
    "attach-ssgd": lambda: plain("ssgd"),
    "attach-acp": lambda: plain("acp", rank=4),
}
UNDER_TORCHFT = {
    "ssgd": lambda: thinwire_gradients("ssgd"),
    "acp": lambda: thinwire_gradients("acp", rank=4),
    "local": lambda: thinwire_rounds("local", codec="int8"),
    "torchft-ddp": lambda: torchft_itself("ddp"),
    "torchft-allreduce": lambda: torchft_itself("allreduce"),
    "torchft-diloco": lambda: torchft_itself("diloco"),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    mode = sys.argv[1]
    if mode in WITHOUT_TORCHFT:
        WITHOUT_TORCHFT[mode]()
    elif RANK == 0:
        lighthouse()
    else:
        UNDER_TORCHFT[mode]()
