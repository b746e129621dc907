"""Members of a server that are slow, die, stand still and come back: what that costs.

``python benchmarks/members.py run`` trains a character GPT by local steps through a server in the lab, at 100 Mb/s, on
four nodes of which one is half as fast and another is killed; once as the settings come, and once so that every round
waits for all. Draws the held-out loss over seconds. ``... faults`` trains with real processes and TLS, without a lab:
undisturbed, then with random kills (members come back a second later) and random stops, and reports the longest time
for which a member that was let alone waited for a round. Writes ``benchmarks/results/members.json``. Run it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from thinwire import parameter_server as ps
from thinwire.tools.bench.models.registry import build_model

RESULTS = Path(__file__).parent / "results" / "members.json"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "members.png"
MODEL = "chargpt:layers=3:width=96:heads=3:lr=0.003:beta2=0.95:held_out=64:scaled_init=true"
SETTINGS = {
    "own pace": "local:sync_every=8:codec=int2",
    "all in step": "local:sync_every=8:codec=int2:quorum=nodes:grace=600:balance=false",
}
SECONDS, KILL, LINK = 120.0, 60, "100mbit"
MEMBERS, ROUNDS, EVERY, PACE = 4, 900, 4, 0.05


def run() -> dict[str, Any]:
    """Train both ways in the lab, and draw the losses."""
    from thinwire.systems.cli.ps import PsRunVerb
    from thinwire.tools.cli.console import Output

    found: dict[str, Any] = {"model": MODEL, "link": LINK}
    for name, settings in SETTINGS.items():
        spec = PsRunVerb(
            model=MODEL, settings=settings, link=LINK, pace=0.15, slow=["3:2"], kill=[f"1:{KILL}"], seconds=SECONDS,
            evaluate_every=4, timeout=SECONDS + 120,
        )  # fmt: skip
        result = spec.run(Output())
        found[name] = {"points": [[s, loss] for s, _, loss in result["losses"]], "happened": result["happened"]}
    draw(found)
    return found


def draw(found: dict[str, Any]) -> None:
    from thinwire.tools.pictures import Mark, Panel, Picture, Series, write_picture

    lines = tuple(Series(name, *map(tuple, zip(*found[name]["points"]))) for name in SETTINGS)
    marks = (Mark(KILL, "node 1 dies, and comes back"),)
    title = f"A character GPT on 4 nodes, one of half the speed, links of {LINK}"
    write_picture(Picture(title, (Panel("seconds", "held-out loss", lines, marks, y_range=(2.2, 3.1)),)), PICTURE)


def member(port: str, number: str, keys: str, report: str) -> None:
    """A loop as a user writes it, that notes how long it waited for each round."""
    torch.set_num_threads(1)
    workload = build_model(MODEL, 0)
    model, optimizer = workload.model, workload.optimizer(workload.model)
    with tw.attach(model, optimizer, "local", server=f"127.0.0.1:{port}", keys=keys, node=int(number)) as sync:
        batch = int(time.time() * 1000) % 1_000_000
        for _ in sync.steps():
            began = time.monotonic()
            workload.loss(model, batch, int(number)).backward()
            time.sleep(max(0.0, began + PACE - time.monotonic()))
            stepping = time.monotonic()
            optimizer.step()
            optimizer.zero_grad()
            with open(report, "a") as file:
                file.write(f"{stepping} {time.monotonic()}\n")
            batch += 1


def disturbed(kills: int, stops: int, seed: int, folder: Path) -> dict[str, Any]:
    """Train once, with so many random kills and stops; member 0 is let alone."""
    workload, result, report = build_model(MODEL, 0), list[ps.Status](), folder / f"report{seed}"
    settings = ps.presets.local(EVERY, quorum=2, start_nodes=MEMBERS)
    port = 29600 + seed

    def serve() -> None:
        keys = folder / "keys" / "server"
        result.append(ps.serve(workload.model, settings=settings, port=port, updates=ROUNDS, keys=keys))

    def start(number: int) -> subprocess.Popen[bytes]:
        own = [str(port), str(number), str(folder / "keys" / f"m{number}"), str(report if number == 0 else "/dev/null")]
        return subprocess.Popen([sys.executable, __file__, "member", *own])

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    running = {number: start(number) for number in range(MEMBERS)}
    draw, done = random.Random(seed), Counter[str]()
    events = sorted([(draw.random(), "kill") for _ in range(kills)] + [(draw.random(), "stop") for _ in range(stops)])
    back: list[tuple[float, int, str]] = []  # when a member comes back
    length, began = ROUNDS * EVERY * PACE, time.monotonic()
    while server.is_alive():
        now = time.monotonic()
        for event in [one for one in back if one[0] <= now]:
            back.remove(event)
            if event[2] == "kill":
                running[event[1]] = start(event[1])
            else:
                os.kill(running[event[1]].pid, signal.SIGCONT)
        free = sorted(set(range(1, MEMBERS)) - {number for _, number, _ in back})
        if events and free and now - began > 10 + events[0][0] * length:
            what, number = events.pop(0)[1], draw.choice(free)
            done[what] += 1
            if what == "kill":
                running[number].kill()
                running[number].wait()
            else:
                os.kill(running[number].pid, signal.SIGSTOP)
            back.append((now + (1.0 if what == "kill" else draw.uniform(5, 40)), number, what))
        time.sleep(0.05)
    for one in running.values():
        if one.poll() is None:
            os.kill(one.pid, signal.SIGCONT)
        try:
            one.wait(30)
        except subprocess.TimeoutExpired:
            one.kill()
    steps = [[float(x) for x in line.split()] for line in report.read_text().splitlines()]
    waits = sorted(end - begin for begin, end in steps[5 * EVERY :])
    status = result[0]
    return {
        "kills": done["kill"], "stops": done["stop"], "rounds": status.version, "changes": status.gradients,
        "mean_staleness": status.mean_staleness, "max_staleness": status.max_staleness, "counters": status.counters,
        "seconds": status.seconds, "longest_wait": waits[-1], "loss": workload.held_out_loss(),
    }  # fmt: skip


def faults() -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        names = ",".join(["server", *(f"m{number}" for number in range(MEMBERS))])
        keys = [sys.executable, "-m", "thinwire", "keys", "new", f"{folder}/keys", "--names", names]
        subprocess.run([*keys, "--host", "127.0.0.1"], check=True)
        for seed, (name, kills, stops) in enumerate((("undisturbed", 0, 0), ("kills", 30, 0), ("stops", 0, 20))):
            found[name] = disturbed(kills, stops, seed, Path(folder))
            print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    if sys.argv[1:2] == ["member"]:
        member(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "faults"))
    what = parser.parse_args().what
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[what] = {"load": os.getloadavg()[0], **(run() if what == "run" else faults())}
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
