"""Loss against seconds and against steps."""

from __future__ import annotations

from typing import Any

from thinwire.tools.pictures.colours import Colours
from thinwire.tools.pictures.draw import plotly
from thinwire.tools.report.figures import new
from thinwire.tools.report.inputs import Inputs
from thinwire.tools.report.results import Bench
from thinwire.tools.report.section import Block, Chart, Section
from thinwire.tools.report.words import duration, hover, short

_READING = (
    "The same model from the same weights on the same data, once per method; lower is better. Against seconds: what a "
    "user gets; a method with shorter steps gets further in the same time. Against steps: what compression costs; "
    "exact methods lie on one line, lossy ones may lie a little above it."
)
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon")


def section(inputs: Inputs, colours: Colours) -> Section | None:
    """Return the section; None if no comparison recorded its loss."""
    benches = [bench for bench in inputs.benches if bench.curves]
    if not benches:
        return None
    return Section("loss", "Loss while training", _READING, tuple(_block(bench, colours) for bench in benches))


def _block(bench: Bench, colours: Colours) -> Block:
    which = "loss on held-out data" if all(curve.held_out for curve in bench.curves) else "training loss"
    ends = ", ".join(
        f"{curve.label} {curve.losses[-1]:.3f} after {curve.steps[-1]:.0f} steps and {duration(curve.seconds[-1])}"
        for curve in bench.curves
    )
    charts = (
        Chart(_figure(bench, colours, "seconds", which), "Against seconds"),
        Chart(_figure(bench, colours, "steps", which), "Against steps"),
    )
    lines = (
        f"{bench.where[0].upper()}{bench.where[1:]}.",
        *(f"{said}." for said in bench.answer),
        f"At the end: {ends}.",
    )
    return Block(bench.name, lines, charts)


def _figure(bench: Bench, colours: Colours, against: str, which: str) -> Any:
    go = plotly()
    figure = new(380 + 10 * len(bench.curves))
    for number, curve in enumerate(bench.curves):
        tint = colours.of(curve.label)
        figure.add_trace(
            go.Scatter(
                name=short(curve.label),
                x=curve.seconds if against == "seconds" else curve.steps,
                y=curve.losses,
                mode="lines+markers",
                line={"color": tint, "width": 2},
                marker={"color": tint, "size": 7, "symbol": _SYMBOLS[number % len(_SYMBOLS)]},
                showlegend=True,
                hoverinfo="text",
                hovertext=[
                    hover(curve.label, f"{which} {loss:.4g}", f"step {step:.0f}, after {duration(second)}")
                    for step, second, loss in zip(curve.steps, curve.seconds, curve.losses)
                ],
            )
        )
    figure.update_xaxes(
        title_text="training time (s)" if against == "seconds" else "number of steps", rangemode="tozero"
    )
    return figure.update_yaxes(title_text=f"{which} (no unit)")
