"""``thinwire ps``: asynchronous training with a parameter server."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.words import counted
from thinwire.tools.cli.console import Output, RunFailed, watched_load
from thinwire.tools.cli.options import JsonOption, KeysOption, LinkOptions, PlotOption
from thinwire.tools.cli.verb import argument, option

if TYPE_CHECKING:
    from thinwire.systems.link.hello import Trust
    from thinwire.tools.lab import Cluster

PORT = 29400


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
        "inhad, bsp, asp, ssp, n_softsync, fedbuff, async_local_sgd, delayed_nesterov, diloco; options as in "
        "inhad:max_staleness=2:update_every=nodes.",
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
        read_settings(self)
        read_outer(self.outer)


class FleetOptions(RulesOptions):
    """Nodes of several workers, some of them slow."""

    workers: int = option(1, "Workers per node.", least=1)
    slow: list[str] | None = option(None, "NODE:FACTOR, to make that node this many times slower.")

    @property
    def machines(self) -> str:
        return f"{counted(self.nodes, 'node')} of {counted(self.workers, 'worker')}"

    @property
    def slower(self) -> dict[int, float]:
        return dict(self.pairs(self.slow, "--slow 1:4"))

    def pairs(self, words: list[str] | None, example: str) -> list[tuple[int, float]]:
        found = []
        for word in words or []:
            left, _, right = word.partition(":")
            try:
                pair = int(left), float(right)
            except ValueError:
                raise ValueError(f"{word!r} is not NODE:NUMBER; use for example {example}") from None
            if not (0 <= pair[0] < self.nodes and 0 < pair[1] < math.inf):
                raise ValueError(f"{word!r}: there are nodes 0 to {self.nodes - 1}, and the number must be above 0")
            found.append(pair)
        return found


class PsServerVerb(ListenOptions, TrainingOptions):
    """Serve a model until it has seen a number of updates or gradients, with a live table of its nodes.

    Example: thinwire ps server --model mlp --nodes 2 --updates 100
    """

    port: int = option(PORT, "Port to which nodes and shards connect.")
    nodes: int = option(1, "Nodes to wait for before sending the first weights.", least=1)
    checkpoint_every: int = option(100, "Updates between checkpoints.")

    def run(self, output: Output) -> Any:
        self.check()
        from thinwire.systems.cli.ps_work import live, make_service

        with live(f"building {self.model}", output.console.quiet) as (bar, show):
            service = make_service(
                self, **self.listening, checkpoint_every=self.checkpoint_every,
                on_status=lambda status: show(status.to_dict()),
            )  # fmt: skip
            where = f"{self.host}:{service.port}"
            bar.log(f"serving {self.model} at {where}; nodes to wait for: {self.nodes}, shards: {self.shards}")
            status = service.run().to_dict()
        output.line(_last_words(status))
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
        from thinwire.systems.cli.ps_work import run_shard

        version = run_shard(self)
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
        from thinwire.systems.cli.ps_work import run_node

        result = run_node(self)
        output.line(f"node {result['node']}: {result['end']}")
        return result

    def on_rank(self, *words: str) -> None:
        """Be a worker, in its own process."""
        from thinwire.systems.cli.ps_work import make_worker

        leader, number = words
        make_worker(self, leader, int(number)).run()


class PsRunVerb(LinkOptions, FleetOptions, TrainingOptions, PlotOption):
    """Run a server and its nodes in the lab, over emulated links, with slow nodes and kills.

    Example: thinwire ps run --nodes 4 --slow 3:4 --link 200mbit --seconds 60
    """

    model: str = "chargpt:layers=2:width=128:heads=4"
    link: str = option("unlimited", "Rate of each link: the server's, the shards', the nodes', or one for all.")
    pace: float = option(
        0.0, "Minimum seconds per step: shared cores then act like separate machines.", least=0, most=1e6
    )
    kill: list[str] | None = option(None, "NODE:SECONDS, to kill that node (kill -9) at that time; it then comes back.")
    seconds: float | None = option(None, "Stop after this many seconds of training.", above=0)
    evaluate_every: int = option(10, "Updates between evaluations of the held-out loss.", least=1)
    keys: Path | None = option(
        None, "TLS: where `thinwire keys new` made server, shard0, node0, ...; by default the run's own secret."
    )
    timeout: float = option(3600.0, "Seconds after which the whole run is stopped.")

    @property
    def cluster(self) -> Cluster:
        return self.linked(1 + self.shards + self.nodes)

    @property
    def kills(self) -> list[tuple[int, float]]:
        return self.pairs(self.kill, "--kill 2:10")

    def keys_of(self, name: str) -> Path | None:
        return None if self.keys is None else self.keys / name

    def check(self) -> None:
        super().check()
        _ = self.slower, self.kills, self.cluster  # words that these cannot read are refused here
        names = ["server", *(f"shard{i}" for i in range(self.shards)), *(f"node{i}" for i in range(self.nodes))]
        missing = [name for name in names if (own := self.keys_of(name)) and not (own / "identity.crt").is_file()]
        if missing:
            from thinwire.tools.lab.network import Network

            command = f"thinwire keys new {self.keys} --names {','.join(missing)}"
            host = f" --host {Network.address(0)}" if "server" in missing else ""
            raise ValueError(f"{self.keys} has no identity for {', '.join(missing)}: run {command}{host}")

    def run(self, output: Output) -> Any:
        self.check()
        from thinwire.systems.cli.ps_work import lab_picture, run_lab

        with watched_load(1 + self.shards + self.nodes * self.workers) as load:
            result = run_lab(self, output.console.quiet)
        losses = result["losses"]
        if self.plot is not None and not losses:
            raise RunFailed(f"{self.plot} was not drawn: {self.model} has no held-out loss")
        output.line(_last_words(result["status"]))
        if losses:
            output.line(f"held-out loss {losses[0][2]:.3f} -> {losses[-1][2]:.3f} in {losses[-1][0]:.0f} s")
            result["picture"] = lab_picture(self, result)
        output.line(f"{self.machines}, and the server: {result['note']}")
        return load.with_load(result)

    def on_rank(self, *words: str) -> None:
        """Be one process of the lab: rank 0 serves, then come the shards; the others are nodes."""
        from thinwire.systems.cli.ps_work import serve_in_lab
        from thinwire.systems.link.hello import is_loopback

        rank, address = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
        # all addresses of an emulated machine; without keys, all ranks share a lab secret
        host, server = "127.0.0.1" if is_loopback(address) else "0.0.0.0", f"{address}:{PORT}"
        index, node = rank - 1, rank - 1 - self.shards
        if rank == 0:
            serve_in_lab(self, host, PORT)
        elif node < 0:
            PsShardVerb(server=server, index=index, host=host, keys=self.keys_of(f"shard{index}")).run(Output())
        else:
            slowdown, keys = max(1.0, self.slower.get(node, 1.0)), self.keys_of(f"node{node}")
            shared = self.part(["model", "workers", "pace", "seed"])
            PsNodeVerb(server=server, node=node, slowdown=slowdown, keys=keys, **shared).run(Output())

    def __str__(self) -> str:
        ends = ((self.seconds, "s of training"), (self.updates, "updates"), (self.gradients, "gradients"))
        most = " or ".join(f"{value:g} {words}" for value, words in ends if value is not None)
        shards = f"{counted(self.shards, 'shard')}, " if self.shards else ""
        return f"a server, {shards}{self.machines}, link {self.cluster.wire}: {self.model} with {self.settings}, {most}"


class PsSimulateVerb(FleetOptions):
    """Predict what a setting would do, in virtual time, next to synchronous all-reduces on the same nodes and links.

    Example: thinwire ps simulate --nodes 16 --workers 4 --slow 0:4
    """

    step: float = option(1.0, "Median seconds of a worker's step.", above=0, most=1e6)
    spread: float = option(0.1, "Log-normal spread of a step; 0: none.", least=0, most=10)
    parameters: float = option(10.0, "Parameters of the model, in millions.", above=0, most=1e6)
    link: str = option("1gbit", "Rate of every link, such as 1gbit.")
    delay: str = option("0.5ms", "One-way delay between nodes, such as 1ms.")
    seconds: float = option(300.0, "Virtual seconds to simulate.", above=0, most=1e6)
    seed: int = option(0, "Seed of all random draws.")

    def run(self, output: Output) -> Any:
        from thinwire.systems.cli.ps_work import predict, prediction_table

        rows = predict(self)
        output.say(prediction_table(rows))
        return rows


class PsReplayVerb(JsonOption):
    """Repeat a recorded run, update by update, and print the hash of its final weights.

    Example: thinwire ps replay run.jsonl
    """

    journal: Path = argument(..., "File that --journal wrote.")
    out: Path | None = option(None, "File for the weights, in torch's format.", writes="file")

    def run(self, output: Output) -> Any:
        from thinwire.systems.cli.ps_work import replay_file

        result = replay_file(self.journal, self.out)
        output.line(f"{result['updates']} updates, weights {result['hash']}")
        return result


def _last_words(status: dict[str, Any]) -> str:
    loss = status.get("loss")
    text = (
        f"version {status['version']}, {status['gradients']} gradients in {status['seconds']:.1f} s, mean staleness "
        f"{status['mean_staleness']:.2f}, max {status['max_staleness']}, "
        f"{(status['up_bytes'] + status['down_bytes']) / 1e6:.1f} MB"
    )
    return text + (f", training loss {loss:.3f}" if loss is not None else "")


VERBS = (PsServerVerb, PsShardVerb, PsNodeVerb, PsRunVerb, PsSimulateVerb, PsReplayVerb)
