"""The language of programs: ops, methods, and LocalWorld, which runs a method for N ranks in one process.

Not here: real communication (collectives/, engine/), and particular methods (methods/).
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
