"""The tables and the picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire.data.stall import SYNTHETIC


def tables(found: dict[str, Any]) -> None:
    """Print one table per part."""
    console = Console()
    if "batches" in found:
        console.print(batches(found["batches"], found["ranks"]))
    if "resolutions" in found:
        console.print(resolutions(found["resolutions"]))
    for split in found.get("stalls", []):
        console.print(stalls(split))
    if found["quick"]:
        console.print("--quick trains too little for the accuracies to mean anything.")
    console.print(f"{found['seconds']:.0f} s in all; picture: {found['picture']}")


def table(title: str, *names: str) -> Table:
    made = Table(title=title)
    for i, name in enumerate(names):
        made.add_column(name, justify="right" if i else "left")
    return made


def by_recipe(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of equal recipe and batch, over seeds; by a label."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(f"{row['recipe']}, {row['batch']}", []).append(row)
    return found


def batches(rows: list[dict[str, Any]], ranks: int) -> Table:
    epochs, seeds = len(rows[0]["accuracy"]), len({row["seed"] for row in rows})
    made = table(
        f"digits: {epochs} epochs, {ranks} ranks, {seeds} seed(s); medians",
        "recipe, batch", "rate", "steps", "sent per rank", "seconds", "accuracy", "worst",
    )  # fmt: skip
    for label, same in by_recipe(rows).items():
        ends = [row["accuracy"][-1] for row in same]
        made.add_row(
            label, f"{same[0]['lr']:g}", str(same[0]["steps"]), f"{same[0]['bytes_sent'] / 1e6:.1f} MB",
            f"{statistics.median(row['seconds'] for row in same):.0f}", f"{statistics.median(ends):.1%}",
            f"{min(ends):.1%}",
        )  # fmt: skip
    return made


def resolutions(rows: list[dict[str, Any]]) -> Table:
    made = table(
        "JPEG files: equal epochs; seconds of all epochs",
        "input", "pixels", "waiting", "computing", "hits, epoch 1", "later", "accuracy",
    )  # fmt: skip
    for row in rows:
        epochs = row["epochs"]
        later = sum(e["samples"] for e in epochs[1:])
        rates = ("", "")
        if later:
            rates = (
                f"{epochs[0]['hits'] / epochs[0]['samples']:.3f}",
                f"{sum(e['hits'] for e in epochs[1:]) / later:.3f}",
            )
        made.add_row(
            row["input"], "-".join(str(size) for size in dict.fromkeys(e["size"] for e in epochs)),
            f"{sum(e['wait_seconds'] for e in epochs):.1f} s", f"{sum(e['step_seconds'] for e in epochs):.1f} s",
            *rates, f"{epochs[-1]['accuracy']:.1%}",
        )  # fmt: skip
    return made


def stalls(split: dict[str, Any]) -> Table:
    made = table(
        f"{split['size']} pixels: one epoch, after the one that fills the caches",
        "input", "seconds", "waiting", "of synthetic", "cached share", "hits", "LRU would hit",
    )  # fmt: skip
    for name, row in split["rows"].items():
        rates = ["", "", ""]
        if "cached_share" in row:
            rates = [f"{rate:.4f}" for rate in (row["cached_share"], row["hits"] / row["samples"], row["lru_hit_rate"])]
        made.add_row(
            name, f"{row['seconds']:.2f}", f"{row['wait_seconds']:.2f}", f"{row['of_synthetic']:.2f}", *rates
        )  # fmt: skip
    return made


def draw(found: dict[str, Any], path: Path) -> Path:
    """Accuracy over epochs, and waiting beside computing, as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    splits = found.get("stalls", [])
    panels = int("batches" in found) + int("resolutions" in found) + len(splits)
    figure, all_axes = plt.subplots(1, panels, figsize=(5.2 * panels, 4.2), squeeze=False)
    axes = iter(all_axes[0])
    if "batches" in found:
        here = next(axes)
        for label, same in by_recipe(found["batches"]).items():
            median = [statistics.median(values) for values in zip(*(row["accuracy"] for row in same))]
            here.plot(range(1, len(median) + 1), median, marker=".", label=label)
        here.set(title="digits", xlabel="epoch", ylabel="accuracy on held-out images")
        here.legend(fontsize=8)
    if "resolutions" in found:
        here = next(axes)
        for row in found["resolutions"]:
            clock, gone = [], 0.0
            for epoch in row["epochs"]:
                gone += epoch["wait_seconds"] + epoch["step_seconds"]
                clock.append(gone)
            here.plot(clock, [epoch["accuracy"] for epoch in row["epochs"]], marker=".", label=row["input"])
        here.set(title="JPEG files", xlabel="seconds of training", ylabel="accuracy on held-out images")
        here.legend(fontsize=8)
    for split in splits:
        here, rows = next(axes), split["rows"]
        names = [name for name in rows if name != SYNTHETIC] + [SYNTHETIC]
        wait = [rows[name]["wait_seconds"] for name in names]
        work = [rows[name]["seconds"] - rows[name]["wait_seconds"] for name in names]
        here.bar(names, work, label="computing", color="#8c9bab")
        here.bar(names, wait, bottom=work, label="waiting for input", color="#d1603d")
        here.set(title=f"{split['size']} pixels", ylabel="seconds per epoch")
        here.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
