"""The language: the ops, what a method is, and LocalWorld, which runs it for N ranks in one process.

What does not live here: any real communication (collectives/, engine/), and any particular method (methods/).
"""

from thinwire.program.bucket import Bucket, Slot, working_dtype
from thinwire.program.local_world import LocalWorld
from thinwire.program.lockstep import OrderError
from thinwire.program.method import Method
from thinwire.program.ops import (
    CROSS,
    NODE,
    WORLD,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    NextForward,
    Op,
    Program,
    ReduceScatter,
    Scope,
)
from thinwire.program.plan import Plan, PlanBucket
from thinwire.program.state import State
from thinwire.program.topology import Topology

__all__ = [
    "CROSS",
    "NODE",
    "WORLD",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Bucket",
    "Collective",
    "Exchange",
    "LocalWorld",
    "Method",
    "NextForward",
    "Op",
    "OrderError",
    "Plan",
    "PlanBucket",
    "Program",
    "ReduceScatter",
    "Scope",
    "Slot",
    "State",
    "Topology",
    "working_dtype",
]
