"""The cost of selection, orthogonalisation, thin products and memory passes on this device, by size.

Tensors come from a pool larger than the caches, and so do the outputs of sums, as in a training step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from thinwire.core.kernels.lowrank import orthogonalise, project_right, rebuild
from thinwire.core.kernels.select import keep_count, top_k
from thinwire.predict.measure.fit import Point
from thinwire.predict.measure.timing import Clock, median_seconds

KERNELS = ("select", "orthogonalise", "memory", "multiply", "thin")
"""The curves, named as in ``planner.Costs.compute``."""
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
    """Yield (name, points), curve after curve: each is measured when it is requested. A point is (amount, seconds).

    Amounts are fp32 elements for "select" and "thin", bytes for "memory", FLOPs for the others; equal on all ranks.

    Args:
        device: device that computes.
        seconds: total time.
        meet: called before each curve.
        clock: returns seconds.
        names: names of the curves.
        largest: elements of the largest tensor, an eighth of the pool; None: as large as is useful.
        least: number of timed calls of each, however long they take.
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
            lambda piece=piece, rows=rows: orthogonalise(piece().view(rows, -1)),  # type: ignore[misc]
        )


def _memory(pool: Tensor, largest: int) -> Iterator[Case]:
    """Add two pieces into a third: 3 passes, all over memory outside the caches."""
    for size in (size for size in MEMORY if size <= largest):
        piece = _pieces(pool, size)
        yield 3 * 4 * size, 1, lambda piece=piece: torch.add(piece(), piece(), out=piece())  # type: ignore[misc]


def _multiply(pool: Tensor, largest: int) -> Iterator[Case]:
    """Measure a projection and a reconstruction, as in ``kernels.lowrank``."""
    for side in (side for side in SQUARES if side * side <= largest):
        yield multiply_flops(side, side, RANK), 2, _products(pool, side, RANK)


def _thin(pool: Tensor, largest: int) -> Iterator[Case]:
    """Measure the same with few columns, by the elements of the large matrix."""
    for side in (side for side in SQUARES if side * side <= largest):
        yield side * side, 2, _products(pool, side, THIN)


def _products(pool: Tensor, side: int, rank: int) -> Callable[[], None]:
    piece, thin = _pieces(pool, side * side), pool[: side * rank].view(side, rank)

    def call() -> None:
        rebuild(thin, project_right(piece().view(side, side), thin), piece().view(side, side))

    return call
