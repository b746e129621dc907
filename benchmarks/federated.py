"""What federated simulation costs: ``python benchmarks/federated.py [speed|million|uneven ...]``

``speed``: seconds a round of the workload in ``federated_contenders.py``, beside Flower's simulation and pfl-research
in environments of their own (``--flower``, ``--pfl``: their Python), in turns. ``million``: a population of 1,000,000
with 1,000 a round under SCAFFOLD, under three budgets for client states: memory of the process. ``uneven``: predicted
against measured makespan. Writes ``benchmarks/results/federated.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "federated.json"


def contender(python: str, framework: str, *options: str, ranks: int = 1) -> list[float]:
    """The seconds of a framework's rounds, the first two left out (caches, start of workers)."""
    print(f"... {framework} {' '.join(options)}", file=sys.stderr, flush=True)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [python, *launch, str(HERE / "federated_contenders.py"), framework, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    environment |= {"RAY_DEDUP_LOGS": "0", "PFL_PYTORCH_DEVICE": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1500, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
    if not lines:
        raise RuntimeError(f"{framework} failed: {done.stderr.strip()[-1500:]}")
    seconds: list[float] = json.loads(lines[-1][2:])["seconds"]
    return seconds[2:]


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        found.setdefault("thinwire", []).extend(contender(sys.executable, "thinwire", "--rounds", "30"))
        row = contender(sys.executable, "thinwire", "--rounds", "30", ranks=2)
        found.setdefault("thinwire, 2 ranks", []).extend(row)
        if arguments.pfl:
            found.setdefault("pfl-research", []).extend(contender(arguments.pfl, "pfl", "--rounds", "30"))
        if arguments.flower:
            for name, cpus in (("Flower simulation, 2 actors", "1"), ("Flower simulation, 1 actor", "2")):
                rounds = str(arguments.flower_rounds)
                row = contender(arguments.flower, "flower", "--rounds", rounds, "--cpus", cpus)
                found.setdefault(name, []).extend(row)
    table = Table(title="100 clients a round, digits, small CNN: seconds a round")
    for column in ("framework", "median", "least", "most", "rounds", "to thinwire"):
        table.add_column(column, justify="left" if column == "framework" else "right")
    rows, base = {}, statistics.median(found["thinwire"])
    for name, seconds in found.items():
        median = statistics.median(seconds)
        rows[name] = {"median": median, "least": min(seconds), "most": max(seconds), "rounds": len(seconds)}
        rows[name]["ratio"] = median / base
        cells = [f"{median:.4f}", f"{min(seconds):.4f}", f"{max(seconds):.4f}", str(len(seconds))]
        table.add_row(name, *cells, f"{median / base:.2f}")
    Console().print(table)
    return rows


_MILLION = """
import json, resource, sys, time, torch
torch.set_num_threads(1)
from thinwire.systems.federated.builtin import million
from thinwire.systems.federated import ClientStateStore
budget, rounds = int(sys.argv[1]), int(sys.argv[2])
made = million(features=int(sys.argv[3]))
with_folder = sys.argv[4]
store = ClientStateStore(len(made.clients), with_folder, budget)
peaks, start = [], time.perf_counter()
rss = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = rss()
history = made.simulate(state=store, rounds=rounds, on_round=lambda row: peaks.append(rss()))
print("@@" + json.dumps({
    "before": before, "peaks": peaks, "states_peak": store.memory_peak, "reads": store.reads, "writes": store.writes,
    "states": int((store.versions >= 0).sum()), "seconds": [row.seconds for row in history.rounds],
    "state_bytes": made.algorithm.theta.numel() * 4, "loss": [row.metrics["loss"] for row in history.rounds],
}))
"""


def million(arguments: argparse.Namespace) -> dict[str, Any]:
    table = Table(title="1,000,000 clients, 1,000 a round, SCAFFOLD")
    for column in ("budget", "states", "all states", "in memory, peak", "process grows by", "seconds a round"):
        table.add_column(column, justify="right")
    rows = {}
    for budget in (0, 8 << 20, 64 << 20):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", _MILLION, str(budget), str(arguments.rounds), "1000", folder]
            done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=True)
        row = json.loads(done.stdout.split("@@")[-1])
        grown = row["peaks"][-1] - row["peaks"][0]
        row["grown"] = grown
        rows[str(budget)] = row
        megabytes = [f"{x / 1e6:.1f} MB" for x in (row["states"] * row["state_bytes"], row["states_peak"], grown)]
        cells = [f"{budget / 1e6:.1f} MB", str(row["states"]), *megabytes]
        table.add_row(*cells, f"{statistics.median(row['seconds']):.2f}")
    Console().print(table)
    return rows


def uneven(arguments: argparse.Namespace) -> dict[str, Any]:
    from thinwire.systems import federated as fl
    from thinwire.systems.federated.builtin import digits

    torch.set_num_threads(1)
    table = Table(title="digits, 4 devices in turn, 40 of 100 clients a round: predicted against measured makespan")
    for column in ("schedule", "makespan", "to equal", "error of prediction, median"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    rows = {}
    for name in ("equal", "lpt", "pull"):
        made = digits(alpha=0.3)
        made.algorithm = fl.FedAvg(lr=0.1, batch_size=5, epochs=3)
        history = made.simulate(
            rounds=arguments.rounds, clients_per_round=40, devices=4, schedule=name, evaluate_every=0
        )
        kept = history.rounds[4:]
        errors = [abs((r.predicted_seconds or 0) / r.device_seconds - 1) for r in kept]
        rows[name] = {
            "makespan": statistics.median(r.device_seconds for r in kept),
            "error": statistics.median(errors),
        }
    for name, row in rows.items():
        ratio = row["makespan"] / rows["equal"]["makespan"]
        table.add_row(name, f"{row['makespan']:.4f} s", f"{ratio:.2f}", f"{row['error']:.0%}")
    Console().print(table)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["speed", "million", "uneven"])
    parser.add_argument("--flower", help="Python of an environment with flwr[simulation], torch and scikit-learn")
    parser.add_argument("--pfl", help="Python of an environment with pfl[pytorch] and scikit-learn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--flower-rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    kept = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    kept["machine"] = {"cores": os.cpu_count(), "processor": platform.processor(), "torch": torch.__version__}
    for part in arguments.parts:
        kept[part] = {"speed": speed, "million": million, "uneven": uneven}[part](arguments)
        arguments.out.parent.mkdir(exist_ok=True)
        arguments.out.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
