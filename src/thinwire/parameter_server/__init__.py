"""Asynchronous training: a server counts iteration numbers, leaders sum, workers do not wait for the slowest.

Not here: the synchronous exchange (``engine``), virtual clocks (``planner``) and sockets (``link``).
"""

from thinwire.parameter_server import presets
from thinwire.parameter_server.journal import Journal, replay
from thinwire.parameter_server.layout import Layout
from thinwire.parameter_server.node import Node
from thinwire.parameter_server.outer import DelayedNesterov
from thinwire.parameter_server.presets import preset
from thinwire.parameter_server.roster import ShardLost
from thinwire.parameter_server.scenario import Fault, Link
from thinwire.parameter_server.server import Server
from thinwire.parameter_server.service import Service
from thinwire.parameter_server.session import run, serve, serve_shard
from thinwire.parameter_server.settings import Settings
from thinwire.parameter_server.shard import Shard, ShardRefused
from thinwire.parameter_server.status import Status
from thinwire.parameter_server.virtual import simulate
from thinwire.parameter_server.worker import NodeRefused, ServerLost, Worker

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
    "preset",
    "presets",
    "replay",
    "run",
    "serve",
    "serve_shard",
    "simulate",
]
