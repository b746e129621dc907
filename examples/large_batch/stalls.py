"""Part three: how long a step waits for its input, from files, half a cache, a whole one, or made in advance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from feed import Feed, Input
from pictures import Folder
from resolutions import Training
from thinwire.data import CacheStats, stall


def measure(
    source: Folder, directory: Path, *, stored: int, size: int, batch: int, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Go through all inputs in turns, ``rounds`` epochs of each after the one that fills the caches; medians.

    Seconds are those of the slowest rank.
    """
    sample = 3 * stored**2 + 320  # about what is stored; then the table: the cache says what it held
    half = len(source) // 2 * sample + (80 << 10) + 60 * len(source)
    inputs = (
        Input("files"),
        Input(f"half a cache, {size} pixels", directory, half),
        Input(f"cache, {size} pixels", directory),
    )
    names = ("files", "half cached", "cached")
    feeds = {name: Feed(source, given, stored=stored, size=size, batch=batch) for name, given in zip(names, inputs)}
    loaders: dict[str, Any] = {name: feed.epoch(0) for name, feed in feeds.items()}
    stall.measure(loaders, lambda batch: None)  # fills the caches
    loaders[stall.SYNTHETIC] = list(loaders["files"])
    training = Training(steps=1 + (rounds + 1) * len(loaders) * len(loaders[stall.SYNTHETIC]), warmup_steps=1)
    splits, seen = [], dict.fromkeys(feeds, CacheStats())
    for epoch in range(1, rounds + 1):
        for feed in feeds.values():
            feed.epoch(epoch)
        dist.barrier()
        before = {name: feed.stats() for name, feed in feeds.items()}
        dist.barrier()
        splits.append(stall.measure(loaders, training.step))
        dist.barrier()
        seen = {name: feed.stats() - before[name] for name, feed in feeds.items()}
        say(f"stall split at {size} pixels: epoch {epoch} of {rounds}")
    rows = {}
    for name in loaders:
        passes = [split[name] for split in splits]
        wait, seconds = slowest(
            statistics.median(p.wait_seconds for p in passes), statistics.median(p.seconds for p in passes)
        )
        rows[name] = {"wait_seconds": wait, "seconds": seconds}
        if name in feeds and name != "files":
            share = feeds[name].cached_share()
            rows[name] |= {
                "hits": seen[name].hits_memory,
                "samples": seen[name].samples,
                "cached_share": share,
                "lru_hit_rate": share + (1 - share) * math.log1p(-share) if share < 1 else 1.0,
            }
    for row in rows.values():
        row["of_synthetic"] = row["seconds"] / rows[stall.SYNTHETIC]["seconds"]
    for feed in feeds.values():
        feed.close()
    training.sync.close()
    return {"size": size, "batch": batch, "rows": rows}


def slowest(*seconds: float) -> list[float]:
    """Each figure, of the slowest rank."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    values: list[float] = found.tolist()
    return values
