"""The tables and the picture."""

from __future__ import annotations

import statistics
from itertools import accumulate
from typing import Any

from rich.console import Console
from rich.table import Table
from thinwire.data.stall import SYNTHETIC

from thinwire.tools.pictures import Level, Panel, Picture, Series


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
    console.print(f"{found['seconds']:.0f} s in all; written: {found['written']}")


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


def picture(found: dict[str, Any]) -> Picture:
    """Batch against accuracy, accuracy over seconds, and what an epoch takes by the share of reads that hit."""
    panels = []
    if "batches" in found:
        lines: dict[str, list[tuple[float, float]]] = {}
        for same in by_recipe(found["batches"]).values():
            accuracy = statistics.median(row["accuracy"][-1] for row in same)
            lines.setdefault(same[0]["recipe"], []).append((same[0]["batch"], accuracy))
        panels.append(
            Panel(
                "samples per step", "accuracy on digits held out",
                tuple(Series(name, *zip(*points)) for name, points in lines.items()),
                levels=(Level(0.1, "chance"),), y_range=(0.0, 1.0), log_x=True,
            )
        )  # fmt: skip
    if "resolutions" in found:
        shown = []
        for row in found["resolutions"]:
            seconds = [epoch["wait_seconds"] + epoch["step_seconds"] for epoch in row["epochs"]]
            accuracy = tuple(epoch["accuracy"] for epoch in row["epochs"])
            shown.append(Series(row["input"], tuple(accumulate(seconds)), accuracy))
        panels.append(Panel("seconds", "accuracy on images held out", tuple(shown), y_range=(0.0, 1.0)))
    for split in found.get("stalls", []):
        rows = {name: row for name, row in split["rows"].items() if name != SYNTHETIC}
        hits = tuple(row["hits"] / row["samples"] if "hits" in row else 0.0 for row in rows.values())
        panels.append(
            Panel(
                f"share of reads that hit, {split['size']} pixels", "seconds per epoch",
                (
                    Series("an epoch", hits, tuple(row["seconds"] for row in rows.values())),
                    Series("of it waiting for input", hits, tuple(row["wait_seconds"] for row in rows.values())),
                ),
                levels=(Level(split["rows"][SYNTHETIC]["seconds"], "batches made in advance"),),
            )
        )  # fmt: skip
    return Picture(f"large batches and cached input, {found['ranks']} ranks", tuple(panels))
