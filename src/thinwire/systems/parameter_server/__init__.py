"""Asynchronous training: a server counts iteration numbers, leaders sum, workers do not wait for the slowest.

Not here: the synchronous exchange (``engine``), virtual clocks (``planner``) and sockets (``link``).
"""

from thinwire.systems.link.hello import find_trust
from thinwire.systems.parameter_server import presets
from thinwire.systems.parameter_server.api import run, serve, serve_shard
from thinwire.systems.parameter_server.errors import NodeRefused, ServerLost, ShardLost, ShardRefused
from thinwire.systems.parameter_server.journal import Journal, replay
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.node import Node
from thinwire.systems.parameter_server.outer import DelayedNesterov
from thinwire.systems.parameter_server.presets import preset
from thinwire.systems.parameter_server.server import Server
from thinwire.systems.parameter_server.service import Service
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shard import Shard
from thinwire.systems.parameter_server.status import Status
from thinwire.systems.parameter_server.virtual import Fault, Link, simulate
from thinwire.systems.parameter_server.worker import Worker

__all__ = [
    "DelayedNesterov",
    "Fault",
    "Journal",
    "Layout",
    "Link",
    "Node",
    "NodeRefused",
    "Server",
    "ServerLost",
    "Service",
    "Settings",
    "Shard",
    "ShardLost",
    "ShardRefused",
    "Status",
    "Worker",
    "find_trust",
    "preset",
    "presets",
    "replay",
    "run",
    "serve",
    "serve_shard",
    "simulate",
]
