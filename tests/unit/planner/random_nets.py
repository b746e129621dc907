"""Random nets and costs, the reference case, and brute force: what the tests of the planner share."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from thinwire.core.pricing.costs import Linear, Table

SHAPE_FILE = Path(__file__).parents[2] / "golden" / "resnet50_shape.json"


@dataclass
class Net:
    sizes: list[int]
    seconds: list[float]


def log_uniform(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def net(draw: random.Random, least: int, most: int) -> Net:
    count = draw.randint(least, most)
    sizes = [int(log_uniform(draw, 64, 4e6)) if draw.random() > 0.05 else 0 for _ in range(count)]
    seconds = [log_uniform(draw, 1e-5, 5e-3) if draw.random() > 0.05 else 0.0 for _ in range(count)]
    return Net(sizes, seconds)


def sort_seconds(d: int) -> float:
    return 2.18896957e-10 * d * math.log2(d) if d > 1 else 0.0


def exchange(draw: random.Random, kind: str):
    """elements -> seconds: affine, a measured table, or anything at all."""
    if kind == "affine":
        line = Linear(log_uniform(draw, 1e-6, 1e-2), draw.choice([0.0, log_uniform(draw, 1e-11, 1e-8)]))
        return lambda d: line(4 * d)
    if kind == "table":
        sizes = sorted({int(log_uniform(draw, 1e3, 1e7)) for _ in range(5)})
        seconds = sorted(log_uniform(draw, 1e-5, 5e-2) for _ in sizes)
        table = Table(tuple(zip(sizes, seconds, strict=True)))
        return lambda d: table(4 * d)
    salt = draw.randrange(1 << 30)
    return lambda d: random.Random(d * 1_000_003 + salt).uniform(0, 5e-3)


KINDS = ("affine", "table", "any")


def brute_force(n: Net, price, select=None, *, side_stream=False, breaks=(), max_elements=None) -> float:
    """The earliest end over all groupings, one by one."""
    count = len(n.sizes)

    def allowed(i: int, j: int) -> bool:
        if any(i < b < j for b in breaks):
            return False
        return max_elements is None or j == i + 1 or sum(n.sizes[i:j]) <= max_elements

    groups = {
        (i, j): (sum(n.seconds[i:j]), select(sum(n.sizes[i:j])) if select else 0.0, price(sum(n.sizes[i:j])))
        for i in range(count)
        for j in range(i + 1, count + 1)
        if allowed(i, j)
    }

    def rest(i: int, compute: float, chosen: float, link: float) -> float:
        if i == count:
            return link
        ends = []
        for j in range(i + 1, count + 1):
            if (i, j) not in groups:
                continue
            backward, work, message = groups[i, j]
            clock = compute + backward
            if select is None:
                ends.append(rest(j, clock, 0.0, max(link, clock) + message))
            elif side_stream:
                ready = max(chosen, clock) + work
                ends.append(rest(j, clock, ready, max(link, ready) + message))
            else:
                clock += work
                ends.append(rest(j, clock, 0.0, max(link, clock) + message))
        return min(ends)

    return rest(0, 0.0, 0.0, 0.0)


def resnet50(total_seconds: float) -> Net:
    """The reference case: torchvision's tensors in backward order, times as the square root of the size."""
    sizes = [math.prod(shape) for _, shape in json.loads(SHAPE_FILE.read_text())["tensors"]]
    roots = [math.sqrt(d) for d in sizes]
    return Net(sizes, [total_seconds * r / sum(roots) for r in roots])
