"""``thinwire ps server``, ``shard`` and ``node``: the processes of one training, each on its machine."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.tools.cli.console import Output, RunFailed, note
from thinwire.tools.cli.options import JsonOption, KeysOption
from thinwire.tools.cli.verb import argument, option

if TYPE_CHECKING:
    from torch import Tensor, nn

    from thinwire.systems.link.hello import Trust
    from thinwire.systems.parameter_server import Node, Service, Worker

PORT = 29400
_RESTARTS = 20  # of workers of a node


class TrustOptions(KeysOption):
    """What shows that this process may take part."""

    secret_file: Path | None = option(
        None, "File with this training's secret, the same on all machines; by default THINWIRE_SECRET_FILE."
    )

    @property
    def trust(self) -> Trust:
        return self.trusted()

    def trusted(self, insecure: bool = False) -> Trust:
        from thinwire.systems.link.hello import find_trust, read_secret

        return find_trust(None if self.secret_file is None else read_secret(self.secret_file), self.keys, insecure)


class ListenOptions(TrustOptions):
    """Where this process listens, who may connect, and where its checkpoints are."""

    host: str = option("127.0.0.1", "Address to listen on; one that other machines can reach needs keys or a secret.")
    insecure: bool = option(False, "Without keys or a secret: admit anyone who reaches the port.")
    checkpoint_dir: Path | None = option(
        None,
        "Directory for checkpoints, from which it continues; of a shard, needed if the server has one.",
        writes="folder",
    )

    @property
    def listening(self) -> dict[str, Any]:
        return {"trust": self.trusted(self.insecure), **self.part(["host", "port", "checkpoint_dir"])}


class RulesOptions(JsonOption):
    """By which rules, and on how many nodes and shards, a model is trained."""

    settings: str = option(
        "inhad",
        "inhad, bsp, asp, ssp, n_softsync; of local steps local, fedbuff, async_local_sgd, delayed_nesterov, diloco; "
        "options as in inhad:max_staleness=2:update_every=nodes.",
    )
    nodes: int = option(4, "Nodes, each with a leader.", least=1)
    shards: int = option(
        0, "Shards (`ps shard`), each with a slice of the weights and its own link; 0: the server has all.", least=0
    )


class ModelOptions(JsonOption):
    model: str = option("chargpt", "chargpt, mlp, digits, ... or module:function; options as in mlp:width=512.")
    seed: int = option(0, "Seed of the initial weights.")


class TrainingOptions(RulesOptions, ModelOptions):
    """A model, its optimizer, and when its training ends."""

    outer: str = option("auto", "The server's optimizer, such as sgd:lr=0.1:momentum=0.9.")
    updates: int | None = option(None, "Stop after this many updates.", above=0)
    gradients: int | None = option(None, "Stop after this many applied gradients.", above=0)
    journal: Path | None = option(None, "File for the log of updates, for `ps replay`.", writes="file")

    def check(self) -> None:
        """Refuse impossible words before any output or process."""
        if all(end is None for end in self.part(["updates", "gradients", "seconds"]).values()):
            raise ValueError("say when to end: give --updates or --gradients")
        from thinwire.systems.cli.ps_work import read_outer, read_settings
        from thinwire.tools.bench.models.registry import check_model

        check_model(self.model)
        read_settings(self.settings, self.nodes)
        read_outer(self.outer)

    def service(self, **options: Any) -> Service:
        """Return a service for this training; ``options`` are those of :class:`Service` that are not the training's."""
        from thinwire.systems.cli.ps_work import build, read_outer, read_settings
        from thinwire.systems.parameter_server import Service

        return Service(
            build(self.model, self.seed).model, read_settings(self.settings, self.nodes), outer=read_outer(self.outer),
            outer_text=self.outer, facts=self.part(["model", "seed", "outer", "nodes"]),
            **self.part(["nodes", "shards", "updates", "gradients", "journal"]), **options,
        )  # fmt: skip


class PsServerVerb(ListenOptions, TrainingOptions):
    """Serve a model until it has seen a number of updates or gradients, with a live table of its nodes.

    Example: thinwire ps server --model mlp --nodes 2 --updates 100
    """

    port: int = option(PORT, "Port to which nodes and shards connect.")
    nodes: int = option(1, "Nodes to wait for before sending the first weights.", least=1)
    checkpoint_every: int = option(100, "Updates between checkpoints.")

    def run(self, output: Output) -> Any:
        self.check()
        from thinwire.systems.cli.ps_work import live

        with live(f"building {self.model}", output.console.quiet) as (bar, show):
            service = self.service(
                **self.listening, checkpoint_every=self.checkpoint_every,
                on_status=lambda status: show(status.to_dict()),
            )  # fmt: skip
            where = f"{self.host}:{service.port}"
            bar.log(f"serving {self.model} at {where}; nodes to wait for: {self.nodes}, shards: {self.shards}")
            status = service.run().to_dict()
        output.line(last_words(status))
        output.failure = service.saves.unsaved or ""
        return status


class PsShardVerb(ListenOptions, JsonOption):
    """Hold a slice of the weights for a server; it waits until the server starts, or starts again.

    Example: thinwire ps shard 127.0.0.1:29400 --index 0
    """

    server: str = argument(..., "host:port of the server, started with --shards.")
    index: int = option(..., "Number of the slice of the weights, from 0.", least=0)
    outer: str | None = option(None, "The optimizer; by default the server's --outer, which it publishes.")
    port: int = option(0, "Port at which nodes reach this shard; 0: a free one.")

    def run(self, output: Output) -> Any:
        import torch

        from thinwire.systems.cli.ps_work import check_server, read_outer, read_published
        from thinwire.systems.parameter_server import Shard

        torch.set_num_threads(1)
        check_server(self.server)
        made, words = (None, read_published) if self.outer is None else (read_outer(self.outer), None)
        shard = Shard(self.server, self.index, outer=made, read_outer=words, **self.listening)
        note(f"shard {self.index}, for the server at {self.server}; waits up to a minute for it")
        version = shard.run()
        output.line(f"shard {self.index}: training ended at version {version}")
        return {"index": self.index, "version": version}


class PsNodeVerb(TrustOptions, ModelOptions):
    """Work for a server: run this node's leader and its workers; workers that die are restarted.

    Example: thinwire ps node --server 127.0.0.1:29400 --model mlp
    """

    server: str = option(..., "host:port of the server.")
    node: int | None = option(None, "Number of this node; by default derived from the host's name.", least=0)
    workers: int = option(1, "Workers on this node, one process each.", least=1)
    slowdown: float = option(1.0, "Emulate: each step takes this many times longer.", least=1, most=1e6)
    pace: float = option(0.0, "Emulate: minimum seconds per step, times slowdown.", least=0, most=1e6)

    def run(self, output: Output) -> Any:
        """Run a leader with its workers: one in this process, or several in their own processes."""
        from thinwire.systems.cli.ps_work import check_server
        from thinwire.systems.parameter_server import Node
        from thinwire.systems.parameter_server.node import number_of_host
        from thinwire.tools.bench.models.registry import check_model

        number = number_of_host() if self.node is None else self.node
        asked = replace(self, node=number)
        check_server(self.server)
        check_model(self.model)
        trust = self.trust  # refuses unusable secrets or keys before any output
        children: dict[int, subprocess.Popen[bytes]] = {}
        node, result = None, {"node": number, "end": "training has ended"}
        note(f"node {number}, for the server at {self.server}; waits up to a minute for it")
        try:
            node = Node(self.server, number, self.workers, trust=trust)
            if node.settings.sync_every is not None:
                result["submissions"] = asked.local_steps(node)
            elif self.workers == 1:
                stats = asked.worker(node, 0).run()
                node.wait(5.0)
                result |= {"submissions": stats.submissions, "restarts": 0}
            else:
                result["restarts"] = asked.keep_workers(node, children)
        finally:
            if node is not None:
                node.close()
            for child in children.values():
                if child.poll() is None:
                    child.kill()
                    child.wait()
        output.line(f"node {number}: {result['end']}")
        return result

    def keep_workers(self, node: Node, children: dict[int, subprocess.Popen[bytes]]) -> int:
        """Start the workers, and those that die again, until training has ended; return the number of restarts."""
        restarts = -self.workers
        while not node.wait(0.2):
            for k in range(self.workers):
                if k not in children or children[k].poll() is not None:
                    restarts += 1
                    if restarts > _RESTARTS:
                        raise RunFailed(f"workers of node {self.node} died {restarts} times; see their output above")
                    command = self.rank_command(node.address, str(k))
                    children[k] = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        until = time.monotonic() + 10.0
        while time.monotonic() < until and any(child.poll() is None for child in children.values()):
            time.sleep(0.05)
        return restarts

    def on_rank(self, *words: str) -> None:
        """Be a worker, in its own process."""
        leader, number = words
        self.worker(leader, int(number)).run()

    def local_steps(self, node: Node) -> int:
        """Train by local steps, in the loop that a user would write, until training has ended; return the rounds."""
        from thinwire.engine.attach import listed
        from thinwire.systems.cli.ps_work import build, rank_of
        from thinwire.systems.parameter_server.attached import joined

        if self.workers > 1:
            raise ValueError("local steps have one worker on each node: leave out --workers, and start more nodes")
        workload, rank = build(self.model, self.seed), rank_of(node.leader.node, 0)
        optimizers = listed(workload.optimizer(workload.model))
        with joined(workload.model, optimizers, node) as sync:
            for batch, _ in enumerate(sync.steps()):
                began = time.monotonic()
                workload.loss(workload.model, batch, rank).backward()
                took = time.monotonic() - began
                time.sleep(max(0.0, self.slowdown * max(took, self.pace) - took))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            sync.finish()
            return sync.rounds

    def worker(self, leader: Node | str, number: int) -> Worker:
        from thinwire.systems.cli.ps_work import build, rank_of
        from thinwire.systems.parameter_server import Worker

        workload, node = build(self.model, self.seed), self.node
        assert node is not None

        def loss(network: nn.Module, step: int) -> Tensor:
            return workload.loss(network, step, rank_of(node, number))

        return Worker(
            workload.model, lambda step: step, loss, leader, number, slowdown=self.slowdown, pace_seconds=self.pace,
            trust=self.trust,
        )  # fmt: skip


def last_words(status: dict[str, Any]) -> str:
    loss = status.get("loss")
    text = (
        f"version {status['version']}, {status['gradients']} gradients in {status['seconds']:.1f} s, mean staleness "
        f"{status['mean_staleness']:.2f}, max {status['max_staleness']}, "
        f"{(status['up_bytes'] + status['down_bytes']) / 1e6:.1f} MB"
    )
    return text + (f", training loss {loss:.3f}" if loss is not None else "")
