"""The language of programs: ops, methods, and LocalWorld, which runs a method for N ranks in one process.

Not here: real communication (core/collectives/, engine/), and particular methods (core/methods/).
"""

from thinwire.core.program.bucket import Bucket, Slot, working_dtype
from thinwire.core.program.local_world import LocalWorld, OrderError
from thinwire.core.program.method import Method, Shapes
from thinwire.core.program.ops import (
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
from thinwire.core.program.plan import Plan, PlanBucket
from thinwire.core.program.state import State
from thinwire.core.program.topology import Topology

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
    "Shapes",
    "Slot",
    "State",
    "Topology",
    "working_dtype",
]
