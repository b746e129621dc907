"""LAGS: how many elements of each layer may be sent before the next gradient needs the link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thinwire.core.checks import check_number, check_seconds, check_sizes
from thinwire.core.pricing.merge import Price, priced
from thinwire.core.records import Record


@dataclass(frozen=True)
class Ratios(Record):
    """Kept elements per layer, in backward order, all of ``dense`` ones; ``finish_seconds`` from backward's start.

    Part of the plan: a different count on one rank breaks the exchange.
    """

    called: ClassVar[str] = "a list of thinwire ratios"

    kept: list[int]
    dense: list[bool]
    finish_seconds: float

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __post_init__(self) -> None:
        if len(self.kept) != len(self.dense):
            raise ValueError("kept and dense differ in length")


def lags(
    sizes: Sequence[int],
    backward_seconds: Sequence[float],
    select_seconds: Price,
    exchange_seconds: Price,
    allreduce_seconds: Price,
    max_ratio: float = 1000,
    *,
    exposed_seconds: float = 0.0,
    side_stream: bool = False,
) -> Ratios:
    """Give each layer as many elements as its exchange can hide until the next gradient is ready.

    A layer is dense if its all-reduce can be hidden. It is not made dense merely because that is cheaper than selection
    and exchange: otherwise more bandwidth could lead to fewer elements.

    Args:
        sizes: elements per layer, in backward order.
        backward_seconds: backward time of each layer, from the previous gradient to this one.
        select_seconds, allreduce_seconds: as functions of a layer's elements.
        exchange_seconds: as a function of the *kept* elements; non-decreasing.
        max_ratio: a layer of d elements sends at least d / max_ratio.
        exposed_seconds: time that the last layer's exchange may add to the step.
        side_stream: selection runs alongside backward.

    Returns:
        Kept counts; a layer without elements sends nothing and counts as dense.
    """
    sizes = check_sizes(sizes)
    seconds = check_seconds(backward_seconds, len(sizes))
    check_number("max_ratio", max_ratio, least=1)
    check_number("exposed_seconds", exposed_seconds, least=0)
    compute = link = selected = 0.0
    kept: list[int] = []
    dense: list[bool] = []
    for d, step, hide in zip(sizes, seconds, [*seconds[1:], exposed_seconds]):
        compute += step
        whole = max(link, compute) + priced("allreduce_seconds", allreduce_seconds, d) if d else link
        dense.append(d == 0 or whole <= compute + hide)
        if dense[-1]:
            kept.append(d)
            link = whole
            continue
        work = priced("select_seconds", select_seconds, d)
        if side_stream:
            ready = selected = max(selected, compute) + work
        else:
            ready = compute = compute + work
        start = max(link, ready)
        kept.append(_largest(exchange_seconds, start, compute + hide, max(1, int(-(-d // max_ratio))), d))
        link = start + priced("exchange_seconds", exchange_seconds, kept[-1])
    return Ratios(kept, dense, max(link, compute) if sizes else 0.0)


def _largest(exchange_seconds: Price, start: float, deadline: float, low: int, high: int) -> int:
    """Return the largest count in [low, high] whose exchange ends by the deadline, or ``low`` if there is none."""

    def fits(k: int) -> bool:
        return start + priced("exchange_seconds", exchange_seconds, k) <= deadline

    if fits(high):
        return high
    while high - low > 1:  # high does not fit; low fits, or is the minimum
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
