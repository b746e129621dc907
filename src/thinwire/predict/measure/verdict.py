"""The figures of a probe, summarised in sentences."""

from __future__ import annotations

from thinwire.core.pricing.costs import Key
from thinwire.predict.measure.kernels import KERNELS
from thinwire.predict.measure.result import ProbeResult

_FALLS = 0.7  # of the best bus bandwidth
_BENT = 0.25  # of a measured time
_COUNTS = 64 << 10  # bytes: below this, a large relative error is a small absolute one


def verdict(result: ProbeResult) -> list[str]:
    """Describe the all-reduce in one line, then anything unusual: a kink, a slow collective, sizes left out."""
    said: list[str] = []
    series = result.series
    for key, row in series.items():
        if key[0] != "AllReduce":
            continue
        line, last = result.lines[key], row[-1]
        said.append(
            f"all-reduce over {_group(key[1], key[2])}: start-up {duration(line.startup_seconds)}, bus bandwidth "
            f"{rate(last.busbw)} at {size(last.bytes)}"
        )
        best = max(row, key=lambda m: m.busbw)
        if last.busbw < _FALLS * best.busbw:
            said.append(
                f"its bus bandwidth falls from {rate(best.busbw)} at {size(best.bytes)} to {rate(last.busbw)} at "
                f"{size(last.bytes)}: large buckets cost more than they save"
            )
        flow = result.flow_bits_per_second
        if flow and key[1] == "world" and last.busbw * 8 < _FALLS * flow:
            said.append(
                f"one flow alone carries {rate(flow / 8)}, the all-reduce {last.busbw * 8 / flow:.0%} of it: "
                "processors or start-ups hold it back, not the link's rate"
            )
    bent = [key for key in series if line_error(result, key) > _BENT]
    if bent:
        names = ", ".join(dict.fromkeys(key[0] for key in bent))
        said.append(f"no straight line fits {names}: the planner uses the measured table")
    said = [*said, *_left_out(result)] or [
        "one rank only: nothing is exchanged; probe with at least two to measure exchanges"
    ]
    return [*said, _compute(result)] if set(KERNELS) <= set(result.compute) else said


def _compute(result: ProbeResult) -> str:
    """Return a few figures of the compute curves, each at the size of a bucket of a few MiB."""
    amounts = {"select": 1e6, "memory": 1e7, "multiply": 1e7, "orthogonalise": 1e6}
    select, memory, multiply, orthogonalise = (result.compute[n](a) for n, a in amounts.items())
    rates = [
        amounts[n] / 1e9 / s for n, s in (("memory", memory), ("multiply", multiply), ("orthogonalise", orthogonalise))
    ]
    return (
        f"compute, all ranks at once: selection from a million elements {duration(select)}, "
        f"memory {rates[0]:.3g} GB/s, thin products {rates[1]:.3g} GFLOP/s, orthogonalisation {rates[2]:.3g} GFLOP/s"
    )


def line_error(result: ProbeResult, key: Key) -> float:
    """Return the largest relative error of the straight line, from 64 KiB on."""
    pairs = zip(result.series[key], result.lines[key].residuals)
    return max((abs(off) for m, off in pairs if m.bytes >= _COUNTS), default=0.0)


def _left_out(result: ProbeResult) -> list[str]:
    """Describe the sizes for which there was no time."""
    largest = {key: row[-1].bytes for key, row in result.series.items()}
    beyond: dict[int, list[str]] = {}
    between = 0
    for kind, scope, members, count in result.dropped:
        top = largest.get((kind, scope, members), 0)
        if count < top:
            between += 1
        elif f"{kind} ({scope})" not in beyond.setdefault(top, []):
            beyond[top].append(f"{kind} ({scope})")
    said = [
        f"there was not enough time above {size(top)} for {', '.join(names)}: extrapolated"
        for top, names in sorted(beyond.items())
    ]
    total = between + len(result.measurements)
    return said + (
        [f"there was not enough time for {between} of {total} points between others: interpolated"] if between else []
    )


def _group(scope: str, members: int) -> str:
    return {"world": f"{members} ranks", "node": f"{members} ranks of a machine"}.get(scope, f"{members} machines")


def rate(bytes_per_second: float) -> str:
    """Format as bits per second."""
    bits = bytes_per_second * 8
    for unit, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= unit:
            return f"{bits / unit:.3g} {name}"
    return f"{bits / 1e3:.3g} kbit/s"


def size(count: float) -> str:
    """Format bytes."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:g} B"


def duration(seconds: float) -> str:
    """Format seconds."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"
