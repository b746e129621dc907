"""``thinwire ps simulate``: a setting in virtual time, next to its alternatives."""

from __future__ import annotations

import random
from typing import Any

from thinwire.lab import parse_delay, parse_rate
from thinwire.planner.asynchronous import hierarchical_bytes, hierarchical_seconds, synchronous_step_seconds


def predict(
    settings: str, nodes: int, workers: int, step: float, spread: float, slow: dict[int, float], millions: float,
    link: str, delay: str, seconds: float, seed: int, shards: int = 0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return rows for the setting, ASP, synchronous SGD through the server, and a hierarchical all-reduce.

    Raises:
        ValueError: an impossible number or rate.
    """
    from dataclasses import replace

    from thinwire.parameter_server import Link, preset, simulate

    for name, value in (("--step", step), ("--parameters", millions), ("--seconds", seconds)):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, not {value:g}")
    if spread < 0 or nodes < 1 or workers < 1:
        raise ValueError("--spread must not be negative, --nodes and --workers at least 1")
    bits, latency = parse_rate(link), parse_delay(delay)
    payload = int(4e6 * millions)

    def step_seconds(node: int, worker: int, number: int, rng: random.Random) -> float:
        return step * slow.get(node, 1.0) * rng.lognormvariate(0.0, spread)

    rows = []
    for text in dict.fromkeys([settings, "asp", "bsp"]):
        chosen = replace(preset(text), start_nodes=nodes)
        wire = Link(latency, bits)
        trace = simulate(
            chosen, nodes=nodes, workers=workers, seconds=seconds, step_seconds=step_seconds, link=wire,
            server_link=wire, payload_bytes=payload, seed=seed, shards=shards,
        )  # fmt: skip
        ages = trace.staleness()
        batches = trace.gradients * chosen.local_update.steps
        rows.append(
            {
                "scheme": text,
                "gradients_per_second": batches / trace.seconds,
                "updates_per_second": len(trace.updates) / trace.seconds,
                "mean_staleness": sum(age * n for age, n in ages.items()) / max(1, sum(ages.values())),
                "max_staleness": max(ages, default=0),
                "bytes_per_gradient": (trace.bytes_up + trace.bytes_down) / max(1, batches),
            }
        )
    exchange = hierarchical_seconds(payload, nodes, bits, latency)
    period = synchronous_step_seconds(step_seconds, nodes, workers, exchange, seed=seed)
    rows.append(
        {
            "scheme": "hierarchical all-reduce",
            "gradients_per_second": nodes * workers / period,
            "updates_per_second": 1 / period,
            "mean_staleness": 0.0,
            "max_staleness": 0,
            "bytes_per_gradient": hierarchical_bytes(payload, nodes, workers),
        }
    )
    return rows
