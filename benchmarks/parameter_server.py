"""Does asynchrony pay with one slow node? ``python benchmarks/parameter_server.py`` (needs the lab's rights; minutes)

Four nodes of the lab train the character GPT, one of them four times slower; a step takes a fixed time (``--pace``), so
that the two cores of a small machine can play four machines. Rows: synchronous S-SGD by all-reduce, and settings of the
parameter server, each for the same number of seconds; every row is run ``--rounds`` times, the median is shown.

``--only in``: how many iteration numbers per second one server takes, and for how much of a core.

``--only shards``: gradients per second of four equal nodes that push to one server, or to two shards with a link each:
where the server's link is the bound, and where it is not.

``--only slow --rounds 0 --out FILE --plot PICTURE`` runs nothing, and draws what the file holds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire.tools import lab
from thinwire.tools.pictures import Panel, Picture, Series, check_plot, write_picture

MODEL = "chargpt:layers=2:width=128:heads=4"
SYNCHRONOUS = "S-SGD (all-reduce)"
ROWS = {  # settings of the server, and for sequences per gradient the best optimizer of parameter_server_rates.py
    SYNCHRONOUS: (None, {4: "adamw:lr=1e-3", 1: "adamw:lr=5e-4"}),
    "inhad S=8, c=2": (
        "inhad:max_staleness=8:update_every=nodes/2",
        {4: "adamw:beta1=0:lr=2.5e-4", 1: "adamw:beta1=0:lr=2.5e-4"},
    ),
    "inhad S=4, c=4": ("inhad:max_staleness=4:update_every=nodes", {4: "adamw:lr=1e-3", 1: "adamw:lr=5e-4"}),
    "asp": ("asp", {4: "adamw:lr=2.5e-4", 1: "adamw:lr=2.5e-4"}),
}
EVERY = 10
SHARDED = "mlp:width=512:layers=4"  # 4.2 MB
SHARD_SECONDS = 20.0
SHARD_LINKS = ("100mbit", "1gbit")
RANK = "benchmarks/parameter_server.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["slow", "in", "shards"], default=None)
    parser.add_argument("--rows", default=",".join(str(i) for i in range(len(ROWS))), help="numbers of rows")
    parser.add_argument("--batch", type=int, choices=[1, 4], default=4, help="sequences of 64 characters per gradient")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace", type=float, default=0.1)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--outer", help="for all rows, instead of the tuned one, as adamw:lr=1e-3")
    parser.add_argument("--slow", type=float, default=4.0)
    parser.add_argument("--target", type=float, default=2.7, help="held-out loss to reach")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a JSON file of earlier runs, which gains these")
    parser.add_argument("--plot", type=Path, help="loss against seconds of all runs with a slow node: .png or .html")
    options = parser.parse_args()
    check_plot(options.plot)
    if options.rank:
        synchronous_rank(json.loads(options.rank))
        return
    known: dict[str, Any] = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    if options.only in (None, "slow"):
        slow_node(options, known.setdefault(f"slow, batch {options.batch}", {}))
    if options.only in (None, "in"):
        known["in"] = iteration_numbers()
    if options.only in (None, "shards"):
        shards(options.rounds, known.setdefault("shards", {}))
    if options.out:
        options.out.write_text(json.dumps(known, indent=1) + "\n")
    if options.plot:
        write_picture(picture(known, options), options.plot)


# --- one slow node -------------------------------------------------------------------------------------------------


def slow_node(options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Add runs to ``runs`` and print the medians of all."""
    chosen = [list(ROWS)[int(i)] for i in options.rows.split(",") if i]
    for _ in range(options.rounds):
        for name in chosen:
            print(f"... {name}", file=sys.stderr, flush=True)
            settings, tuned = ROWS[name]
            outer = options.outer or tuned[options.batch]
            run = synchronous(outer, options) if settings is None else asynchronous(settings, outer, options)
            print(f"    {run['rate']:.2f} gradients/s", file=sys.stderr, flush=True)
            runs.setdefault(f"{name}, {outer}", []).append(run)
    count = min(map(len, runs.values()))
    table = Table(title=f"one of 4 nodes {options.slow:g}x slower, {options.link}, median of {count} or more")
    names = ("row", "gradients/s", "against S-SGD", "MB per gradient", "loss at end", f"s to {options.target}")
    for column in names:
        table.add_column(column, justify="left" if column == "row" else "right")
    rows = {name: row_of(runs[name], options.target, options.seconds) for name in runs}
    base = next((row["rate"] for name, row in rows.items() if name.startswith(SYNCHRONOUS)), None)
    for name, row in rows.items():
        ratio = f"{row['rate'] / base:.2f}" if base else "-"
        reached = f"{row['to_target']:.1f}" if row["to_target"] < 1e9 else "-"
        table.add_row(name, f"{row['rate']:.2f}", ratio, f"{row['mb']:.2f}", f"{row['loss']:.3f}", reached)
    Console().print(table)


def summary(losses: list[list[float]], gradients: float, seconds: float, sent: float) -> dict[str, Any]:
    """One run. ``losses``: (seconds, gradients, held-out loss)."""
    rounded = [[round(at, 2), int(count), round(loss, 4)] for at, count, loss in losses]
    return {"rate": gradients / seconds, "mb": sent / gradients / 1e6, "losses": rounded}


def row_of(runs: list[dict[str, Any]], target: float, seconds: float) -> dict[str, float]:
    """Medians over runs."""
    row = {key: statistics.median(run[key] for run in runs) for key in ("rate", "mb")}
    row["loss"] = statistics.median([x for x in run["losses"] if x[0] <= seconds][-1][2] for run in runs)
    reached = [next((at for at, _, loss in run["losses"] if loss <= target), 1e9) for run in runs]
    return {**row, "to_target": statistics.median(reached)}


def picture(known: dict[str, Any], options: argparse.Namespace) -> Picture:
    """Draw the last run of every row, a panel for each number of sequences per gradient."""
    panels = []
    for where in (key for key in known if key.startswith("slow")):
        batch = where.rpartition(" ")[2]
        lines = []
        for name, runs in known[where].items():
            seconds, _, losses = zip(*(loss for loss in runs[-1]["losses"] if loss[0] <= options.seconds))
            row = name.rpartition(", ")[0]
            lines.append(Series(ROWS[row][0] or row, seconds, losses))
        told = f"{batch} sequence{'s' * (batch != '1')} per gradient"
        panels.append(Panel(f"seconds, with {told}", "held-out loss", tuple(lines), y_range=(2.3, 4.0)))
    title = f"A character GPT on 4 nodes, one of them {options.slow:g} times slower, links of {options.link}"
    return Picture(title, tuple(panels))


def asynchronous(settings: str, outer: str, options: argparse.Namespace) -> dict[str, Any]:
    from thinwire.systems.cli.ps import PsRunVerb
    from thinwire.tools.cli.console import Output

    spec = PsRunVerb(
        model=f"{MODEL}:batch={options.batch}",
        settings=settings,
        outer=outer,
        link=options.link,
        pace=options.pace,
        slow=[f"3:{options.slow}"],
        seconds=options.seconds,
        evaluate_every=EVERY,
        timeout=options.seconds + 120,
    )
    result = spec.run(Output())
    status = result["status"]
    sent = status["up_bytes"] + status["down_bytes"]
    return summary(result["losses"], status["gradients"], status["training_seconds"], sent)


def synchronous(outer: str, options: argparse.Namespace) -> dict[str, Any]:
    spec = {"outer": outer, **{key: getattr(options, key) for key in ("seconds", "pace", "slow", "batch")}}
    lines: list[dict[str, Any]] = []
    command = [sys.executable, RANK, "--rank", json.dumps(spec)]

    def on_line(rank: int, line: str) -> None:
        if line.startswith("@@"):
            lines.append(json.loads(line[2:]))
        else:
            print(f"[{rank}] {line}", file=sys.stderr)

    done = lab.run(lab.Cluster.parse(4, 1, options.link, None), command, on_line=on_line, timeout_seconds=600)
    if done.exit_code or not lines:
        raise SystemExit(f"the synchronous row failed with exit code {done.exit_code}")
    last = lines[-1]
    return summary(last["losses"], last["gradients"], last["seconds"], last["bytes"])


def synchronous_rank(spec: dict[str, Any]) -> None:
    """A rank of the all-reduce row: the same model, data, pace and optimizer."""
    import torch
    import torch.distributed as dist

    import thinwire as tw
    from thinwire.systems.cli.ps_work import rank_of, read_outer
    from thinwire.tools.bench.models.registry import build_model

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    workload = build_model(f"{MODEL}:batch={spec['batch']}", 0)
    model = workload.model
    make = read_outer(spec["outer"])
    assert make is not None
    optimizer = make(list(model.parameters()))
    sync = tw.attach(model, optimizer, "ssgd")
    takes = spec["pace"] * (spec["slow"] if rank == 3 else 1.0)
    dist.barrier()
    began, losses, step = time.monotonic(), [], 0
    stop = torch.zeros(1)
    while not stop.item():
        since = time.monotonic()
        loss = workload.loss(model, step, rank_of(rank, 0))
        time.sleep(max(0.0, takes - 2 * (time.monotonic() - since)))  # backward takes about as long as forward
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0 and (step == 1 or step % max(1, EVERY // size) == 0):
            losses.append([time.monotonic() - began, size * step, workload.held_out_loss()])
        stop[0] = float(time.monotonic() - began > spec["seconds"])
        dist.broadcast(stop, 0)
    if rank == 0:
        sent = 2 * size * sync.stats().bytes_sent  # up and down, as the server counts
        row = {"losses": losses, "gradients": size * step, "seconds": time.monotonic() - began, "bytes": sent}
        print("@@" + json.dumps(row), flush=True)
    sync.close()
    dist.destroy_process_group()


# --- shards --------------------------------------------------------------------------------------------------------


def shards(rounds: int, runs: dict[str, dict[str, list[float]]]) -> None:
    """Add gradients per second to ``runs``, by link and number of shards, and print the medians of all."""
    for _ in range(rounds):
        for link in SHARD_LINKS:
            for count in (0, 2):
                print(f"... {link}, {count} shards", file=sys.stderr, flush=True)
                rate = pushed(link, count)
                print(f"    {rate:.2f} gradients/s", file=sys.stderr, flush=True)
                runs.setdefault(link, {}).setdefault(str(count), []).append(rate)
    model_bytes = 4 * (4 * (512 * 512 + 512) + 512 * 10 + 10)
    table = Table(title=f"4 nodes push gradients of {model_bytes / 1e6:.1f} MB, a step of 0.2 s; medians of {rounds}")
    for column in ("link of the server and of each shard", "shards", "gradients/s", "ratio", "bound of the links"):
        table.add_column(column, justify="right")
    for link, rows in runs.items():
        base = statistics.median(rows["0"])
        for count, rates in rows.items():
            bound = max(int(count), 1) * lab.parse_rate(link) / (8 * model_bytes)
            rate = statistics.median(rates)
            table.add_row(link, count, f"{rate:.2f}", f"{rate / base:.2f}", f"{bound:.1f}")
    Console().print(table)


def pushed(link: str, count: int) -> float:
    """Gradients per second of asynchronous SGD; the nodes' own links are 1gbit."""
    from thinwire.systems.cli.ps import PsRunVerb
    from thinwire.tools.cli.console import Output

    links = [link] * (1 + count) + ["1gbit"] * 4
    spec = PsRunVerb(
        model=SHARDED,
        settings="asp",
        outer="sgd:lr=0.001",
        link=",".join(links),
        pace=0.2,
        seconds=SHARD_SECONDS,
        evaluate_every=10**9,
        timeout=SHARD_SECONDS + 120,
        shards=count,
    )
    status = spec.run(Output())["status"]
    return float(status["gradients"] / status["training_seconds"])


# --- iteration numbers ---------------------------------------------------------------------------------------------


def iteration_numbers(rate: int = 10_000, members: int = 8, seconds: float = 5.0) -> dict[str, Any]:
    """INs of some members: through the state machine alone, and over sockets from another process."""
    from thinwire.systems.parameter_server import Server, presets
    from thinwire.systems.parameter_server.messages import Hello, IterationNumber, decode, encode

    server = Server(presets.inhad(4, f"{members} nodes", start_nodes=members))
    for node in range(members):
        server.on(Hello(node, 1), 0.0)
    frames = [encode(IterationNumber(m, 1 + i, 0, 0, 0, 0)) for i in range(200) for m in server.members]
    began = time.process_time()
    for frame in frames * 5:
        server.on(decode(frame)[0], 1.0)
    machine = (time.process_time() - began) / (5 * len(frames))
    taken, share = over_sockets(rate, members, seconds)
    table = Table(title=f"iteration numbers of {members} members to one server")
    for column in ("state machine and codec", "sent over sockets", "taken", "of a core"):
        table.add_column(column, justify="right")
    table.add_row(f"{machine * 1e6:.1f} us each", f"{rate}/s", f"{taken:.0f}/s", f"{share:.0%}")
    Console().print(table)
    return {"machine_us": machine * 1e6, "sent_per_second": rate, "taken_per_second": taken, "core_share": share}


def over_sockets(rate: int, members: int, seconds: float) -> tuple[float, float]:
    import multiprocessing

    import torch

    from thinwire.systems.parameter_server import Service, presets

    torch.set_num_threads(1)
    settings = presets.inhad(4, f"{members} nodes", start_nodes=members, lease_seconds=60.0)
    service = Service(torch.nn.Linear(2, 2), settings, host="127.0.0.1", updates=10**9)
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    context = multiprocessing.get_context("spawn")
    sender = context.Process(target=send_numbers, args=(service.port, members, rate, seconds + 4.0), daemon=True)
    sender.start()
    while service.machine.counters["in"] < rate:  # it sends
        if not sender.is_alive():
            raise SystemExit("the sending process has failed")
        time.sleep(0.01)
    count, wall, cpu = service.machine.counters["in"], time.monotonic(), time.process_time()
    time.sleep(seconds)
    count, wall, cpu = service.machine.counters["in"] - count, time.monotonic() - wall, time.process_time() - cpu
    sender.join()
    service.stop()
    thread.join(10)
    return count / wall, cpu / wall


def send_numbers(port: int, members: int, rate: int, seconds: float) -> None:
    """Leaders that only report."""
    import torch

    from thinwire.systems.link.codec import FRAME
    from thinwire.systems.link.hello import PeerIdentity
    from thinwire.systems.link.listener import Caller
    from thinwire.systems.parameter_server import Layout
    from thinwire.systems.parameter_server.messages import Hello, IterationNumber, Weights, decode, encode

    number = Layout.of(torch.nn.Linear(2, 2)).number
    pairs = []
    for node in range(members):
        pair = Caller(f"127.0.0.1:{port}", PeerIdentity("node", node)).connect(encode(Hello(node, 1, number)))
        pairs.append((pair, decode(pair.receive_frame(FRAME.size, 30.0))[0].member))  # WELCOME
    for pair, _ in pairs:
        message, size = None, 0
        while not isinstance(message, Weights):  # a sign of life may come first
            message, _, size = decode(pair.receive_frame(FRAME.size, 30.0))
        pair.receive_tensor(torch.empty(size, dtype=torch.uint8), 30.0)
    began, sent = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        due = int((time.monotonic() - began) * rate)
        while sent < due:
            pair, member = pairs[sent % members]
            pair.send_frame(encode(IterationNumber(member, 1 + sent // members, 0, 0, 0, 1)))
            sent += 1
        time.sleep(0.001)
    os._exit(0)


if __name__ == "__main__":
    main()
