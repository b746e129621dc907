"""Seconds of compute on this device, by size: selection, orthogonalisation, products, memory passes, inversions.

Tensors come from a pool larger than the caches, and so do the outputs of sums, as in a training step.

Inversions and decompositions are measured from the packed triangle and, for inverses, back to one, as K-FAC keeps
factors and sends inverses: at a side of 512, packing and unpacking take half as long again as the inversion.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor

from thinwire.core.kernels.lowrank import project_right, rebuild
from thinwire.core.kernels.orthogonal import orthogonalise_all
from thinwire.core.kernels.select import keep_count, top_k
from thinwire.core.kernels.symmetric import damped_eigen, damped_inverse, pack_upper, unpack_upper
from thinwire.core.pricing.costs import Provenance, Table
from thinwire.predict.measure.result import Point, never_falling

Clock = Callable[[], float]


class Stopwatch:
    """Marks moments in the order of a device's work: with CUDA events, or with a clock elsewhere."""

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._events = device.type == "cuda" and clock is time.perf_counter

    def mark(self) -> Any:
        if not self._events:
            return self._clock()
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def settle(self) -> None:
        if self._events:
            torch.cuda.synchronize(self._device)

    def between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3 if self._events else end - start)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    call: Callable[[], object],
    device: torch.device,
    *,
    seconds: float,
    least: int = 3,
    most: int = 15,
    queued: int = 1,
    clock: Clock = time.perf_counter,
) -> float:
    """Return the median duration of a call after one untimed call, repeated for about that many seconds."""
    call()
    settle(device)
    times: list[float] = []
    began = clock()
    while len(times) < least or (len(times) < most and clock() - began < seconds):
        start = clock()
        for _ in range(queued):
            call()
        settle(device)
        times.append((clock() - start) / queued)
    return statistics.median(times)


KERNELS = ("select", "orthogonalise", "memory", "multiply", "thin")
"""The curves, named as in ``Costs.compute``."""
DENSITY = 0.01
LEAST_CALLS = 3
_QUEUED = 8
"""Calls that a GPU gets at once: in training too, a kernel is launched while the one before it runs."""
RANK, THIN = 16, 4  # the cost of products follows their FLOPs; with few columns, the large matrix

POOL = 1 << 25  # elements: 128 MiB
RANDOM = 1 << 22
SELECT = tuple(1 << n for n in range(12, 25, 2))
MEMORY = tuple(1 << n for n in range(12, 23, 2))
SQUARES = (64, 256, 1024, 2048, 4096)
TALL = ((64, 4), (256, 4), (1024, 4), (4096, 4), (4096, 16), (4096, 32))


def orthogonalise_flops(rows: int, columns: int) -> int:
    """Return 4 n r^2: a Householder QR, and the same again for its basis."""
    return 4 * rows * columns**2


def multiply_flops(rows: int, columns: int, rank: int) -> int:
    """Return 2 n m r: one product of an n x m matrix with a thin one."""
    return 2 * rows * columns * rank


def kernel_cases(
    device: torch.device,
    *,
    seconds: float,
    meet: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
    names: Sequence[str] = KERNELS,
    largest: int | None = None,
    least: int = LEAST_CALLS,
) -> Iterator[tuple[str, list[Point]]]:
    """Yield (name, points), curve after curve, each measured when it is requested. A point is (amount, seconds).

    Amounts are fp32 elements for "select" and "thin", bytes for "memory", FLOPs for the others; equal on all ranks, who
    ``meet`` before each curve. ``largest``: elements of the largest tensor, an eighth of the pool. ``least``: timed
    calls of each, however long they take; ``seconds``: of all.
    """
    pool_size, random = (POOL, RANDOM) if largest is None else (8 * largest, largest)
    generator = torch.Generator(device).manual_seed(0)
    pool = torch.randn(random, device=device, generator=generator).repeat(pool_size // random)
    whole = {
        "select": _select,
        "orthogonalise": _orthogonalise,
        "memory": _memory,
        "multiply": _multiply,
        "thin": _thin,
    }
    share = seconds / sum(map(len, (SELECT, TALL, MEMORY, SQUARES, SQUARES)))
    timed = functools.partial(
        median_seconds, device=device, seconds=share, least=least, queued=_QUEUED if device.type == "cuda" else 1,
        clock=clock,
    )  # fmt: skip
    for name in names:
        with torch.no_grad():
            meet()
            points = [(amount, timed(call) / parts) for amount, parts, call in whole[name](pool, largest or pool_size)]
        yield name, points


Case = tuple[float, int, Callable[[], object]]
"""Amount of one operation, operations per call, the call."""


def _pieces(pool: Tensor, size: int) -> Callable[[], Tensor]:
    """Return a function that gives another piece of the pool with each call."""
    places = pool.numel() // size
    turn = count()
    return lambda: pool.narrow(0, next(turn) % places * size, size)


def _select(pool: Tensor, largest: int) -> Iterator[Case]:
    for size in (size for size in SELECT if size <= largest):
        piece, k = _pieces(pool, size), keep_count(size, DENSITY)
        yield size, 1, lambda piece=piece, k=k: top_k(piece(), k)  # type: ignore[misc]


def _orthogonalise(pool: Tensor, largest: int) -> Iterator[Case]:
    for rows, columns in TALL:
        piece = _pieces(pool, rows * columns)
        yield (
            orthogonalise_flops(rows, columns),
            1,
            lambda piece=piece, shape=(rows, columns): orthogonalise_all(piece(), [shape]),  # type: ignore[misc]
        )


def _memory(pool: Tensor, largest: int) -> Iterator[Case]:
    """Add two pieces into a third: 3 passes, all over memory outside the caches."""
    for size in (size for size in MEMORY if size <= largest):
        piece = _pieces(pool, size)
        yield 3 * 4 * size, 1, lambda piece=piece: torch.add(piece(), piece(), out=piece())  # type: ignore[misc]


def _multiply(pool: Tensor, largest: int) -> Iterator[Case]:
    for side in (side for side in SQUARES if side * side <= largest):
        yield multiply_flops(side, side, RANK), 2, _products(pool, side, RANK)


def _thin(pool: Tensor, largest: int) -> Iterator[Case]:
    for side in (side for side in SQUARES if side * side <= largest):
        yield side * side, 2, _products(pool, side, THIN)


def _products(pool: Tensor, side: int, rank: int) -> Callable[[], None]:
    piece, thin = _pieces(pool, side * side), pool[: side * rank].view(1, side, rank)
    made = torch.empty_like(thin)

    def call() -> None:
        project_right(piece().view(1, side, side), thin, made)
        rebuild(thin, made, piece().view(1, side, side))

    return call


KINDS = ("inverse", "eigen")
"""The curves, named as in ``Costs.compute``."""
_SMALLEST = 64
_BETWEEN = 4  # interpolation points in each doubling


def sides(largest: int) -> list[int]:
    if largest < 1:
        raise ValueError(f"largest={largest} must be the side of a matrix, at least 1")
    return [_SMALLEST << n for n in range(max(0, math.ceil(math.log2(largest / _SMALLEST))) + 1)]


def inversion_points(
    kind: str,
    device: torch.device,
    *,
    largest: int = 4096,
    seconds: float = 5.0,
    clock: Clock = time.perf_counter,
    on_point: Callable[[int], None] = lambda d: None,
) -> list[Point]:
    """Return (side, seconds) at each of ``sides(largest)`` for "inverse" or "eigen", the same however long they take.

    A side that would not fit into ``seconds`` in all is estimated as the previous one times eight.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; use one of {', '.join(KINDS)}")
    began, found = clock(), list[Point]()
    for d in sides(largest):
        expected = 8 * found[-1][1] if found else 0.0
        left = seconds - (clock() - began)
        if found and 2 * expected > left:
            found.append((d, expected))
            continue
        on_point(d)
        draw = torch.Generator(device).manual_seed(d)
        rows = torch.randn(2 * d, d, device=device, generator=draw)
        packed = pack_upper(rows.mT @ rows / (2 * d))
        call = partial(_inverted if kind == "inverse" else _decomposed, packed)
        found.append((d, median_seconds(call, device, seconds=left / 8, least=1, most=7, clock=clock)))
    return found


def _inverted(packed: Tensor) -> Tensor:
    return pack_upper(damped_inverse(unpack_upper(packed), 1e-2)[0])


def _decomposed(packed: Tensor) -> Tensor:
    return damped_eigen(unpack_upper(packed))[0]


def curve(points: Sequence[Point], provenance: Provenance, source: str) -> Table:
    """Return a table over the side, linear in the logarithms of both: with points between, and one beyond by d^3."""
    known = never_falling([(float(d), s) for d, s in points])
    rising = [*known, (2 * known[-1][0], 8 * known[-1][1])]
    dense: list[tuple[float, float]] = []
    for (d0, s0), (d1, s1) in pairwise(rising):
        steps = [n / _BETWEEN for n in range(_BETWEEN)]
        dense += [(d0 * (d1 / d0) ** t, s0 * (s1 / s0) ** t if s0 > 0 else s0 + t * (s1 - s0)) for t in steps]
    return Table((*dense, rising[-1]), provenance, source)
