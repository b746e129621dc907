"""Local steps through a server: the user's own loop hands in by how much its steps have changed the weights.

A member computes from the weights theta of version v. After its share of the H steps it hands in theta minus its
weights, and waits for the next weights: the server's plus the mean change. Without a server it trains alone, and its
next change is that of all steps since v. Weights that have come meanwhile, of version w, say where that change counts:
there by the factor alpha(w - v) of its age.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.checks import check_number
from thinwire.core.program import Topology
from thinwire.core.tls import Credentials
from thinwire.engine.attach import attach_local, check_model, listed
from thinwire.engine.backward_hooks import AttachSettings
from thinwire.engine.local.settings import Local
from thinwire.engine.local.sync import LocalSync
from thinwire.engine.parameters import check_optimizers, managed_parameters
from thinwire.engine.services import CheckedState
from thinwire.engine.stats import Stats
from thinwire.systems.link.hello import find_trust
from thinwire.systems.parameter_server.errors import ServerLost
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.messages import Buffers, Result, Stop, Work
from thinwire.systems.parameter_server.node import Node, number_of_host
from thinwire.systems.parameter_server.settings import alpha

logger = logging.getLogger("thinwire")
_LOOK_SECONDS = 0.1  # between two looks whether the server is still there
_UNENDING = 1 << 62


class ServerSync(LocalSync):
    """Local steps of one member of a server. Made by ``attach(model, optimizer, "local", server=...)``.

    Attributes:
        over: whether the training has ended, or the server is lost for good: nothing more is handed in.
    """

    _period = 1

    def __init__(self, *made: Any, node: Node) -> None:
        super().__init__(*made)
        self._node, self._layout, self._model = node, node.layout, self.services.model
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._work: Work | None = None  # to be answered
        self._theta = self._newest = self._layout.flat(self._model)
        self._version = -1
        self._buffers: Tensor | None = None
        self._made = self._alone = 0  # steps since the last weights; of these, the periods that nobody knows of
        self._seconds = self._began = 0.0
        self.over = self._told = False
        self._leader = node.enter(0, self._inbox.put)
        atexit.register(node.close)  # a script may not close, and Python must not end under the node's threads
        self._receive()
        if self._version < 0:
            self.close()
            raise node.failure or ServerLost("the server has gone before it had sent its weights")

    # --- rounds --------------------------------------------------------------------------------------------------

    def _counted(self) -> None:
        super()._counted()
        self._made += 1
        if self.over and not self._told:
            self._told = True
            logger.warning(
                "thinwire: the server's training has ended, and steps from here on change this model alone: take the "
                "loop's steps from sync.steps()"
            )
        if not self.over and self._made >= (1 + self._alone) * self.period:
            self._round()

    @property
    def period(self) -> int:
        """Optimizer steps of this member in a round."""
        return self._period

    def _round(self) -> None:
        Layout.of(self._model).check(self._layout)  # a script may have frozen something since
        settings, own = self._node.settings, self._layout.flat(self._model)
        while not self._inbox.empty():
            self._note(self._inbox.get())
        if (work := self._work) is not None and not self.over:
            change = (self._theta - own).mul_(alpha(settings.alpha, max(0, work.version - self._version))).cpu()
            if settings.buffers == "average" and self._layout.buffers.numel:
                self._leader.post(Buffers(0, self._layout.buffers.flat(self._model).cpu()))
            seconds = (time.monotonic() - self._began) / max(1, self._made)
            tensor = change if bool(change.isfinite().all()) else None
            self._leader.post(Result(work.token, self._made, 0.0, seconds, tensor))
            self._work = None
        self._receive()

    def _receive(self) -> None:
        """Take the next weights, or none if the server has gone."""
        since = time.monotonic()
        while self._work is None and not self.over:
            try:
                self._note(self._inbox.get(timeout=_LOOK_SECONDS))
            except queue.Empty:
                if self._version >= 0 and not self._node.connected:
                    if not self._alone:
                        text = "thinwire: the server has gone: training goes on alone until it is back, for up to %g s"
                        logger.warning(text, self._node.patience)
                    self._alone += 1
                    return
        now = time.monotonic()
        self._seconds += now - since
        if self._work is not None and not self.over:
            self._theta, self._version = self._newest, self._work.version
            self._write()
            self._made, self._alone, self._began, self._period = 0, 0, now, self._work.steps

    def _note(self, message: Any) -> None:
        if isinstance(message, Work):
            self._work = message
            if message.tensor is not None:
                self._newest = self._layout.read(message.tensor).to(self.services.device)
        elif isinstance(message, Buffers):  # comes before the STOP
            self._buffers = self._layout.buffers.read(message.tensor)
        elif isinstance(message, Stop):
            self.over = True
            if message.version < 0 <= self._version:
                logger.warning(
                    "thinwire: %s; sync.steps() ends, and the model holds what this member has trained alone",
                    self._node.failure or "its node was closed",
                )
            elif message.tensor is not None:
                self._theta = self._layout.read(message.tensor).to(self.services.device)
                self._version = message.version
                self._write()

    def _write(self) -> None:
        self._layout.write(self._theta, self._model)
        if self._buffers is not None:
            self._layout.buffers.write(self._buffers, self._model)

    # --- what users call -----------------------------------------------------------------------------------------

    def steps(self, total: int | None = None) -> Iterator[int]:
        """Count the common steps, to ``total`` or until the server ends: ``for step in sync.steps()``.

        A member of half the speed sees 0, 2, 4 ... Each turn of the loop makes an optimizer step.
        """
        return super().steps(total or self._node.updates * self._node.settings.steps or _UNENDING)

    @property
    def _number(self) -> int:
        if self.over:
            return _UNENDING
        steps = self._node.settings.steps
        return self._version * steps + self._made * steps // self.period

    @property
    def rounds(self) -> int:
        """The version of the last weights: how many rounds the server has made."""
        return self._version

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Put the server's weights of this round into the model temporarily: to evaluate or to save."""
        own, lent, self._lent = self._layout.flat(self._model), self._lent, True
        try:
            self._layout.write(self._theta, self._model)
            yield
        finally:
            self._layout.write(own, self._model)
            self._lent = lent

    def finish(self) -> None:
        """Hand in what has not been handed in, and take the weights of the round in which it counts.

        If the server has gone, a warning says so, and the model keeps its own weights.
        """
        self._check_own("finish()")
        if not self.over and self._made:
            self._round()
        if self._alone and not self.over:
            logger.warning("thinwire: the server has gone without the last %d steps, which the model holds", self._made)

    def stats(self) -> Stats:
        """Return counters since ``attach``; ``steps`` are the optimizer's."""
        every = self._node.settings.steps
        note = (
            f"{self._version} rounds of the server, every {every} steps; own pace: {self.period} of {every} steps here"
        )
        sent = self._node.sent_bytes
        return dataclasses.replace(super().stats(), note=note, bytes_sent=sent, exposed_seconds=self._seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside the optimizer: nothing, because the weights are the server's."""
        return {"method": "local", "world_size": 1, "rank": 0, "rounds": self._version}

    def _fitting(self, state: Mapping[str, Any]) -> CheckedState:
        return CheckedState(lambda: lambda: None, self._write)  # in place of the weights that were loaded

    def close(self) -> None:
        """Remove the hooks, and leave the server, which goes on without this member. Idempotent."""
        super().close()
        self._leader.close()
        self._node.close()
        atexit.unregister(self._node.close)


def attach_to_server(
    model: nn.Module,
    optimizer: Any,
    method: str = "local",
    *,
    server: str,
    keys: str | Path | Credentials | None = None,
    secret: str | bytes | None = None,
    node: int | None = None,
    patience: float = 60.0,
    **options: Any,
) -> ServerSync:
    """What ``attach(model, optimizer, "local", server=...)`` does: join a server's training, from a loop of one's own.

    Waits for the server's first weights, which replace the model's.

    Args:
        server: ``host:port`` of ``thinwire ps server --settings local``, whose settings say how many steps make a
            round, and in which code changes travel.
        keys: directory of this machine's identity; secret: of the training, if it has no keys (:func:`find_trust`).
        node: number of this member, different on every one; by default made from the host's name and torchrun's rank.
        patience: seconds for which it trains alone when the server has gone.

    Raises:
        ValueError: there are other options, or the server expects gradients.
        LayoutMismatch: the server's model is different.
        ServerLost, NodeRefused: nobody is at that address, or it does not let this machine in.
    """
    if method != "local" or options:
        names = ", ".join(options) or f"method {method!r}"
        raise ValueError(
            f'server= goes with "local" alone; the server has the other settings: leave out {names}, and start it with '
            "`thinwire ps server --settings local:sync_every=16:codec=int8`"
        )
    check_model(model)
    check_number("patience", patience, least=0)
    optimizers = listed(optimizer)
    number = number_of_host(os.environ.get("RANK", "")) if node is None else node
    found = Node(server, number, 1, trust=find_trust(secret, keys), patience=patience)
    try:
        return joined(model, optimizers, found)
    except BaseException:
        found.close()
        raise


def joined(model: nn.Module, optimizers: list[torch.optim.Optimizer], node: Node) -> ServerSync:
    """Return the handle of a model whose training joins that of a node's server."""
    every = node.settings.sync_every
    if every is None:
        raise ValueError("the server adds up gradients: use parameter_server.run, or start it with --settings local")
    Layout.of(model).check(node.layout)
    local = Local(sync_every=every, codec=None)
    managed = managed_parameters(model, local.method, "auto")
    check_optimizers(managed, optimizers)
    handle = partial(ServerSync, node=node)
    return attach_local(model, optimizers, local, managed, None, Topology(1), AttachSettings(), handle)
