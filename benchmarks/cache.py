"""What the data cache is worth: ``python benchmarks/cache.py``

Real JPEG files (scikit-learn's digits, enlarged), decoded by Pillow, feed a small convolutional network: from the
files, from a cache that holds all, half or a tenth of the samples, and from batches made in advance, in turns on the
same machine. It prints how an epoch divides into waiting and computing, and the hit rates beside what LRU would hit;
then the case in which the cache gains little: a step so long that decoding hides behind it. Writes
``benchmarks/results/cache.json``.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
from collections.abc import Callable
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
from thinwire.bench.models.digits import network
from thinwire.data.arena_file import table_bytes
from thinwire.data.values import pack

RESULTS = Path(__file__).parent / "results" / "cache.json"
SHARES = (1.0, 0.5, 0.1)
SIDE = 8


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
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
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
        sources: dict[str, Any] = {"files": Direct(source), **caches}
        loaders: dict[str, Any] = {
            what: DataLoader(data, options.batch, shuffle=True, num_workers=1, persistent_workers=True, drop_last=True)
            for what, data in sources.items()
        }
        loaders[tw.data.stall.SYNTHETIC] = list(loaders["files"])
        found = [run(loaders, caches, repeats, options.rounds) for repeats in (1, 16, 48)]
        for cache in caches.values():
            cache.close()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"options": vars(options), "tables": found}, indent=1) + "\n")


def run(loaders: dict[str, Any], caches: dict[str, Any], repeats: int, rounds: int) -> dict[str, Any]:
    """Fill the caches, then measure in turns; one table."""
    step = training(repeats)
    tw.data.stall.measure(loaders, lambda batch: None)
    before = {what: cache.stats() for what, cache in caches.items()}
    splits = []
    for epoch in range(1, rounds + 1):
        for cache in caches.values():
            cache.set_epoch(epoch)
        splits.append(tw.data.stall.measure(loaders, step))
    table = Table(title=f"step computed {repeats} times; median of {rounds} epochs")
    for column in ("input", "epoch", "waiting", "of synthetic", "hits", "LRU would hit"):
        table.add_column(column, justify="left" if column == "input" else "right")
    rows = {}
    base = statistics.median(split.passes[tw.data.stall.SYNTHETIC].seconds for split in splits)
    for what in loaders:
        seconds = statistics.median(split.passes[what].seconds for split in splits)
        row = {"seconds": seconds, "of_synthetic": seconds / base}
        row["wait_seconds"] = statistics.median(split.passes[what].wait_seconds for split in splits)
        if what in caches:
            row["hit_rate"] = (caches[what].stats() - before[what]).hit_rate
            row["lru_hit_rate"] = tw.data.policy.lru_hit_rate(caches[what].cached_share)
        rows[what] = row
        hits = [f"{row[key]:.3f}" if key in row else "" for key in ("hit_rate", "lru_hit_rate")]
        table.add_row(what, f"{seconds:.3f} s", f"{row['wait_seconds']:.3f} s", f"{seconds / base:.2f}", *hits)
    Console().print(table)
    return {"repeats": repeats, "rows": rows}


if __name__ == "__main__":
    main()
