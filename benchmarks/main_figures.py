"""Rerun the main figures on this machine: ``python benchmarks/main_figures.py --only a,b``.

Prints a table with the target beside every figure and writes ``benchmarks/results/main_figures.json``. Figures
that were not rerun stay in the file. Part f (loss over 1000 steps) runs only with ``--loss`` or ``--only f``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import in_lab
from thinwire.tools import lab
from thinwire.tools.bench.row_on_rank import dense_ring_bytes
from thinwire.tools.bench.rows import parse_rows
from thinwire.tools.bench.session import BenchSpec, Point, run_session
from thinwire.tools.bench.summary import BenchResult, bench_table, floor

RESULTS = Path(__file__).parent / "results" / "main_figures.json"
NONE = float("inf")  # shown without a target
NOISE = 1.02  # "never slower" is read as: within the noise of two equal programs


@dataclass(frozen=True)
class Figure:
    """A measured number beside its target; ``at_most`` says on which side it shall be."""

    part: str
    what: str
    value: float
    target: float
    at_most: bool = True
    unit: str = "x"

    @property
    def met(self) -> bool:
        """Whether the value reaches the target."""
        return self.value <= self.target if self.at_most else self.value >= self.target


def measure(
    model: str, methods: str, *, workers: int = 2, link: str | None = None, steps: int = 8, rounds: int = 3
) -> BenchResult:
    result = in_lab.run(model, methods, workers, link, steps=steps, rounds=rounds)
    Console(stderr=True).print(bench_table(result))
    failed = [f"{row.label}: {row.error}" for row in result.rows if row.error]
    if failed:
        raise RuntimeError("; ".join(failed))
    return result


def seconds(result: BenchResult, label: str) -> float:
    found = result.row(label).step_seconds
    assert found is not None
    return found


def of_batch(batch: int, block: int = 64) -> str:
    """Words for a batch that is not the model's own: with less compute the exchange counts for more."""
    return ("" if batch == 8 else f", batch {batch}") + ("" if block == 64 else f" x {block}")


def part_a(options: argparse.Namespace) -> Iterator[Figure]:
    yield from exact("a", options, 2, (8, 4))


def part_i(options: argparse.Namespace) -> Iterator[Figure]:
    """As part a, with four workers: on two cores each shares one."""
    yield from exact("i", options, 4, (8, 4))


def exact(part: str, options: argparse.Namespace, workers: int, batches: Sequence[int]) -> Iterator[Figure]:
    for batch in options.batch or batches:
        for link in ("1gbit", None):
            model = f"chargpt:batch={batch}"
            r = measure(model, "ddp,ddp-best,ssgd", workers=workers, link=link, rounds=options.rounds)
            ours, default, best = seconds(r, "ssgd"), seconds(r, "ddp"), seconds(r, "ddp-best")
            where = f"{workers} workers, {link or 'no limit'}" + of_batch(batch)
            yield Figure(part, f"ssgd / ddp default, {where}", ours / default, 0.87 if link else NOISE)
            if link:
                yield Figure(part, f"ssgd / ddp best, {where}", ours / best, 1.03)
                yield Figure(part, f"ssgd / floor, {where}", ours / r.floor_seconds, NONE)


def part_b(options: argparse.Namespace) -> Iterator[Figure]:
    for workers, model in ((2, "chargpt:batch=16"), (4, "chargpt:batch=8")):
        r = measure(model, "acp:rank=4", workers=workers, link="100mbit", rounds=options.rounds)
        where = f"compute alone, {workers} workers, 100mbit"
        yield Figure("b", where, r.compute_seconds * 1e3, NONE, unit="ms")
        yield Figure("b", f"acp rank 4 / {where}", seconds(r, "acp rank=4") / r.compute_seconds, 1.15)


def part_c(options: argparse.Namespace) -> Iterator[Figure]:
    r = measure("mlp", "ssgd,acp:rank=4", workers=options.workers, link="1gbit", steps=5, rounds=options.rounds)
    what = f"ssgd / acp rank 4, mlp 100 M, {options.workers} workers, 1gbit"
    yield Figure("c", what, seconds(r, "ssgd") / seconds(r, "acp rank=4"), 4.06, at_most=False)


def part_d(options: argparse.Namespace) -> Iterator[Figure]:
    methods = "torch-powersgd:rank=32,powersgd:rank=32:fusion=single,powersgd:rank=32,acp:rank=32"
    r = measure("chargpt", methods, workers=options.workers, link="100mbit", rounds=options.rounds)
    acp, where = seconds(r, "acp rank=32"), f"chargpt, {options.workers} workers, 100mbit"
    for label, words, target in (
        ("torch-powersgd rank=32", "torch's PowerSGD hook", 1.43),
        ("powersgd rank=32 fusion=single", "powersgd in one bucket, as published", 1.43),
        ("powersgd rank=32", "our powersgd, overlapped", NONE),
    ):
        yield Figure("d", f"{words} / acp, rank 32, {where}", seconds(r, label) / acp, target, at_most=False)


def part_e(options: argparse.Namespace) -> Iterator[Figure]:
    os.environ["THINWIRE_LAB_MODE"] = "loopback"
    try:
        many = measure("mlp:width=32:layers=200", "ddp,ssgd", steps=40, rounds=options.rounds)
        one = measure("chargpt", "ddp,ssgd", rounds=options.rounds)
    finally:
        del os.environ["THINWIRE_LAB_MODE"]
    host = {row.label: row.host_seconds or 0.0 for row in many.rows}
    for label, target in (("ssgd", 15.0), ("ddp", NONE)):
        each = (host[label] - host["compute"]) / many.tensors * 1e6
        yield Figure("e", f"{label}: main thread per parameter, {many.tensors} tensors", each, target, unit="us")
    yield Figure("e", "ssgd / ddp, many small tensors, loopback", seconds(many, "ssgd") / seconds(many, "ddp"), 1.05)
    yield Figure("e", "ssgd / ddp, chargpt, loopback", seconds(one, "ssgd") / seconds(one, "ddp"), 1.05)


def part_f(options: argparse.Namespace) -> Iterator[Figure]:
    """A task that S-SGD learns to its end, and one that it does not: there compression costs steps."""
    for model, target in (("digits", 1.02), ("chargpt:layers=2:width=96:heads=4:block=32", NONE)):
        spec = BenchSpec(
            model,
            parse_rows("ssgd,acp:rank=4,topk:density=0.01"),
            steps=options.loss_steps,
            warmup=0,
            every=max(options.loss_steps // 20, 1),
            curves=True,
        )
        print(f"... {model}: loss over {spec.steps} steps", file=sys.stderr, flush=True)
        record, _ = run_session(spec, functools.partial(lab.run, lab.Cluster(spec.workers)))
        final = {row.label: _late(row.curve) for row in record.rows if row.curve and not row.error}
        for label, loss in final.items():
            if label != "ssgd":
                what = f"held-out loss {label} / ssgd, {model.split(':')[0]}, {spec.steps} steps"
                yield Figure("f", what, loss / final["ssgd"], target)


def part_g(options: argparse.Namespace) -> Iterator[Figure]:
    """The decoupled schedule."""
    shapes = [(batch, 64) for batch in options.batch or (8, 4, 3, 2)]
    shapes += [(2, 80)] if (2, 64) in shapes else []
    for workers, (batch, block) in itertools.product((2, 4), shapes):
        yield from decoupled("g", options, workers, batch, block)


def part_j(options: argparse.Namespace) -> Iterator[Figure]:
    """As part g with torch's default AdamW, whose longer update DDP cannot hide."""
    for workers, block in itertools.product((2, 4), (56, 64)):
        yield from decoupled("j", options, workers, 2, block, fused=False)


def decoupled(
    part: str, options: argparse.Namespace, workers: int, batch: int, block: int, *, fused: bool = True
) -> Iterator[Figure]:
    """Its floor has no forward before the exchange: max(compute, ring bytes / rate)."""
    model = f"chargpt:batch={batch}:block={block}" + ("" if fused else ":fused=false")
    r = measure(model, "ddp,ssgd,dear", workers=workers, link="1gbit", rounds=options.rounds)
    ours = seconds(r, "dear")
    where = f"{workers} workers, 1gbit" + of_batch(batch, block) + ("" if fused else ", default AdamW")
    ring = dense_ring_bytes(r.gradient_bytes, workers)
    least = floor(r.compute_seconds, 0.0, ring, lab.parse_rate("1gbit"))
    yield Figure(part, f"dear / ddp default, {where}", ours / seconds(r, "ddp"), 0.75)
    yield Figure(part, f"dear / ssgd, {where}", ours / seconds(r, "ssgd"), NONE)
    yield Figure(part, f"dear / max(compute, exchange), {where}", ours / least, 1.15)


def part_h(options: argparse.Namespace) -> Iterator[Figure]:
    r = measure("chargpt:batch=16", "acp:rank=4,acp:rank=4:decoupled=true", link="200mbit", rounds=options.rounds)
    coupled, decoupled = seconds(r, "acp rank=4"), seconds(r, "acp rank=4 decoupled=True")
    where = "compute alone, 2 workers, 200mbit"
    yield Figure("h", where, r.compute_seconds * 1e3, NONE, unit="ms")
    yield Figure("h", f"acp rank 4 / {where}", coupled / r.compute_seconds, 1.15)
    yield Figure("h", f"acp rank 4 decoupled / {where}", decoupled / r.compute_seconds, 1.15)
    spread = r.row("acp rank=4").spread_seconds or 0.0
    yield Figure("h", "acp rank 4 decoupled / coupled, 2 workers, 200mbit", decoupled / coupled, 1 + spread / coupled)


def _late(curve: Sequence[Point]) -> float:
    """The mean over the last quarter: at a constant learning rate single points are noisy."""
    losses = [point.validation for point in curve if point.validation is not None]
    last = losses[-max(1, len(losses) // 4) :]
    return sum(last) / len(last)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {
    "a": part_a,
    "b": part_b,
    "c": part_c,
    "d": part_d,
    "e": part_e,
    "f": part_f,
    "g": part_g,
    "h": part_h,
    "i": part_i,
    "j": part_j,
}


def show(figures: list[Figure]) -> None:
    table = Table("part", "figure", "measured", "target", "met")
    for f in figures:
        target = "-" if f.target == NONE else f"{'<=' if f.at_most else '>='} {f.target:g}"
        met = "-" if target == "-" else "yes" if f.met else "NO"
        table.add_row(f.part, f.what, f"{f.value:.3f} {f.unit}", target, met)
    Console().print(table)


def save(figures: list[Figure]) -> None:
    kept = json.loads(RESULTS.read_text())["figures"] if RESULTS.exists() else []
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
    load = round(os.getloadavg()[0], 1)  # far above the number of workers: something else was running
    again = {(f.part, f.what) for f in figures}
    rows = [row for row in kept if (row["part"], row["what"]) not in again]
    for f in figures:
        target = None if f.target == NONE else f.target
        row = {"part": f.part, "what": f.what, "value": f.value, "unit": f.unit, "target": target, "met": f.met}
        rows.append({**row, "load_average": load})
    RESULTS.parent.mkdir(exist_ok=True)
    rows.sort(key=lambda row: row["part"])
    RESULTS.write_text(json.dumps({"machine": machine, "figures": rows}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="a,b,c,d,e,g,h,i,j", help="parts, as a,b")
    parser.add_argument("--loss", action="store_true", help="also part f")
    parser.add_argument("--loss-steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, action="append", help="only this batch, of parts a, g and i; repeatable")
    parser.add_argument("--workers", type=int, default=2, help="of parts c and d")
    options = parser.parse_args()
    parts = [part.strip() for part in options.only.split(",")] + (["f"] if options.loss else [])
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {min(unknown)!r}; there is {', '.join(PARTS)}")
    figures: list[Figure] = []
    for part in dict.fromkeys(parts):
        figures += PARTS[part](options)
        save([f for f in figures if f.part == part])
    show(figures)


if __name__ == "__main__":
    main()
