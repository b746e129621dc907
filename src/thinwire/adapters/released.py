"""The end of a handle: its hooks taken out, its process groups given back."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.engine.ranks.communicator import Communicator


def released(undo: list[Callable[[], None]], comm: Communicator | None, broken: str | None) -> str | None:
    """Take all hooks out and give the process groups back. Returns why the handle cannot be used from now on."""
    for one in undo:
        one()
    undo.clear()
    if comm is None:
        return broken
    comm.close(broken=broken is not None)
    return broken or "it was closed"
