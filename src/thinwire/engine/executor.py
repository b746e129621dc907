"""Who runs the programs: threads for Gloo (``threads.py``), side streams for NCCL (``streams.py``)."""

import torch

from thinwire.engine.streams import StreamExecutor
from thinwire.engine.threads import ThreadExecutor
from thinwire.engine.wire import Wire

__all__ = ["Executor", "executor_for"]

Executor = ThreadExecutor | StreamExecutor


def executor_for(backend: str, wire: Wire, device: torch.device) -> Executor:
    """The one for tensors of this device, which ``backend`` carries."""
    return StreamExecutor(wire, device) if backend == "nccl" else ThreadExecutor(wire)
