"""Call back once when a backward pass has ended. The only file that uses autograd's private interface.

Under reentrant activation checkpointing, backwards run inside a backward, each with its own end. The callback runs
once, at the end of the outermost. The parameters' hooks note the backward passes. So do the modules' forward hooks,
because a forward that is rerun inside backward belongs to the outer pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that this thread is in; -1 outside."""


class BackwardEnd:
    """Watches the backward passes of one model.

    Args:
        callback: called at the end of the outermost pass in which ``note`` was called.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._open: set[int] = set()

    def note(self) -> None:
        """Make sure that the end of the current backward pass is noticed; called from hooks that run inside it."""
        task = current_task()
        if task == -1 or task in self._open:
            return
        self._open.add(task)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._ended(task))

    def _ended(self, task: int) -> None:
        self._open.discard(task)
        self._open = {t for t in self._open if t < task}  # inner passes that ended with an exception never call back
        if not self._open:
            self._callback()

    def outside(self) -> bool:
        """Return True if no pass is running although one was noted: it ended with an exception. For forward hooks."""
        died = bool(self._open) and current_task() == -1
        if died:
            self._open.clear()
        return died
