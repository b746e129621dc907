"""Measurements for the page: a comparison of methods, with curves if there are any."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.tools.report.fields import Data, listed, maybe_number, number, table, tables, text


@dataclass(frozen=True)
class BenchRow:
    """One method's figures; ``predicted_seconds`` if the link could not be emulated. Field names are those of bench."""

    label: str
    step_seconds: float | None = None
    spread_seconds: float | None = None
    exposed_seconds: float | None = None
    bytes_per_step: float | None = None
    bytes_source: str = ""
    loss: float | None = None
    speedup: float | None = None
    predicted_seconds: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Curve:
    """Loss of one method during training; points without a loss are left out.

    Attributes:
        held_out: whether the losses are those of held-out data.
    """

    label: str
    steps: tuple[float, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    held_out: bool


@dataclass(frozen=True)
class Bench:
    """A comparison.

    rows: all rows except the one without exchange.
        rows: without the row that exchanges nothing.
        answer: the sentences of a race.
    """

    name: str
    describe: str
    workers: int
    link: str
    emulated: bool
    note: str
    parameters: float
    gradient_bytes: float
    compute_seconds: float
    floor_seconds: float
    rows: tuple[BenchRow, ...]
    curves: tuple[Curve, ...] = ()
    answer: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Model, size, workers and link."""
        link = f"link {self.link}" if self.link else "link without a limit"
        if self.link and not self.emulated:
            link = f"link not emulated (figures for {self.link} are computed)"
        size = f"{self.parameters / 1e6:.1f} M parameters, {self.gradient_bytes / 1e6:.1f} MB of gradients"
        return f"{self.describe}; {size}; {self.workers} workers; {link}"


def read_bench(name: str, data: Data) -> Bench:
    """Read what ``thinwire bench --json``, ``thinwire demo`` or ``thinwire race`` wrote."""
    predicted: dict[str, float | None] = {}
    inner, answer = data, tuple[str, ...]()
    if "bench" in data:
        inner = table(data["bench"], "'bench'")
    if "race" in data:
        race = table(data["race"], "'race'")
        answer = tuple(text({"sentences": said}, "sentences") for said in listed(race, "sentences"))
    elif "bench" in data:
        predicted = {text(row, "label"): maybe_number(row, "predicted_seconds") for row in tables(data, "rows")}
    curves = table(data.get("curves") or {}, "'curves'")
    return Bench(
        name=name,
        describe=text(inner, "describe"),
        workers=int(number(inner, "workers")),
        link=text(inner, "link"),
        emulated=bool(inner.get("emulated")),
        note=text(inner, "note"),
        parameters=number(inner, "parameters"),
        gradient_bytes=number(inner, "gradient_bytes"),
        compute_seconds=number(inner, "compute_seconds"),
        floor_seconds=number(inner, "floor_seconds"),
        rows=tuple(_row(row, predicted) for row in tables(inner, "rows") if row.get("label") != "compute"),
        curves=tuple(curve for label in curves if (curve := _curve(label, curves)).steps),
        answer=answer,
    )


def _row(row: Data, predicted: dict[str, float | None]) -> BenchRow:
    label = text(row, "label")
    return BenchRow(
        label=label,
        step_seconds=maybe_number(row, "step_seconds"),
        spread_seconds=maybe_number(row, "spread_seconds"),
        exposed_seconds=maybe_number(row, "exposed_seconds"),
        bytes_per_step=maybe_number(row, "bytes_per_step"),
        bytes_source=text(row, "bytes_source"),
        loss=maybe_number(row, "loss"),
        speedup=maybe_number(row, "speedup"),
        predicted_seconds=predicted.get(label),
        error=text(row, "error"),
    )


def _curve(label: str, curves: Data) -> Curve:
    points = [table(point, "a point of a curve") for point in listed(curves, label)]
    held_out = any(maybe_number(point, "validation") is not None for point in points)
    key = "validation" if held_out else "loss"
    kept = [point for point in points if maybe_number(point, key) is not None]

    def column(key: str) -> tuple[float, ...]:
        return tuple(number(point, key) for point in kept)

    return Curve(label, column("step"), column("seconds"), column(key), held_out)
