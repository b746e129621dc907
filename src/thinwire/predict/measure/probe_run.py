"""The steps of a probe, piece by piece: which message is next and how often, what is known, how much time is left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from thinwire.core.pricing.curves import Curve, Table
from thinwire.core.pricing.formulas import KINDS
from thinwire.core.program.ops import Scope
from thinwire.predict.measure.fit import never_falling
from thinwire.predict.measure.kernels import KERNELS, LEAST_CALLS, kernel_cases
from thinwire.predict.measure.result import Measurement, ProbeResult
from thinwire.predict.measure.wire import ExchangeTimer

Progress = Callable[[float, str], None]
"""Called with the finished share and what comes next."""

SMALLEST = 4 << 10
LARGEST = 16 << 20
_MOST = 1 << 36
_STRIDES = (4, 2, 1)
_SLICE_SECONDS = 0.5
MOST_REPEATS = 15
_ALWAYS = 2  # sizes that are always measured: without two there is no rate
_MOST_BYTES = 1 << 30  # largest output of an all-gather


def message_sizes(smallest: int = SMALLEST, largest: int = LARGEST) -> list[int]:
    """Return sizes in bytes: powers of two times the smallest, and the largest.

    Raises:
        ValueError: the largest is below twice the smallest, so no line could be fitted, or no machine could hold it.
    """
    if not 2 * smallest <= largest <= _MOST:
        raise ValueError(
            f"the largest message must be at least {2 * smallest} bytes and at most {_MOST}, not {largest}"
        )
    sizes = [smallest]
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == largest else [*sizes, largest]


def coarse_to_fine(sizes: list[int]) -> list[int]:
    """Put both ends and a few between first, then the rest: if time runs out, the curve is still covered."""
    order: list[int] = []
    for stride in _STRIDES:
        chosen = [*range(0, len(sizes), stride), *([len(sizes) - 1] if stride == _STRIDES[0] else [])]
        order += [i for i in dict.fromkeys(chosen) if i not in order]
    return [sizes[i] for i in order]


def expected_seconds(size: int, measured: Mapping[int, float]) -> float:
    """Return an upper estimate: the next smaller message scaled up, or the next larger one as it is; 0 if unknown."""
    above = [known for known in measured if known >= size]
    below = [known for known in measured if known < size]
    bounds = [measured[min(above)]] if above else []
    if below:
        bounds.append(measured[max(below)] * size / max(below))
    return min(bounds, default=0.0)


def repeats(first_seconds: float, share_seconds: float) -> int:
    """Return the number of runs, given the first one's time: half a second's worth, 3 up to that time each, 1 if long.

    Never more than half of the share, so that time is left for the sizes between.
    """
    wanted = min(share_seconds / 2, max(_SLICE_SECONDS, min(3 * first_seconds, 3 * _SLICE_SECONDS)))
    return max(1, min(MOST_REPEATS, int(wanted / max(first_seconds, 1e-6) + 1e-6)))


class ProbeRun:
    """One probe. All ranks call every method, and advance every generator, together.

    Args:
        wire: times exchanges.
        seconds: time for the exchanges; what does not fit is left out, the largest messages first.
        most: largest number of repeats of one measurement.
        least_share: least share of the time for one measurement.
        on_progress: see ``Progress``.

    Attributes:
        elapsed: seconds spent on measuring exchanges so far, on the slowest rank.
        exchanged: number of exchanges timed so far.
    """

    def __init__(
        self,
        wire: ExchangeTimer,
        seconds: float,
        *,
        most: int = MOST_REPEATS,
        least_share: float = 0.0,
        on_progress: Progress = lambda done, text: None,
    ) -> None:
        self._wire, self._seconds, self._progress = wire, seconds, on_progress
        self._most, self._least_share = most, least_share
        self.elapsed, self.exchanged = 0.0, 0
        self._known: dict[tuple[str, Scope], dict[int, float]] = {}  # slowest group's seconds by nominal size
        self._found: list[Measurement] = []
        self._dropped: list[tuple[str, str, int, int]] = []
        self._flow: float | None = None
        self._compute: dict[str, Curve] = {}

    @property
    def always(self) -> int:
        """Number of the first exchange measurements, which are always made."""
        return _ALWAYS * len(KINDS) * len(self._wire.scopes)

    def exchanges(self, sizes: Sequence[int]) -> Iterator[None]:
        """Measure every operation in every scope, coarse sizes first; yields after each measurement."""
        wanted = [(kind, scope) for scope in self._wire.scopes for kind in KINDS]
        order = coarse_to_fine(list(sizes))
        for position, size in enumerate(order):
            for i, (kind, scope) in enumerate(wanted):
                self._progress(0.9 * (position + i / len(wanted)) / len(order), f"{kind} {scope.value} {size} bytes")
                known = self._known.setdefault((kind, scope), {})
                share = max(0.0, self._seconds - self.elapsed) / (len(wanted) - i)
                if position < _ALWAYS or (
                    2 * expected_seconds(size, known) <= share and size * self._wire.members(scope) <= _MOST_BYTES
                ):
                    self._measure(kind, scope, size, max(share, self._least_share))
                    yield
                else:
                    self._dropped += [
                        (kind, scope.value, n, self._wire.message_bytes(size, n)) for n in self._wire.counts(scope)
                    ]

    def flow(self) -> None:
        """Measure one pair of ranks that exchanges alone, with the size of the largest measured broadcast."""
        size, lasted = max(self._known["Broadcast", Scope.WORLD].items())
        times = self._wire.time_flow(size, repeats(lasted, max(1.0, self._seconds - self.elapsed)))
        self._flow = 8 * size / max(statistics.median(of_rank.seconds) for of_rank in times)

    def _measure(self, kind: str, scope: Scope, size: int, share: float) -> None:
        began, count = time.perf_counter(), 1
        # The first opens connections. NCCL opens more whenever it changes its protocol with the size.
        if not self._known[kind, scope] or self._wire.device.type == "cuda":
            self._wire.time(kind, scope, size, 1)
            count += 1
        times = self._wire.time(kind, scope, size, 1)
        more = min(self._most, repeats(max(of_rank.seconds[0] for of_rank in times), share)) - 1
        if more:
            times = [a + b for a, b in zip(times, self._wire.time(kind, scope, size, more))]
        for members in self._wire.counts(scope):
            group = [t for t, n in zip(times, self._wire.counts_of_ranks(scope)) if n == members]
            seconds = max(statistics.median(t.seconds) for t in group)
            cpu = max(statistics.median(t.cpu_seconds) for t in group) if self._wire.counts_cpu else None
            sent = self._wire.message_bytes(size, members)
            self._found.append(Measurement(kind, scope.value, members, sent, seconds, more + 1, cpu))
            slowest = self._known[kind, scope].get(size, 0.0)
            self._known[kind, scope][size] = max(slowest, seconds)
        self.exchanged += count + more
        self.elapsed += max(self._wire.gather([time.perf_counter() - began]))[0]

    def kernels(
        self,
        seconds: float,
        source: str,
        *,
        names: Sequence[str] = KERNELS,
        largest: int | None = None,
        least: int = LEAST_CALLS,
    ) -> Iterator[None]:
        """Measure compute on all ranks at once, counting the slowest; yields after each curve.

        Arguments as in :func:`~thinwire.measure.kernels.kernel_cases`; ``source``: recorded in the curves.
        """
        self._progress(0.9, "compute")
        for name, points in kernel_cases(
            self._wire.device, seconds=seconds, meet=self._wire.meet, names=names, largest=largest, least=least
        ):
            slowest = [max(column) for column in zip(*self._wire.gather([y for _, y in points]))]
            pairs = [(x, y) for (x, _), y in zip(points, slowest)]
            self._compute[name] = Table(never_falling(pairs), "measured here", source)
            yield

    def result(self, backend: str, layout: tuple[int, ...], source: str) -> ProbeResult:
        """Return what was found so far."""
        found = tuple(sorted(self._found, key=lambda m: (*m.key, m.bytes)))
        dropped = tuple(sorted(self._dropped))
        return ProbeResult(source, backend, layout, found, dropped, self._flow, dict(self._compute), self.elapsed)
