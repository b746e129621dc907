"""How a process of a parameter server's training ends, if not with the training."""

from __future__ import annotations


class ServerLost(RuntimeError):
    """No server or leader answered for six leases."""


class NodeRefused(RuntimeError):
    """The server refuses this node."""


class ShardRefused(RuntimeError):
    """The server refuses this shard."""


class ShardLost(RuntimeError):
    """A shard has gone, and with it a part of the weights."""
