"""What a training script calls: ``serve`` in one process, ``run`` in every worker, ``serve_shard`` in each shard."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.core.collectives.groups import backends_to_ask_for
from thinwire.engine.attach import attach
from thinwire.predict.measure.profile_model import Batches, Loss
from thinwire.systems.link.meeting import split_address
from thinwire.systems.link.tls import Credentials
from thinwire.systems.parameter_server.node import Node
from thinwire.systems.parameter_server.node_mean import NodeMean
from thinwire.systems.parameter_server.outer import Outer
from thinwire.systems.parameter_server.presets import inhad
from thinwire.systems.parameter_server.service import Service
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shard import Shard
from thinwire.systems.parameter_server.status import Status
from thinwire.systems.parameter_server.worker import Worker, WorkerStats

DEFAULT_PORT = 29400
_LATE_SECONDS = 60.0
_Work = tuple[nn.Module, Batches, Loss]
_Trust = dict[str, Any]  # ``secret`` and ``keys``, as the caller gave them


def serve(
    model: nn.Module,
    *,
    settings: Settings | None = None,
    port: int = DEFAULT_PORT,
    host: str = "127.0.0.1",
    secret: str | bytes | None = None,
    keys: str | Path | Credentials | None = None,
    insecure: bool = False,
    outer: Outer | None = None,
    shards: int = 0,
    updates: int | None = None,
    gradients: int | None = None,
    checkpoint_dir: str | Path | None = None,
    journal: str | Path | None = None,
    on_status: Callable[[Status], None] | None = None,
) -> Status:
    """Serve a model for a number of updates or applied gradients; ``model`` then holds the final weights.

    Args:
        settings: of a preset; by default :func:`presets.inhad`.
        host: the address to listen at. One that other machines reach needs ``keys``, ``secret``, or ``insecure``.
        secret: every node and shard must know it; at least 16 bytes; by default the content of the file that the
            variable ``THINWIRE_SECRET_FILE`` names.
        keys: directory of this machine's identity, as written by ``thinwire keys new``, instead of a secret: every node
            and shard then shows a certificate of the same authority, and all connections are encrypted.
        insecure: let in everybody who reaches the port.
        outer: makes the optimizer of the flat weights, ``lambda params: torch.optim.SGD(params, lr=0.1)``.
        shards: k processes hold one slice of the weights each, and this process only decides; nodes wait until
            :func:`serve_shard` was called k times. 0: this process holds all weights.
        checkpoint_dir: directory; if it holds a checkpoint, the server continues from it.
        journal: file for the log of updates.
        on_status: called twice a second.

    Raises:
        ValueError: neither ``updates`` nor ``gradients`` is given, the checkpoint is of another model, or strangers
            could connect.
        PairError: the port is taken.
        ShardLost: a shard has gone.
    """
    if updates is None and gradients is None:
        raise ValueError("say when to end: give updates or gradients")
    service = Service(
        model,
        settings or inhad(),
        port=port,
        host=host,
        secret=secret,
        keys=keys,
        insecure=insecure,
        outer=outer,
        shards=shards,
        updates=updates,
        gradients=gradients,
        checkpoint_dir=checkpoint_dir,
        journal=journal,
        on_status=on_status,
    )
    return service.run()


def serve_shard(
    server: str,
    *,
    index: int,
    outer: Outer | None = None,
    checkpoint_dir: str | Path | None = None,
    port: int = 0,
    host: str = "127.0.0.1",
    secret: str | bytes | None = None,
    keys: str | Path | Credentials | None = None,
    insecure: bool = False,
) -> int:
    """Hold one slice of the weights of a model that :func:`serve` serves with ``shards``, until training ends.

    Args:
        server: ``host:port``.
        index: number of the slice, from 0.
        outer: as the server's; it must treat each element separately, as SGD and Adam do.
        checkpoint_dir: directory; needed if the server has one.
        port: where nodes find this shard; 0 chooses a free one.
        host: the address to listen at, as for :func:`serve`.
        secret: the server's; by default the content of the file that ``THINWIRE_SECRET_FILE`` names.
        keys: directory of this machine's identity, if the server uses keys.
        insecure: let in everybody who reaches the port.

    Returns:
        The version of the final weights.

    Raises:
        ValueError: the server has no such shard, or the checkpoint is not the one that the server continues from.
        ShardRefused: the server refuses this shard.
        ServerLost: the server has gone and did not come back within six leases.
        PairError: the port is taken.
    """
    shard = Shard(
        server,
        index,
        outer=outer,
        checkpoint_dir=checkpoint_dir,
        port=port,
        host=host,
        secret=secret,
        keys=keys,
        insecure=insecure,
    )
    return shard.run()


def run(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    *,
    server: str,
    node_id: int | None = None,
    leader_port: int | None = None,
    secret: str | bytes | None = None,
    keys: str | Path | Credentials | None = None,
    slowdown: float = 1.0,
    pace_seconds: float = 0.0,
    intra_node: str = "leader",
) -> WorkerStats:
    """Train as a worker until the server ends the training; ``model`` then holds the server's final weights.

    Every worker of a node calls this, under torchrun or alone. Each node has its own torchrun (``--nnodes 1``), so that
    the death of one node ends no other. Local rank 0 is also the node's leader.

    Args:
        batches: number -> this worker's batch of that number; or an iterable, which restarts when it is exhausted.
        loss: (model, batch) -> mean loss.
        server: ``host:port``.
        node_id: number of this node, different on every node; by default torchrun's, or one made from the host name. A
            second process with the number of a node at work is refused.
        leader_port: on this machine's loopback; by default torchrun's master port + 1.
        secret: the server's; by default the content of the file that ``THINWIRE_SECRET_FILE`` names.
        keys: directory of this machine's identity, if the server uses keys.
        slowdown, pace_seconds: emulate other machines, see :class:`Worker`.
        intra_node: how the workers of a node work together. "leader": each takes weights from the leader and hands in
            its own gradients. "collectives": all compute each gradient together, and its mean over them, by all-reduce,
            is one submission (see :class:`NodeMean`); the node then counts as one worker.

    Raises:
        ValueError: an address or an option is invalid.
        ServerLost: the server has gone and did not come back within six leases.
        NodeRefused: another process works with this node's number, or the server requires another secret, or keys.
        LayoutMismatch: the server's model is different.
    """
    split_address(server)
    trust: _Trust = {"secret": secret, "keys": keys}
    local = int(os.environ.get("LOCAL_RANK", "0"))
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    port = leader_port or int(os.environ.get("MASTER_PORT", str(DEFAULT_PORT))) + 1
    work = (model, batches, loss)
    if intra_node not in ("leader", "collectives"):
        raise ValueError(f'intra_node={intra_node!r} is unknown; use "leader" or "collectives"')
    number = _node_number() if node_id is None else node_id
    if intra_node == "collectives" and workers > 1:
        return _together(work, server, number, local, slowdown, pace_seconds, trust)
    if local:
        return Worker(*work, f"127.0.0.1:{port}", local, slowdown=slowdown, pace_seconds=pace_seconds, **trust).run()
    node = Node(server, number, workers, port=port if workers > 1 else 0, **trust)
    return _lead(node, work, slowdown, pace_seconds, trust)


def _lead(
    node: Node, work: _Work, slowdown: float, pace: float, trust: _Trust, together: NodeMean | None = None
) -> WorkerStats:
    """Run the worker in the process of its leader."""
    try:
        gradient = together.gradient if together is not None else None
        worker = Worker(
            *work, node.address, 0, slowdown=slowdown, pace_seconds=pace, gradient=gradient,
            check=lambda: node.wait(0), **trust,
        )  # fmt: skip
        stats = worker.run()
        node.wait(5.0)
        node.see_off(_LATE_SECONDS)
    finally:
        node.close()
    return stats


def _together(
    work: _Work, server: str, number: int, local: int, slowdown: float, pace: float, trust: _Trust
) -> WorkerStats:
    """Run one rank of a node whose ranks compute each gradient together."""
    model, made = work[0], not dist.is_initialized()
    if made:
        dist.init_process_group(backends_to_ask_for(next(model.parameters()).device))
    unused = torch.optim.SGD(model.parameters(), lr=0.0)  # the server makes the steps
    sync = attach(model, unused, "ssgd")
    together = NodeMean(*work, sync.services)
    try:
        with sync.no_sync():
            if local:
                count, version = together.follow()
                return WorkerStats(steps=count, version=version)
            version = -1
            try:
                stats = _lead(Node(server, number, 1, **trust), work, slowdown, pace, trust, together)
                version = stats.version
            finally:
                together.end(version)
            return stats
    finally:
        sync.close()
        if made:
            dist.destroy_process_group()


def _node_number() -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return int(os.environ.get("GROUP_RANK", "0"))
    return zlib.crc32(socket.gethostname().encode()) & 0xFFFF
