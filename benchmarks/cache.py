"""What the data cache is worth: ``python benchmarks/cache.py``

Real JPEG files (scikit-learn's digits, enlarged), decoded by Pillow, feed a small convolutional network: from the
files, from a cache that holds all, half or a tenth of the samples, from samples decoded in advance in plain memory
(through the same loader, as synthetic samples would be), and from whole batches made in advance (no loader at all), in
turns on the same machine. It prints how an epoch divides into waiting and computing, the hits from the second epoch on
beside the cached share, and what LRU would hit, by formula and by a real list; up to the case in which the cache gains
little: a step so long that decoding hides behind it. Then processes that fill a cache are killed, and what they left is
compared bit by bit. Writes ``benchmarks/results/cache.json``.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

import thinwire as tw
from thinwire.core.kernels.seeding import generator
from thinwire.systems.data.arena import table_bytes
from thinwire.systems.data.values import pack
from thinwire.tools.bench.models.digits import network

RESULTS = Path(__file__).parent / "results" / "cache.json"


def lru_hit_rate(cached: float) -> float:
    """Return the hit rate of least-recently-used, with a fresh shuffle per epoch, in the limit of many samples.

    A sample at place x of one epoch and y of the next has seen 1 - x (1 - y) of the others in between, and is still
    cached if that is below c; the probability is c + (1 - c) ln(1 - c).
    """
    return cached + (1 - cached) * math.log1p(-cached) if cached < 1 else 1.0


def simulate_lru(samples: int, capacity: int, epochs: int, *, dropped: int = 2, seed: int = 0) -> float:
    """Return the hit rate of a real LRU list for ``capacity`` samples over epochs, the first ``dropped`` left out."""
    read = lru_cache(capacity)(lambda sample: sample)
    hits = []
    for epoch in range(epochs):
        for sample in torch.randperm(samples, generator=generator(seed, epoch)).tolist():
            read(sample)
        hits.append(read.cache_info().hits)
    return (hits[-1] - (hits[dropped - 1] if dropped else 0)) / (samples * (epochs - dropped))


SHARES = (1.0, 0.5, 0.1)
SIDE = 8
PASSES = {1: 16, 4: 4, 16: 1}
"""Times that a step is computed, and how often an epoch visits each sample: an epoch's start, some 40 ms of a
DataLoader with a worker, is not to be the half of it.
"""
DECODED = "decoded"
LIMIT = 1.1  # of an epoch with a full cache against one with samples decoded in advance, where decoding was the bound


class Files:
    """JPEG files of ``pixels`` x ``pixels``; samples are (bytes, label)."""

    def __init__(self, folder: Path, count: int, pixels: int) -> None:
        digits = load_digits()
        self.samples = [(str(folder / f"{i:05d}.jpg"), int(digits.target[i])) for i in range(count)]
        for (path, _), image in zip(self.samples, digits.images):
            Image.fromarray((image * 15.9).astype(np.uint8)).resize((pixels, pixels)).convert("RGB").save(path)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        path, label = self.samples[index]
        return Path(path).read_bytes(), label


def decode(raw: tuple[bytes, int]) -> tuple[torch.Tensor, int]:
    data, label = raw
    image = Image.open(io.BytesIO(data)).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    return torch.from_numpy(np.array(image)), label


def augment(value: tuple[torch.Tensor, int], generator: torch.Generator) -> tuple[torch.Tensor, int]:
    dy, dx = torch.randint(-1, 2, (2,), generator=generator).tolist()
    return torch.roll(value[0].unsqueeze(0).float() / 255, (dy, dx), (1, 2)), value[1]


class Direct:
    """The same pipeline without a cache."""

    def __init__(self, source: Files) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return augment(decode(self.source[index]), torch.Generator().manual_seed(index))


class Decoded:
    """The same pipeline with samples decoded in advance, in plain memory: what synthetic samples would cost."""

    def __init__(self, source: Files) -> None:
        self.values = [decode(source[i]) for i in range(len(source))]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return augment(self.values[index], torch.Generator().manual_seed(index))


class Several:
    """A data set, so many times over."""

    def __init__(self, data: Any, times: int) -> None:
        self.data, self.times = data, times

    def __len__(self) -> int:
        return self.times * len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index % len(self.data)]


def training(repeats: int) -> Callable[[Any], None]:
    """A training step, its computation done so many times."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(batch: Any) -> None:
        for _ in range(repeats):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=768)
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        source = Files(Path(name), options.samples, options.pixels)
        size = -(-len(pack(decode(source[0]))) // 64) * 64
        table = table_bytes(max(16, 3 * (len(source) + 1) // 2))
        caches = {
            f"cached {share:.0%}": tw.data.CachedDataset(
                source, decode, augment, dataset_id=f"cache-benchmark-{share}", version=1, prefix_id="decode",
                memory_bytes=table + int(share * len(source)) * size, directory=memory,
            )
            for share in SHARES
        }  # fmt: skip
        sources: dict[str, Any] = {"files": Direct(source), **caches, DECODED: Decoded(source)}
        found = [
            run(loaders_of(sources, passes, options.batch), caches, repeats, options.rounds)
            for repeats, passes in PASSES.items()
        ]
        verdicts = judge(found)
        torn = kill_readers(source, memory, options.kills)
        for cache in caches.values():
            cache.close()
    figures = {
        "options": {key: value for key, value in vars(options).items() if key != "out"},
        "tables": found,
        **verdicts,
        "torn": torn,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=1) + "\n")


def loaders_of(sources: dict[str, Any], passes: int, batch: int) -> dict[str, Any]:
    """A loader with one worker for each input, and batches made in advance."""
    loaders: dict[str, Any] = {
        what: tw.data.Prefetched(
            DataLoader(
                Several(data, passes), batch, shuffle=True, num_workers=1, persistent_workers=True, drop_last=True
            )
        )
        for what, data in sources.items()
    }
    loaders[tw.data.stall.SYNTHETIC] = list(loaders["files"])
    return loaders


def judge(tables: list[dict[str, Any]]) -> dict[str, Any]:
    """Print what was wanted beside what was found."""
    rows = [row for table in tables for row in table["rows"].values() if "hits" in row]
    exact = all(row["hits"] == round(row["cached_share"] * row["samples"]) for row in rows)
    print(f"hits from the second epoch on are the cached share: {'exactly' if exact else 'NO'}")
    bound = [table for table in tables if table["rows"]["files"]["of_decoded"] > LIMIT]
    for table in bound:
        full, files = table["rows"]["cached 100%"], table["rows"]["files"]
        step, held = table["step_seconds"] * 1e3, "held" if full["of_decoded"] <= LIMIT else "missed"
        print(
            f"step of {step:.0f} ms: from files {files['of_decoded']:.2f} of samples decoded in advance, "
            f"with a full cache {full['of_decoded']:.2f}; at most {LIMIT} wanted: {held}. Of batches made in advance: "
            f"{files['of_synthetic']:.2f} and {full['of_synthetic']:.2f}"
        )
    if not bound:
        print("decoding was nowhere the bound: give larger --pixels")
    return {"hits_exact": exact}


def kill_readers(source: Files, memory: str, kills: int) -> int:
    """Fill a cache from processes that are killed at random times; how many samples of what is left are not right."""
    dataset = tw.data.CachedDataset(
        source, decode, dataset_id="cache-benchmark-kills", version=1, prefix_id="decode", memory_bytes=8 << 20,
        directory=memory, check="always",
    )  # fmt: skip
    dice, wrong = random.Random(0), 0
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            for i in dice.sample(range(len(source)), len(source)):
                dataset[i]
            os._exit(0)
        time.sleep(dice.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    share, before = dataset.cached_share, dataset.stats()
    for i in range(len(source)):
        value, expected = dataset[i], decode(source[i])
        wrong += not (torch.equal(value[0], expected[0]) and value[1] == expected[1])
    served = (dataset.stats() - before).hits_memory
    dataset.close(delete=True)
    print(
        f"{kills} readers killed: they left {share:.0%} of the samples, {served} served, {wrong} of them torn or wrong"
    )
    return wrong


def run(loaders: dict[str, Any], caches: dict[str, Any], repeats: int, rounds: int) -> dict[str, Any]:
    """Fill the caches, then measure in turns; one table."""
    step = training(repeats)
    tw.data.stall.measure(loaders, lambda batch: None)
    alone = tw.data.stall.measure(loaders, lambda batch: None)
    before = {what: cache.stats() for what, cache in caches.items()}
    splits = []
    for epoch in range(1, rounds + 1):
        for cache in caches.values():
            cache.set_epoch(epoch)
        splits.append(tw.data.stall.measure(loaders, step))
    table = Table(title=f"step computed {repeats} times; seconds, median of {rounds} epochs")
    for column in ("input", "alone", "epoch", "wait", "/made", "/decoded", "cached", "hits", "LRU", "LRU list"):
        table.add_column(column, justify="left" if column == "input" else "right")
    rows = {}
    base, decoded = (
        statistics.median(split[what].seconds for split in splits) for what in (tw.data.stall.SYNTHETIC, DECODED)
    )
    for what in loaders:
        seconds = statistics.median(split[what].seconds for split in splits)
        row: dict[str, Any] = {"seconds": seconds, "of_synthetic": seconds / base, "of_decoded": seconds / decoded}
        row["step_seconds"] = statistics.median(split[what].step_seconds for split in splits)
        row["alone_seconds"] = alone[what].seconds
        row["wait_seconds"] = statistics.median(split[what].wait_seconds for split in splits)
        if what in caches:
            seen, share = caches[what].stats() - before[what], caches[what].cached_share
            row |= {"hits": seen.hits_memory, "samples": seen.samples, "cached_share": share}
            row["lru_hit_rate"] = lru_hit_rate(share)
            samples = len(caches[what])
            row["lru_list_hit_rate"] = simulate_lru(samples, round(share * samples), 12)
        rows[what] = row
        rates = [
            f"{row[key]:.3f}" if key in row else "" for key in ("cached_share", "lru_hit_rate", "lru_list_hit_rate")
        ]
        hits = f"{row['hits'] / row['samples']:.3f}" if "hits" in row else ""
        times = (row["alone_seconds"], seconds, row["wait_seconds"], row["of_synthetic"], row["of_decoded"])
        table.add_row(what, *(f"{figure:.2f}" for figure in times), rates[0], hits, *rates[1:])
    Console().print(table)
    step_seconds = statistics.median(s[tw.data.stall.SYNTHETIC].step_seconds for s in splits) / len(loaders["files"])
    return {"repeats": repeats, "step_seconds": step_seconds, "rows": rows}


if __name__ == "__main__":
    main()
