"""``thinwire ps run``: a server, its shards and its nodes as processes of the lab. As a module, it runs one of them."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.events import LastWords, event_in, python, tell_event
from thinwire.tools.cli.console import RunFailed, exit_code

if TYPE_CHECKING:
    from thinwire.tools.pictures import Picture

PORT = 29400
_AWAY_SECONDS = 1.0  # between a node's death and its return


@dataclass(frozen=True)
class LabSpec:
    """What to run; see the options of the verb."""

    model: str
    settings: str
    outer: str
    nodes: int
    workers: int
    link: str
    delay: str
    pace: float
    slow: list[tuple[int, float]]
    kill: list[tuple[int, float]]
    updates: int | None
    gradients: int | None
    seconds: float | None
    evaluate_every: int
    journal: str | None
    seed: int
    timeout: float
    shards: int = 0
    keys: str | None = None

    def keys_of(self, name: str) -> Path | None:
        """Return the directory of the identity of the process with this name."""
        return None if self.keys is None else Path(self.keys) / name


def check_keys(spec: LabSpec) -> None:
    """Refuse a directory in which an identity is missing.

    Raises:
        ValueError: an identity is missing.
    """
    from thinwire.tools.lab.network import Network

    names = ["server", *(f"shard{i}" for i in range(spec.shards)), *(f"node{i}" for i in range(spec.nodes))]
    missing = [name for name in names if (own := spec.keys_of(name)) and not (own / "identity.crt").is_file()]
    if missing:
        command = f"thinwire keys new {spec.keys} --names {','.join(missing)}"
        host = f" --host {Network.address(0)}" if "server" in missing else ""
        raise ValueError(f"{spec.keys} has no identity for {', '.join(missing)}: run {command}{host}")


def run_lab(spec: LabSpec, quiet: bool) -> dict[str, Any]:
    """Run it, with the server's table, or a line from time to time, on stderr.

    Raises:
        RunFailed: the server ended with an error, or time ran out.
    """
    from contextlib import ExitStack

    from thinwire.systems.cli.ps_tables import live
    from thinwire.systems.cli.ps_work import check_words
    from thinwire.tools import lab

    check_words(spec.model, spec.settings, spec.outer, spec.nodes)
    check_keys(spec)
    first = 1 + spec.shards  # the rank of node 0
    cluster = lab.Cluster.parse(first + spec.nodes, 1, spec.link, spec.delay)
    result: dict[str, Any] = {"status": None, "losses": [], "happened": []}
    with ExitStack() as stack:
        screen = stack.enter_context(live(quiet))
        screen.say(_begins(spec))

        def on_event(rank: int, event: dict[str, Any]) -> None:
            if rank != 0:
                return
            if "begun" in event:
                screen.say("first update: seconds count from here")
            elif "loss_at" in event:
                result["losses"].append(event["loss_at"])
                screen.held_out(event["loss_at"])
            elif "weights" in event:
                result["weights"] = event["weights"]
            else:
                result["status"] = event
                screen.status(event)

        def on_fault(what: lab.Happening) -> None:
            node = what.rank - first
            result["happened"].append([what.seconds, node, what.what])
            screen.say(f"{what.seconds:.0f} s: node {node} was {what.what}")

        words = LastWords(on_event)
        command = python("-m", "thinwire.systems.cli.ps_lab", json.dumps(asdict(spec)))
        launched = lab.run(
            cluster, command, on_line=words, timeout_seconds=spec.timeout, grace_seconds=10.0,
            faults=[lab.RankFault("kill", first + node, at, _AWAY_SECONDS) for node, at in spec.kill],
            faults_begin=lambda rank, text: rank == 0 and "begun" in (event_in(text)[0] or {}), on_fault=on_fault,
        )  # fmt: skip
    if launched.exit_codes[0] or result["status"] is None or launched.exit_code == 124:
        raise RunFailed(words.after(f"the server ended with exit code {launched.exit_code}"))
    result["note"] = launched.note
    result["node_bytes"] = {"sent": launched.sent_bytes, "received": launched.received_bytes}
    return result


def _begins(spec: LabSpec) -> str:
    """Say what is started, and when it ends."""
    ends = ((spec.seconds, "s of training"), (spec.updates, "updates"), (spec.gradients, "gradients"))
    most = " or ".join(f"{value:g} {words}" for value, words in ends if value is not None)
    shards = f"{spec.shards} shards, " if spec.shards else ""
    return (
        f"starting a server, {shards}{spec.nodes} nodes of {spec.workers} worker(s), link {spec.link}: "
        f"{spec.model} with {spec.settings}, {most}"
    )


def lab_picture(spec: LabSpec, result: dict[str, Any]) -> Picture:
    """Draw the held-out loss against seconds since the first update, with slow nodes and events marked."""
    from thinwire.tools.pictures import Mark, Panel, Picture, Series

    seconds, _, losses = zip(*result["losses"])
    slow = "".join(f", node {node} is {factor:g} times slower" for node, factor in spec.slow)
    panel = Panel(
        "seconds", "loss on held-out data", (Series(spec.settings, tuple(seconds), tuple(losses)),),
        tuple(Mark(at, f"node {node} dies") for at, node, what in result["happened"] if what == "killed"),
    )  # fmt: skip
    return Picture(f"{spec.model}, {spec.nodes} nodes, link {spec.link}{slow}", (panel,))


def main(text: str) -> None:
    """Run one process of the lab: rank 0 serves, then come the shards; the others are nodes."""
    from thinwire.systems.cli.ps_work import run_shard

    spec = LabSpec(**json.loads(text))
    rank, server = int(os.environ["RANK"]), f"{os.environ['MASTER_ADDR']}:{PORT}"
    if rank == 0:
        _serve(spec)
    elif rank <= spec.shards:
        run_shard(server, rank - 1, None, 0, None, host=_host(), keys=spec.keys_of(f"shard{rank - 1}"))
    else:
        _work(spec, rank - 1 - spec.shards, server)


def _host() -> str:
    """Return where to listen: at all addresses of an emulated machine. Without keys, all ranks share a lab secret."""
    from thinwire.systems.link.secret import is_loopback

    return "127.0.0.1" if is_loopback(os.environ["MASTER_ADDR"]) else "0.0.0.0"


def _serve(spec: LabSpec) -> None:
    from thinwire.systems.cli.ps_work import build, make_service, weights_hash
    from thinwire.systems.parameter_server import Layout, Status

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
        spec.model, spec.settings, spec.outer, port=PORT, host=_host(), keys=spec.keys_of("server"),
        nodes=spec.nodes, shards=spec.shards,
        updates=spec.updates, gradients=spec.gradients, journal=spec.journal, seed=spec.seed, on_update=on_update,
        on_update_every=spec.evaluate_every, on_status=on_status,
    )  # fmt: skip
    status = service.run()
    ended = time.monotonic()
    final = {**status.to_dict(), "training_seconds": ended - began[0] if began else 0.0}
    tell_event({"weights": weights_hash(layout.flat(service.model))})
    tell_event(final)


def _work(spec: LabSpec, number: int, server: str) -> None:
    from thinwire.systems.cli.ps_work import run_node

    slowdown = dict(spec.slow).get(number, 1.0)
    run_node(
        server, spec.model, number, spec.workers, slowdown=max(1.0, slowdown), pace=spec.pace, seed=spec.seed,
        keys=spec.keys_of(f"node{number}"),
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (RuntimeError, ValueError) as error:
        if exit_code(error) is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
