"""Calls back once when a backward pass has ended. The only file that touches autograd's private interface.

Under reentrant activation checkpointing a backward runs inside a backward, each with its own end. Whoever asks is told
once, at the end of the outermost: tasks are noted by the parameters' hooks and, since a re-run forward inside backward
belongs to the outer task, by the modules' forward hooks too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that this thread is in; -1 outside."""


class BackwardEnd:
    """Watches the backward passes of one model.

    Args:
        callback: called at the end of the outermost pass in which ``note`` was called.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._open: set[int] = set()

    def note(self) -> None:
        """Something of ours ran inside a backward pass: make sure that its end is noticed."""
        task = current_task()
        if task == -1 or task in self._open:
            return
        self._open.add(task)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._ended(task))

    def _ended(self, task: int) -> None:
        self._open.discard(task)
        self._open = {t for t in self._open if t < task}  # inner passes that died with an exception never call back
        if not self._open:
            self._callback()

    def outside(self) -> bool:
        """Called from a forward hook. True if no pass runs, yet one was noted: it died with an exception."""
        died = bool(self._open) and current_task() == -1
        if died:
            self._open.clear()
        return died
