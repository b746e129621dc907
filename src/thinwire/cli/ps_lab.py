"""``thinwire ps run``: a server, its shards and its nodes as processes of the lab. As a module it is one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.cli.errors import RunFailed, exit_code

PORT = 29400
_AWAY_SECONDS = 1.0


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


def run_lab(spec: LabSpec, quiet: bool) -> dict[str, Any]:
    """Run it, with the server's table on stderr.

    Raises:
        RunFailed: the server ended with an error, or time ran out.
    """
    from contextlib import ExitStack

    from thinwire import lab
    from thinwire.bench.models.registry import check_model
    from thinwire.cli.ps_tables import live
    from thinwire.cli.ps_work import read_outer, read_settings

    check_model(spec.model)
    read_settings(spec.settings, spec.nodes)
    read_outer(spec.outer)
    cluster = lab.Cluster.parse(1 + spec.shards + spec.nodes, 1, spec.link, spec.delay)
    words: deque[str] = deque(maxlen=15)
    result: dict[str, Any] = {"status": None, "losses": []}
    with ExitStack() as stack:
        show = None if quiet else stack.enter_context(live())

        def on_line(rank: int, text: str) -> None:
            if rank == 0 and text.startswith("@@"):
                event = json.loads(text[2:])
                if "loss_at" in event:
                    result["losses"].append(event["loss_at"])
                elif "weights" in event:
                    result["weights"] = event["weights"]
                else:
                    result["status"] = event
                    if show is not None:
                        show(event)
            elif text.strip():
                words.append(f"[{rank}] {text.rstrip()}")

        command = [sys.executable, "-m", "thinwire.cli.ps_lab", json.dumps(asdict(spec))]
        launched = lab.run(cluster, command, on_line=on_line, timeout_seconds=spec.timeout, grace_seconds=10.0)
    if launched.exit_codes[0] or result["status"] is None or launched.exit_code == 124:
        raise RunFailed("\n".join([f"the server ended with exit code {launched.exit_code}; last words:", *words]))
    result["note"] = launched.note
    result["node_bytes"] = {"sent": launched.sent_bytes, "received": launched.received_bytes}
    return result


def main(text: str) -> None:
    """One process of the lab: rank 0 serves, then come the shards, the others are nodes."""
    from thinwire.cli.ps_work import run_shard

    spec = LabSpec(**json.loads(text))
    rank = int(os.environ["RANK"])
    if rank == 0:
        _serve(spec)
    elif rank <= spec.shards:
        run_shard(f"{os.environ['MASTER_ADDR']}:{PORT}", rank - 1, None, 0, None, host=_host())
    else:
        _lead(spec, rank - 1 - spec.shards)


def _host() -> str:
    """Where to listen: at all addresses of an emulated machine. The lab gives all of its ranks one secret."""
    from thinwire.link.secret import is_loopback

    return "127.0.0.1" if is_loopback(os.environ["MASTER_ADDR"]) else "0.0.0.0"


def _serve(spec: LabSpec) -> None:
    from thinwire.cli.ps_work import build, make_service, weights_hash
    from thinwire.parameter_server import Layout, Status

    workload = build(spec.model, spec.seed)
    layout = Layout.of(workload.model)
    began: list[float] = []

    def on_update(version: int, theta: Any) -> None:
        now = time.monotonic()
        if not began:
            began.append(now)
        if workload.evaluate is not None:
            layout.write(theta, workload.model)
            service.buffers.write(workload.model)
            workload.model.eval()
            value = float(workload.evaluate(workload.model, 0, 0))
            row = [now - began[0], service.machine.counters["applied"], value]
            print("@@" + json.dumps({"loss_at": row}), flush=True)

    def on_status(status: Status) -> None:
        print("@@" + json.dumps(status.to_dict()), flush=True)
        if spec.seconds is not None and began and time.monotonic() - began[0] > spec.seconds:
            service.stop()

    service = make_service(
        spec.model, spec.settings, spec.outer, port=PORT, host=_host(), nodes=spec.nodes, shards=spec.shards,
        updates=spec.updates, gradients=spec.gradients, journal=spec.journal, seed=spec.seed, on_update=on_update,
        on_update_every=spec.evaluate_every, on_status=on_status,
    )  # fmt: skip
    status = service.run()
    ended = time.monotonic()
    final = {**status.to_dict(), "training_seconds": ended - began[0] if began else 0.0}
    print("@@" + json.dumps({"weights": weights_hash(layout.flat(service.model))}), flush=True)
    print("@@" + json.dumps(final), flush=True)


def _lead(spec: LabSpec, number: int) -> None:
    """A node, and who kills it: the process that works is a child of this one."""
    kills = sorted(at for node, at in spec.kill if node == number)
    if not kills:
        _work(spec, number)
        return
    began = time.monotonic()
    code = "import sys; from thinwire.cli.ps_lab import child; child(sys.argv[1], int(sys.argv[2]))"
    command = [sys.executable, "-c", code, json.dumps(asdict(spec)), str(number)]
    while True:
        process = subprocess.Popen(command)
        at = kills.pop(0) if kills else None
        while process.poll() is None and (at is None or time.monotonic() - began < at):
            time.sleep(0.05)
        if process.returncode is not None:
            sys.exit(process.returncode)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        print(f"node {number} was killed at {time.monotonic() - began:.1f} s", flush=True)
        time.sleep(_AWAY_SECONDS)


def child(text: str, number: int) -> None:
    """A node that may be killed."""
    _work(LabSpec(**json.loads(text)), number)


def _work(spec: LabSpec, number: int) -> None:
    from thinwire.cli.ps_work import run_node

    slowdown = dict(spec.slow).get(number, 1.0)
    address = f"{os.environ['MASTER_ADDR']}:{PORT}"
    run_node(address, spec.model, number, spec.workers, slowdown=max(1.0, slowdown), pace=spec.pace, seed=spec.seed)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (RuntimeError, ValueError) as error:
        if exit_code(error) is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
