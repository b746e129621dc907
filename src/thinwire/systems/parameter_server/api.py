"""What a training script calls: ``serve`` in one process, ``run`` in every worker, ``serve_shard`` in each shard."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.core.checks import check_choice
from thinwire.core.collectives.groups import backends_to_ask_for
from thinwire.core.program import AllReduce, Broadcast, Program
from thinwire.core.tls import Credentials
from thinwire.engine.attach import attach
from thinwire.engine.services import Services
from thinwire.predict.measure.profile_model import Batches, Loss, numbered
from thinwire.systems.link.hello import find_trust
from thinwire.systems.link.listener import split_address
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.node import Node, number_of_host
from thinwire.systems.parameter_server.outer import Outer
from thinwire.systems.parameter_server.presets import inhad
from thinwire.systems.parameter_server.service import Service
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shard import Shard
from thinwire.systems.parameter_server.status import Status
from thinwire.systems.parameter_server.worker import Worker, WorkerStats, local_gradient

DEFAULT_PORT = 29400
_LATE_SECONDS = 60.0
_END = -1


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
        model, settings or inhad(), port=port, host=host, trust=find_trust(secret, keys, insecure), outer=outer,
        shards=shards, updates=updates, gradients=gradients, checkpoint_dir=checkpoint_dir, journal=journal,
        on_status=on_status,
    )  # fmt: skip
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
    """Hold one slice of the weights of a model that :func:`serve` serves; return the version of the final ones.

    Args:
        server: ``host:port``.
        index: number of the slice, from 0.
        outer: as the server's; it must treat each element separately, as SGD and Adam do.
        checkpoint_dir: directory; needed if the server has one.
        port: where nodes find this shard; 0 chooses a free one.
        host, secret, keys, insecure: as for :func:`serve`; the same secret, or keys of the same authority.

    Raises:
        ValueError: the server has no such shard, or the checkpoint is not the one that the server continues from.
        ShardRefused: the server refuses this shard.
        ServerLost: the server has gone and did not come back within six leases.
        PairError: the port is taken.
    """
    shard = Shard(
        server, index, outer=outer, checkpoint_dir=checkpoint_dir, port=port, host=host,
        trust=find_trust(secret, keys, insecure),
    )  # fmt: skip
    return shard.run()


def run(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    *,
    server: str,
    node_id: int | None = None,
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
        secret, keys: as for :func:`serve`; the same secret, or keys of the same authority.
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
    check_choice("intra_node", intra_node, ("leader", "collectives"))
    trust = find_trust(secret, keys)
    options: dict[str, Any] = {"slowdown": slowdown, "pace_seconds": pace_seconds, "trust": trust}
    local, workers = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    port = int(os.environ.get("MASTER_PORT", str(DEFAULT_PORT))) + 1
    number = _node_number() if node_id is None else node_id

    def lead(members: int, **more: Any) -> WorkerStats:
        """Run the worker in the process of its leader."""
        node = Node(server, number, members, port=port if members > 1 else 0, trust=trust)
        try:
            stats = Worker(model, batches, loss, node, 0, **options, **more).run()
            node.wait(5.0)
            node.wait_for_stragglers(_LATE_SECONDS)
        finally:
            node.close()
        return stats

    if intra_node == "collectives" and workers > 1:
        return _together(model, batches, loss, local, lambda gradient: lead(1, gradient=gradient))
    if local:
        return Worker(model, batches, loss, f"127.0.0.1:{port}", local, **options).run()
    return lead(workers)


def _node_number() -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return int(os.environ.get("GROUP_RANK", "0"))
    return number_of_host()


def _together(
    model: nn.Module, batches: Batches, loss: Loss, local: int, lead: Callable[[Any], WorkerStats]
) -> WorkerStats:
    """Run one rank of a node whose ranks compute each gradient together; ``lead``: gradient -> statistics."""
    made = not dist.is_initialized()
    if made:
        dist.init_process_group(backends_to_ask_for(next(model.parameters()).device))
    unused = torch.optim.SGD(model.parameters(), lr=0.0)  # the server makes the steps
    sync = attach(model, unused, "ssgd")
    together = NodeMean(model, batches, loss, sync.services)
    try:
        with sync.no_sync():
            if local:
                count, version = together.follow()
                return WorkerStats(steps=count, version=version)
            version = _END
            try:
                stats = lead(together.gradient)
                version = stats.version
            finally:
                together.end(version)
            return stats
    finally:
        sync.close()
        if made:
            dist.destroy_process_group()


class NodeMean:
    """One rank of a node whose ranks compute each gradient together; the mean over them is one submission.

    The leader knows only rank 0 as a worker; the others do what it announces. ``ranks``: of a GradientSync whose own
    exchange during backward is off (``no_sync``).

    Differences from InHAD's local aggregator, of which only the abstract is public: the ranks of a node work in step,
    and the mean is taken over the whole gradient after backward.
    """

    def __init__(self, model: nn.Module, batches: Batches, loss: Loss, ranks: Services) -> None:
        self._model, self._ranks, self._layout = model, ranks, Layout.of(model)
        self._gradient = partial(local_gradient, model, self._layout, numbered(batches), loss)
        self._size = ranks.topology.world_size
        self._device = next(model.parameters()).device

    def gradient(self, theta: Tensor, batch: int) -> tuple[Tensor, float, int]:
        """On rank 0: return the mean gradient ``[D]`` at ``theta`` ``[D]``, the mean loss, and the sum of samples."""
        self._ranks.run(self.announce(theta, batch, 0))
        return self._together(theta, batch)

    def end(self, version: int) -> None:
        """On rank 0: announce the end; all ranks take its weights and buffers."""
        self._ranks.run(self.announce(self._layout.flat(self._model), _END, version))
        self._ranks.run(self.share_buffers())

    def follow(self) -> tuple[int, int]:
        """On another rank: compute what rank 0 announces, until the end; return the gradients and the version."""
        count = 0
        while True:
            theta, batch, version = self._ranks.run(self.announce(None, 0, 0))
            if batch == _END:
                self._layout.write(theta, self._model)
                self._ranks.run(self.share_buffers())
                return count, version
            self._together(theta, batch)
            count += 1

    def announce(self, theta: Tensor | None, batch: int, version: int) -> Program:
        """Broadcast the weights and the number of the next batch from rank 0. Returns (weights, batch, version)."""
        header = yield Broadcast(torch.tensor([batch, version], device=self._device))
        room = torch.empty(self._layout.numel, dtype=self._layout.dtype) if theta is None else theta.clone()
        weights = yield Broadcast(room.to(self._device))
        batch, version = header.tolist()
        return weights, batch, version

    def mean(self, flat: Tensor, loss: float, samples: int) -> Program:
        total = yield AllReduce(torch.cat([flat, flat.new_tensor([loss, samples])]))
        gradient, (loss_sum, all_samples) = total[:-2] / self._size, total[-2:].tolist()
        return gradient, loss_sum / self._size, round(all_samples)

    def share_buffers(self) -> Program:
        layout = self._layout.buffers
        if layout.numel:
            flat = yield Broadcast(layout.flat(self._model))
            layout.write(flat, self._model)

    def _together(self, theta: Tensor, batch: int) -> tuple[Tensor, float, int]:
        gradient, loss, samples = self._ranks.run(self.mean(*self._gradient(theta, batch)))
        return gradient, loss, samples
