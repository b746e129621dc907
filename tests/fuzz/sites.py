"""Scripts of two sites, each with the model sharded by FSDP2 over its one rank: the rounds are those of plain twins."""

import functools

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire.adapters.fsdp2 as fsdp2
from fuzz.local_steps import LocalSteps
from fuzz.models import build
from fuzz.player import optimizers_of, tensors_of


@functools.cache
def mesh():
    """One a process."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("site", "shard"))


class Sites(LocalSteps):
    """Local steps between sites; checkpoints are the handle's own."""

    def make(self, seed):
        self.net, self.scaler = build(self.case["model"], seed), None
        for block in self.net.blocks:
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh()["shard"])
        fully_shard(self.net, mesh=mesh()["shard"])
        self.optimizers, self.given = optimizers_of(self.case, self.net)

    def attached(self, given, **options):
        return fsdp2.attach(self.net, given, self.method(), sites=mesh()["site"], **self.extra(), **options)

    def save(self, folder, place):
        self.sync.save(folder / str(place))

    def load(self, folder, place):
        if place % 2:  # after a warm-up, whose gradients are still there
            self.passed(self.net, self.rank, {}, self.number)
        self.sync.load(folder / str(place))
        self.zero("by hand", self.net, ())
        return place

    def mark(self, what, tensors):
        super().mark(what, [x.to_local() if hasattr(x, "to_local") else x for x in tensors])

    def settle(self):
        """What a script writes into the root's parameters after a forward is lost, until they are sharded again."""
        tensors_of(self.net)

    def write(self, event):
        super().write({"how": "in place"})
