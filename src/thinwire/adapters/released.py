"""Closing a handle: remove its hooks and return its process groups."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.engine.ranks.communicator import Communicator


def released(undo: list[Callable[[], None]], comm: Communicator | None, broken: str | None) -> str | None:
    """Remove all hooks and return the process groups. Return why the handle can no longer be used."""
    for one in undo:
        one()
    undo.clear()
    if comm is None:
        return broken
    comm.close(broken=broken is not None)
    return broken or "it was closed"
