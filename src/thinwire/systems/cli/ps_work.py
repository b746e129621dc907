"""What the verbs of ``thinwire ps`` do: serve, hold a shard, lead a node, work, replay, predict, run all in the lab."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import Tensor, nn

from thinwire.core.events import LastWords, event_in, tell_event
from thinwire.core.words import counted
from thinwire.systems.link.hello import find_trust
from thinwire.systems.link.listener import split_address
from thinwire.systems.parameter_server import (
    DelayedNesterov,
    Journal,
    Layout,
    Link,
    Node,
    Service,
    Settings,
    Shard,
    Status,
    Worker,
    preset,
    replay,
    simulate,
)
from thinwire.systems.parameter_server.outer import Outer, default_outer
from thinwire.systems.parameter_server.synchronous import hierarchical_seconds, synchronous_step_seconds
from thinwire.tools import lab
from thinwire.tools.bench.models.registry import build_model, check_model
from thinwire.tools.bench.models.workload import Workload
from thinwire.tools.bench.words import nearest, split_options
from thinwire.tools.cli.console import Bar, RunFailed, note, plain_table, progress
from thinwire.tools.pictures import Mark, Panel, Picture, Series

if TYPE_CHECKING:
    from thinwire.systems.cli.ps import (
        PsNodeVerb,
        PsRunVerb,
        PsShardVerb,
        PsSimulateVerb,
        RulesOptions,
        TrainingOptions,
    )

_RESTARTS = 20
_AWAY_SECONDS = 1.0  # between a node's death and its return


OUTER: dict[str, Callable[..., Any]] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "delayed_nesterov": DelayedNesterov,
}  # fmt: skip


def read_outer(text: str) -> Outer | None:
    """Parse ``sgd:lr=0.1:momentum=0.9``, ``adamw:beta1=0``, ``delayed_nesterov:lr=0.2:period=4``; auto: None."""
    if text == "auto":
        return None
    name, options = split_options(text)
    if name not in OUTER:
        raise ValueError(f"unknown optimizer {name!r}; {nearest(name, OUTER)}")
    words: dict[str, Any] = dict(options)
    if name.startswith("adam"):
        words["betas"] = (float(words.pop("beta1", 0.9)), float(words.pop("beta2", 0.999)))

    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = OUTER[name](params, **words)
        return made

    try:
        make([torch.zeros(1)])
    except TypeError as error:
        raise ValueError(f"--outer {text}: {error}") from error
    return make


def read_settings(asked: RulesOptions) -> Settings:
    return replace(preset(asked.settings), start_nodes=asked.nodes)


def check_server(address: str) -> None:
    """Refuse an address whose name nobody knows; one that cannot be looked up at the moment may be known later."""
    host, port = split_address(address)
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror as error:
        if error.errno != socket.EAI_AGAIN:
            raise ValueError(f"server {address}: the name {host!r} has no address: {error.strerror}") from error


def build(model: str, seed: int) -> Workload:
    torch.set_num_threads(1)
    return build_model(model, seed)


def make_service(asked: TrainingOptions, **options: Any) -> Service:
    """Return a service for this training; ``options`` are those of :class:`Service` that are not the training's."""
    return Service(
        build(asked.model, asked.seed).model, read_settings(asked), outer=read_outer(asked.outer),
        outer_text=asked.outer, facts=asked.part(["model", "seed", "outer", "nodes"]),
        **asked.part(["nodes", "shards", "updates", "gradients", "journal"]), **options,
    )  # fmt: skip


def run_shard(asked: PsShardVerb) -> int:
    """Run one shard until the training ends, and return its last version."""
    torch.set_num_threads(1)
    check_server(asked.server)
    made, words = (None, _published) if asked.outer is None else (read_outer(asked.outer), None)
    shard = Shard(asked.server, asked.index, outer=made, read_outer=words, **asked.listening)
    note(f"shard {asked.index}, for the server at {asked.server}; waits up to a minute for it")
    return shard.run()


def _published(words: str) -> Outer | None:
    if not words:
        raise ValueError("the server's optimizer was made in Python: give --outer, or use parameter_server.serve_shard")
    return read_outer(words)


def rank_of(node: int, worker: int) -> int:
    return 64 * node + worker


def make_worker(asked: PsNodeVerb, leader: Node | str, number: int) -> Worker:
    workload, node = build(asked.model, asked.seed), asked.node
    assert node is not None

    def loss(network: nn.Module, step: int) -> Tensor:
        return workload.loss(network, step, rank_of(node, number))

    return Worker(
        workload.model, lambda step: step, loss, leader, number, slowdown=asked.slowdown, pace_seconds=asked.pace,
        trust=asked.trust,
    )  # fmt: skip


def run_node(asked: PsNodeVerb) -> dict[str, Any]:
    """Run a leader with its workers: one in this process, or several in their own processes."""
    number = zlib.crc32(socket.gethostname().encode()) & 0xFFFF if asked.node is None else asked.node
    asked = replace(asked, node=number)
    check_server(asked.server)
    check_model(asked.model)
    trust = asked.trust  # refuses unusable secrets or keys before any output
    children: dict[int, subprocess.Popen[bytes]] = {}
    node, end = None, "training has ended"
    note(f"node {number}, for the server at {asked.server}; waits up to a minute for it")
    try:
        node = Node(asked.server, number, asked.workers, trust=trust)
        if asked.workers == 1:
            stats = make_worker(asked, node, 0).run()
            node.wait(5.0)
            return {"node": number, "end": end, "submissions": stats.submissions, "restarts": 0}
        restarts = -asked.workers
        while not node.wait(0.2):
            for k in range(asked.workers):
                if k not in children or children[k].poll() is not None:
                    restarts += 1
                    if restarts > _RESTARTS:
                        raise RunFailed(f"workers of node {number} died {restarts} times; see their output above")
                    command = asked.rank_command(node.address, str(k))
                    children[k] = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        until = time.monotonic() + 10.0
        while time.monotonic() < until and any(child.poll() is None for child in children.values()):
            time.sleep(0.05)
        return {"node": number, "end": end, "restarts": restarts}
    finally:
        if node is not None:
            node.close()
        for child in children.values():
            if child.poll() is None:
                child.kill()
                child.wait()


def replay_file(path: Path, out: Path | None) -> dict[str, Any]:
    """Repeat a recorded run of a bench model. ``ValueError``: it is not a journal, or one of another program."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give the one that --journal wrote")
    journal = Journal.read(path)
    facts = journal.facts
    if "model" not in facts:
        raise ValueError(
            f"{path} does not say which model it belongs to: replay it in Python, see parameter_server.replay"
        )
    workload = build(facts["model"], facts["seed"])
    network, layout = workload.model, Layout.of(workload.model)

    def gradient(theta: Tensor, node: int, worker: int, batch: int) -> Tensor:
        layout.write(theta, network)
        network.zero_grad()
        workload.loss(network, batch, rank_of(node, worker)).backward()
        return layout.gradient(network)

    outer = read_outer(facts["outer"]) or default_outer(journal.settings, facts["nodes"])
    with progress("updates", len(journal.updates)) as shown:
        theta = replay(journal, layout.flat(network), gradient, outer, on_update=shown)
    if out is not None:
        torch.save({"theta": theta, "version": len(journal.updates)}, out)
    digest = weights_hash(theta)
    return {"updates": len(journal.updates), "hash": digest, "deterministic": journal.settings.deterministic}


def weights_hash(theta: Tensor) -> str:
    return hashlib.blake2b(theta.detach().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def status_table(status: dict[str, Any]) -> Table:
    counters = status["counters"]
    words = [f"{name} {counters[name]}" for name in ("joined", "left", "late", "lost") if name in counters]
    for shard in status["shards"]:
        bytes_ = f"{shard['up_bytes'] / 1e6:.1f} MB up, {shard['down_bytes'] / 1e6:.1f} down"
        words.append(f"shard {shard['index']} " + (bytes_ if shard["there"] else "has not connected yet"))
    rows = (
        (
            str(node["node"]), str(node["alive"]), str(node["seen"]),
            "idle" if node["behind"] < 0 else str(node["behind"]), f"{node['step_seconds']:.3f} s",
            f"{node['up_bytes'] / 1e6:.1f}", f"{node['down_bytes'] / 1e6:.1f}",
        )
        for node in status["nodes"]
    )  # fmt: skip
    columns = ("node", "workers", "rounds seen", "behind", "step", "MB up", "MB down")
    return plain_table(_head(status), columns, rows, caption="; ".join(words))


def _head(status: dict[str, Any]) -> str:
    loss = status["loss"]
    rate = status["gradients"] / max(status["seconds"], 1e-9)
    return (
        f"version {status['version']}, {status['gradients']} gradients, {rate:.1f}/s, staleness "
        f"{status['mean_staleness']:.2f}" + (f", loss {loss:.3f}" if loss is not None else "")
    )


@contextmanager
def live(begins: str, quiet: bool) -> Iterator[tuple[Bar, Callable[[dict[str, Any]], None]]]:
    """Yield a bar, and what shows a server's status: as a table of its nodes or, without a terminal, now and then."""
    tables: list[Table] = []
    with progress(begins, quiet=quiet, table=lambda: tables[-1] if tables else None) as bar:

        def show(status: dict[str, Any]) -> None:
            if status["nodes"]:  # once all have left, the last table with a node in it stays
                tables[:] = [status_table(status)]
            bar(description=f"{status['seconds']:.0f} s: {_head(status)}, {counted(len(status['nodes']), 'node')}")

        yield bar, show


def prediction_table(rows: list[dict[str, Any]]) -> Table:
    columns = ("scheme", "gradients/s", "updates/s", "staleness, max", "MB a gradient")
    cells = (
        (
            row["scheme"], f"{row['gradients_per_second']:.2f}", f"{row['updates_per_second']:.2f}",
            f"{row['mean_staleness']:.2f}, {row['max_staleness']:2d}", f"{row['bytes_per_gradient'] / 1e6:.2f}",
        )
        for row in rows
    )  # fmt: skip
    return plain_table("predicted in virtual time, not measured", columns, cells, close=True)


def predict(asked: PsSimulateVerb) -> list[dict[str, Any]]:
    """Return rows for the setting, ASP, synchronous SGD through the server, and a hierarchical all-reduce."""
    nodes, workers, slower = asked.nodes, asked.workers, asked.slower
    bits, latency = lab.parse_rate(asked.link), lab.parse_delay(asked.delay)
    payload, wire = int(4e6 * asked.parameters), Link(latency, bits)

    def step_seconds(node: int, worker: int, number: int, rng: random.Random) -> float:
        return asked.step * slower.get(node, 1.0) * rng.lognormvariate(0.0, asked.spread)

    rows: list[tuple[Any, ...]] = []
    for text in dict.fromkeys([asked.settings, "asp", "bsp"]):
        chosen = read_settings(replace(asked, settings=text))
        trace = simulate(
            chosen, step_seconds=step_seconds, link=wire, server_link=wire, payload_bytes=payload,
            **asked.part(["nodes", "workers", "seconds", "seed", "shards"]),
        )  # fmt: skip
        ages = trace.staleness()
        batches = trace.gradients * chosen.local_update.steps
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
    seconds, _, losses = zip(*result["losses"])
    slow = "".join(f", node {node} is {factor:g} times slower" for node, factor in spec.slower.items())
    panel = Panel(
        "seconds", "loss on held-out data", (Series(spec.settings, tuple(seconds), tuple(losses)),),
        tuple(Mark(at, f"node {node} dies") for at, node, what in result["happened"] if what == "killed"),
    )  # fmt: skip
    return Picture(f"{spec.model}, {counted(spec.nodes, 'node')}, link {spec.cluster.wire}{slow}", (panel,))


def serve_in_lab(spec: PsRunVerb, host: str, port: int) -> None:
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

    service = make_service(
        spec, port=port, host=host, trust=find_trust(keys=spec.keys_of("server")), on_update=on_update,
        on_update_every=spec.evaluate_every, on_status=on_status,
    )  # fmt: skip
    status = service.run()
    seconds = time.monotonic() - began[0] if began else 0.0
    tell_event({"weights": weights_hash(layout.flat(service.model))})
    tell_event({**status.to_dict(), "training_seconds": seconds})
