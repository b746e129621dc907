"""Shards of ``thinwire ps``: the process of one, and what their server may end with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.errors import RunFailed

if TYPE_CHECKING:
    from thinwire.parameter_server import Service, Status
    from thinwire.parameter_server.outer import Outer


def check_shards(shards: int) -> None:
    """Refuse a number that cannot be."""
    if shards < 0:
        raise ValueError(f"--shards {shards} must be at least 0")


def served(service: Service) -> Status:
    """Serve to the end.

    Raises:
        RunFailed: a shard has gone.
    """
    from thinwire.parameter_server import ShardLost

    try:
        return service.run()
    except ShardLost as error:
        raise RunFailed(str(error)) from error


def run_shard(server: str, index: int, outer: str | None, port: int, checkpoint_dir: Path | None) -> dict[str, Any]:
    """One shard, to the end of the training.

    Raises:
        ValueError: words that cannot be, or a checkpoint that is not the server's.
        RunFailed: the server has gone, or does not take this shard in.
    """
    import torch

    from thinwire.cli.ps_work import read_outer
    from thinwire.collectives.pair import PairError
    from thinwire.parameter_server import ServerLost, Shard, ShardRefused

    torch.set_num_threads(1)
    if index < 0:
        raise ValueError(f"--index {index} must be at least 0")
    made = None if outer is None else read_outer(outer)
    words = _published if outer is None else None
    try:
        shard = Shard(server, index, outer=made, read_outer=words, checkpoint_dir=checkpoint_dir, port=port)
        return {"index": index, "version": shard.run()}
    except (PairError, ServerLost, ShardRefused) as error:
        raise RunFailed(str(error)) from error


def _published(words: str) -> Outer | None:
    """The optimizer of a server's words."""
    from thinwire.cli.ps_work import read_outer

    if not words:
        raise ValueError("the server's optimizer was made in Python: give --outer, or use parameter_server.serve_shard")
    return read_outer(words)
