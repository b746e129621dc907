"""Four ranks as two replicas of two shards: models under FSDP2, and what thinwire should make of their gradients."""

import cases
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import thinwire as tw

WIDTH = 24
REPLICAS = SHARDS = 2


def mesh(replicas=REPLICAS, shards=SHARDS):
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


class Net(nn.Module):
    """Rows that do not divide by two, a parameter of one row, a frozen one, a buffer."""

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, 16)
        self.second = nn.Sequential(nn.Linear(16, 13), nn.Tanh(), nn.Linear(13, 13))
        self.last = nn.Linear(13, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.full((5,), float(seed)))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(self.second(x)) * self.scale + 0.01 * self.shift + self.frozen.sum()


GROUPS = (
    ("first.weight", "first.bias"),
    ("second.0.weight", "second.0.bias", "second.2.weight", "second.2.bias"),
    ("last.weight", "scale"),
)


def sharded(on, net=None, dtype=None, **kwargs):
    """Under FSDP2: ``first`` and ``second`` for themselves, the rest with the root."""
    net = Net() if net is None else net
    if dtype is not None:
        kwargs["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=dtype)
    for part in (net.first, net.second, net):
        fully_shard(part, mesh=on, **kwargs)
    return net


def step_of(net, optimizer, rank, step):
    loss = cases.loss_of(net, rank, step, WIDTH)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(net, rank, steps, start=0):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return [step_of(net, optimizer, rank, step) for step in range(start, start + steps)]


def whole(net):
    """All parameters, gathered."""
    return {n: p.detach().full_tensor().clone() for n, p in net.named_parameters()}


def rows(x, shard, shards=SHARDS):
    """A shard's rows, as FSDP2 cuts them."""
    chunks = list(x.chunk(shards)) + [x[:0]] * shards
    return chunks[shard]


class Oracle:
    """The replicas' exchange in LocalWorlds, one per shard, from the plain gradients of every rank on an uncut copy."""

    def __init__(self, method, replicas=REPLICAS, shards=SHARDS):
        self.method, self.replicas, self.shards = method, replicas, shards
        self.worlds = [tw.LocalWorld(replicas) for _ in range(shards)]

    def gradients(self, weights, step):
        """{name: averaged gradient} that FSDP2 should hold after this backward, whole."""
        ranks = [plain(weights, rank, step) for rank in range(self.replicas * self.shards)]
        found = {}
        for shard, world in enumerate(self.worlds):
            means = []
            for replica in range(self.replicas):
                mine = ranks[replica * self.shards : (replica + 1) * self.shards]
                mean = {n: sum(g[n] for g in mine) / self.shards for n in mine[0]}
                means.append({n: rows(g, shard, self.shards) for n, g in mean.items()})
            means = [{n: g for n, g in one.items() if g.numel()} for one in means]
            dense = {n for n in means[0] if self.method.dense(n, tuple(ranks[0][n].shape), False)}
            plan = [[n for n in names if n in means[0] and n not in dense] for names in GROUPS]
            world.plan = tw.Plan.of([names for names in plan if names])
            outcome = world.step(self.method, [{n: g for n, g in one.items() if n not in dense} for one in means])[0]
            for n in dense:
                outcome[n] = sum(one[n] for one in means) / self.replicas
            for n, g in outcome.items():
                found.setdefault(n, []).append(g)
        return {n: torch.cat(parts) for n, parts in found.items()}

    def residuals(self, replica, shard):
        return self.worlds[shard].residuals()[replica]


def plain(weights, rank, step):
    net = Net()
    with torch.no_grad():
        for n, p in net.named_parameters():
            p.copy_(weights[n])
    cases.loss_of(net, rank, step, WIDTH).backward()
    return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def place():
    """(replica, shard) of this rank."""
    return divmod(dist.get_rank(), SHARDS)
