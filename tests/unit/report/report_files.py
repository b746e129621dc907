"""Files as the verbs write them, made by the library's own dataclasses, for the tests of the report."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import thinwire as tw
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import ModelProfile, ModuleTime, TensorTime
from thinwire.core.program import Topology
from thinwire.core.records import plain
from thinwire.predict.choose import Entry, Map, Ranking
from thinwire.predict.choose.grid import Cell
from thinwire.predict.timeline import simulate
from thinwire.predict.timeline.result import to_chrome_trace
from thinwire.tools.bench.demo import judge_demo
from thinwire.tools.bench.rows import Row
from thinwire.tools.bench.session import BenchSpec, Point, RowRecord, RunRecord
from thinwire.tools.bench.summary import summarise

LABELS = ("ddp", "thinwire ssgd", "thinwire acp")
SPEC = BenchSpec("mlp", tuple(Row(name, "ddp") for name in LABELS), link="10mbit", link_bits=10**7)


def record(labels=LABELS, curves=False):
    def row(label, seconds, kind="ddp"):
        curve = [Point(0, 0.0, math.nan, 5.0), Point(3, 3 * seconds, 2.0, 4.0)] if curves and kind == "ddp" else []
        return RowRecord(
            label,
            kind,
            step_seconds=[seconds - 0.1, seconds, seconds + 0.1],
            forward_seconds=[0.3] * 3,
            losses=[3.0, 2.5, 2.0],
            wire_bytes=8e6,
            wire_source="interface",
            host_seconds=[0.01] * 3,
            curve=curve,
        )

    rows = [row("compute", 1.0, "compute"), *(row(label, 4.0 - i) for i, label in enumerate(labels))]
    return RunRecord("a small model", 1_000_000, 10, 4_000_000, 2, "eth0", rows)


def bench(labels=LABELS, note="in network namespaces"):
    return asdict(summarise(SPEC, record(labels), emulated=True, note=note))


def demo(emulated=False):
    return asdict(judge_demo(SPEC, record(curves=True), emulated=emulated, note="no rights"))


def ranking(label="acp rank=4", bound="network bandwidth", sentence=""):
    def entry(name, exact, seconds):
        return Entry(name, name, {}, exact, exact, seconds, 0.9 * seconds, 1.2 * seconds, 0.1, 2_000_000, bound, 1,
                     1.0 if exact else None, None, "", 1.0, 0.0)  # fmt: skip

    entries = entry("ssgd", True, 0.5), entry(label, False, 0.2)
    return Ranking(
        "bert-base", 2, entries, entries[1], entries[1], entries[0], sentence or f"{label} is fastest"
    ).to_data()


def winners():
    def cell(winner, dense):
        return Cell(winner, "ssgd", 0.5, 0.5, dense, dense, f"the network bounds dense, not {winner}")

    cells = (cell("acp rank=4", 5.0), cell("topk density=0.01", 8.0)), (cell("ssgd", 0.5), cell("ssgd", 0.5))
    return {"model": "bert-base", **plain(Map((1e8, 1e10), (2, 16), cells))}


def six():
    names = [f"m{i}" for i in range(6)]
    tensors = tuple(TensorTime(f"{name}.w", (800, 500), 0.01) for name in names)
    modules = tuple(ModuleTime(name, 0.005) for name in reversed(names))
    return ModelProfile("six", tensors, 0.03, modules)


def timeline():
    return simulate(tw.SSGD(fusion="none"), six(), Topology(4), Costs.of_link(1e9, 1e-4, 4), optimizer_seconds=0.002)


def trace(label="predicted", slower=1.0):
    events = timeline().events
    slowed = [
        replace(e, start_seconds=e.start_seconds * slower, duration_seconds=e.duration_seconds * slower) for e in events
    ]
    return to_chrome_trace(slowed, label=label)


def write(folder, **data):
    """Writes each value as a file of its name; returns the paths."""
    paths = []
    for name, value in data.items():
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(value))
    return paths
