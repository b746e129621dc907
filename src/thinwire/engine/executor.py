"""Who runs the programs: threads for Gloo (``threads.py``), a side stream for NCCL (``streams.py``)."""

from thinwire.engine.streams import StreamExecutor
from thinwire.engine.threads import ThreadExecutor

__all__ = ["Executor", "StreamExecutor", "ThreadExecutor"]

Executor = ThreadExecutor | StreamExecutor
