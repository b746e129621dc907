"""``thinwire ps``: asynchronous training with a parameter server; here in the lab, in virtual time, and repeated."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.events import LastWords, event_in, tell_event
from thinwire.core.words import counted
from thinwire.systems.cli.ps_machines import (
    PORT,
    PsNodeVerb,
    PsServerVerb,
    PsShardVerb,
    RulesOptions,
    TrainingOptions,
    last_words,
)
from thinwire.tools import lab
from thinwire.tools.cli.console import Output, RunFailed, watched_load
from thinwire.tools.cli.options import JsonOption, LinkOptions, PlotOption, numbered
from thinwire.tools.cli.verb import argument, option

if TYPE_CHECKING:
    from thinwire.systems.parameter_server import Status
    from thinwire.tools.pictures import Picture

_AWAY_SECONDS = 1.0  # between a node's death and its return


class FleetOptions(RulesOptions):
    """Nodes of several workers, some of them slow."""

    workers: int = option(1, "Workers per node.", least=1)
    slow: list[str] | None = option(None, "NODE:FACTOR, to make that node this many times slower.")

    @property
    def machines(self) -> str:
        return f"{counted(self.nodes, 'node')} of {counted(self.workers, 'worker')}"

    @property
    def slower(self) -> dict[int, float]:
        return dict(numbered(self.slow, self.nodes, "NODE", "--slow 1:4"))


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
    def cluster(self) -> lab.Cluster:
        return self.linked(1 + self.shards + self.nodes)

    @property
    def kills(self) -> list[tuple[int, float]]:
        return numbered(self.kill, self.nodes, "NODE", "--kill 2:10")

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
        with watched_load(1 + self.shards + self.nodes * self.workers) as load:
            result = run_lab(self, output.console.quiet)
        losses = result["losses"]
        if self.plot is not None and not losses:
            raise RunFailed(f"{self.plot} was not drawn: {self.model} has no held-out loss")
        output.line(last_words(result["status"]))
        if losses:
            output.line(f"held-out loss {losses[0][2]:.3f} -> {losses[-1][2]:.3f} in {losses[-1][0]:.0f} s")
            result["picture"] = lab_picture(self, result)
        output.line(f"{self.machines}, and the server: {result['note']}")
        return load.with_load(result)

    def on_rank(self, *words: str) -> None:
        """Be one process of the lab: rank 0 serves, then come the shards; the others are nodes."""
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
        from thinwire.systems.cli.ps_work import prediction_table

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


def predict(asked: PsSimulateVerb) -> list[dict[str, Any]]:
    """Return rows for the setting, ASP, synchronous SGD through the server, and a hierarchical all-reduce."""
    from thinwire.systems.cli.ps_work import read_settings
    from thinwire.systems.parameter_server import Link, simulate
    from thinwire.systems.parameter_server.synchronous import hierarchical_seconds, synchronous_step_seconds

    nodes, workers, slower = asked.nodes, asked.workers, asked.slower
    bits, latency = lab.parse_rate(asked.link), lab.parse_delay(asked.delay)
    payload, wire = int(4e6 * asked.parameters), Link(latency, bits)

    made = Counter[str]()

    def step_seconds(node: int, worker: int, number: int, rng: random.Random) -> float:
        made["steps"] += 1
        return asked.step * slower.get(node, 1.0) * rng.lognormvariate(0.0, asked.spread)

    rows: list[tuple[Any, ...]] = []
    for text in dict.fromkeys([asked.settings, "asp", "bsp"]):
        chosen, before = read_settings(text, nodes), made["steps"]
        trace = simulate(
            chosen, step_seconds=step_seconds, link=wire, server_link=wire, payload_bytes=payload,
            **asked.part(["nodes", "workers", "seconds", "seed", "shards"]),
        )  # fmt: skip
        ages = trace.staleness()
        done = made["steps"] - before if chosen.sync_every else trace.finished  # steps of slower members are fewer
        batches = done * trace.gradients / max(1, trace.finished)
        mean = sum(age * n for age, n in ages.items()) / max(1, sum(ages.values()))
        traffic = (trace.bytes_up + trace.bytes_down) / max(1, batches)
        speed = batches / trace.seconds, len(trace.updates) / trace.seconds
        rows.append((text, *speed, mean, max(ages, default=0), traffic))
    exchange = hierarchical_seconds(payload, nodes, bits, latency)
    period = synchronous_step_seconds(step_seconds, nodes, workers, exchange, seed=asked.seed)
    traffic = 2 * payload * (nodes - 1) / (nodes * workers)  # of all cards, for a ring over nodes after a sum in each
    rows.append(("hierarchical all-reduce", nodes * workers / period, 1 / period, 0.0, 0, traffic))
    rates = "gradients_per_second", "updates_per_second"
    names = "scheme", *rates, "mean_staleness", "max_staleness", "bytes_per_gradient"
    return [dict(zip(names, row)) for row in rows]


def run_lab(spec: PsRunVerb, quiet: bool) -> dict[str, Any]:
    """Run it, with the server's table, or a line from time to time, on stderr."""
    from thinwire.systems.cli.ps_work import live

    first = 1 + spec.shards  # the rank of node 0
    cluster = spec.cluster
    result: dict[str, Any] = {"status": None, "losses": [], "happened": []}
    with live(f"starting {spec}", quiet) as (bar, show):

        def on_event(rank: int, event: dict[str, Any]) -> None:
            if rank != 0:
                return
            if "begun" in event:
                bar.log("first update: seconds count from here")
            elif "loss_at" in event:
                seconds, gradients, value = event["loss_at"]
                result["losses"].append(event["loss_at"])
                bar.log(f"{seconds:.0f} s: held-out loss {value:.3f} after {gradients} gradients")
            elif "weights" in event:
                result["weights"] = event["weights"]
            else:
                result["status"] = event
                show(event)

        def on_fault(what: lab.Happening) -> None:
            node = what.rank - first
            result["happened"].append([what.seconds, node, what.what])
            bar.log(f"{what.seconds:.0f} s: node {node} was {what.what}")

        words = LastWords(on_event)
        command = spec.rank_command()
        launched = lab.run(
            cluster, command, on_line=words, timeout_seconds=spec.timeout, grace_seconds=10.0,
            faults=[lab.RankFault("kill", first + node, at, _AWAY_SECONDS) for node, at in spec.kills],
            faults_begin=lambda rank, text: rank == 0 and "begun" in (event_in(text)[0] or {}), on_fault=on_fault,
        )  # fmt: skip
    if launched.exit_codes[0] or result["status"] is None or launched.exit_code == 124:
        raise RunFailed(words.after(f"the server ended with exit code {launched.exit_code}"))
    result["note"] = launched.note
    result["node_bytes"] = {"sent": launched.sent_bytes, "received": launched.received_bytes}
    return result


def lab_picture(spec: PsRunVerb, result: dict[str, Any]) -> Picture:
    """Draw the held-out loss against seconds since the first update, with slow nodes and events marked."""
    from thinwire.tools.pictures import Mark, Panel, Picture, Series

    seconds, _, losses = zip(*result["losses"])
    slow = "".join(f", node {node} is {factor:g} times slower" for node, factor in spec.slower.items())
    panel = Panel(
        "seconds", "loss on held-out data", (Series(spec.settings, tuple(seconds), tuple(losses)),),
        tuple(Mark(at, f"node {node} dies") for at, node, what in result["happened"] if what == "killed"),
    )  # fmt: skip
    return Picture(f"{spec.model}, {counted(spec.nodes, 'node')}, link {spec.cluster.wire}{slow}", (panel,))


def serve_in_lab(spec: PsRunVerb, host: str, port: int) -> None:
    from thinwire.systems.cli.ps_work import build, weights_hash
    from thinwire.systems.link.hello import find_trust
    from thinwire.systems.parameter_server import Layout

    workload = build(spec.model, spec.seed)
    layout = Layout.of(workload.model)
    began: list[float] = []

    def held_out(seconds: float, gradients: int) -> None:
        if (value := workload.held_out_loss()) is not None:
            tell_event({"loss_at": [seconds, gradients, value]})

    def on_update(version: int, theta: Any) -> None:
        now = time.monotonic()
        if not began:
            tell_event({"begun": True})
            held_out(0.0, 0)
            began.append(now)
            return
        layout.write(theta, workload.model)
        service.buffers.write(workload.model)
        held_out(now - began[0], service.machine.counters["applied"])

    def on_status(status: Status) -> None:
        tell_event(status.to_dict())
        if spec.seconds is not None and began and time.monotonic() - began[0] > spec.seconds:
            service.stop()

    service = spec.service(
        port=port, host=host, trust=find_trust(keys=spec.keys_of("server")), on_update=on_update,
        on_update_every=spec.evaluate_every, on_status=on_status,
    )  # fmt: skip
    status = service.run()
    seconds = time.monotonic() - began[0] if began else 0.0
    tell_event({"weights": weights_hash(layout.flat(service.model))})
    tell_event({**status.to_dict(), "training_seconds": seconds})


VERBS = (PsServerVerb, PsShardVerb, PsNodeVerb, PsRunVerb, PsSimulateVerb, PsReplayVerb)
