"""The pictures of steps: ``python docs/picture_of_a_step.py`` draws ``docs/images/step.svg`` and ``rounds.svg``.

What is drawn is what the simulator says of one step, or of one period of local steps, as ``thinwire plan MODEL --link
LINK --workers N --trace FILE`` writes it; lengths, lanes and the exposed share are the simulator's own. It needs
matplotlib.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from thinwire.predict.timeline import Event, Timeline
from thinwire.predict.timeline.result import COMPUTE, METHOD
from thinwire.tools.cli.options import PlanOptions
from thinwire.tools.cli.plan_inputs import read_question
from thinwire.tools.report.traces import joined

FOLDER = Path(__file__).parent / "images"
MODEL, BATCH, WORKERS = "resnet50", 128, 8
PICTURES = {  # file -> link, and what is drawn
    "step": (
        "25gbit",
        {
            "ssgd": "ssgd: each bucket is all-reduced while backward goes on",
            "dear": "dear: reduce-scatter in backward, all-gather in the next forward",
            "acp:rank=4": "acp: one thin factor of each matrix is all-reduced",
        },
    ),
    "rounds": (
        "5gbit",
        {
            "ssgd": "ssgd, one step",
            "local:sync_every=4": "local, four steps, then a round",
            "local:sync_every=4:fragment_sync_delay=full": "local, steps that hide the round",
        },
    ),
}
LANES = ("compute", "method", "link")
FORWARD, BACKWARD, WORK, EXPOSED = "#4c8dae", "#2f6690", "#9a6fb0", "#d1603d"
BUCKETS = ("#3a7d44", "#6a994e", "#8fb85a", "#a9b665")


def timeline(label: str, link: str) -> Timeline:
    """The simulated step, with the defaults of ``thinwire plan``."""
    asked = read_question(
        PlanOptions(
            model=MODEL, link=link, workers=WORKERS, batch_size=BATCH, methods=label
        )
    )
    return asked.simulated(dict(asked.candidates)[label])


def one_step(found: Timeline) -> list[Event]:
    """The events of the first step; of a method of two phases the timeline has two, each with the same forward."""
    if found.every > 1:  # a period
        return list(found.events)
    first = next(event.name for event in found.events if event.lane == COMPUTE)
    starts = [event.start_seconds for event in found.events if event.name == first]
    return [
        event
        for event in found.events
        if len(starts) == 1 or event.start_seconds < starts[1] - 1e-12
    ]


def exposed_intervals(events: list[Event]) -> list[tuple[float, float]]:
    """When something travels and nothing is computed."""
    busy = [
        (e.start_seconds, e.end_seconds) for e in events if e.lane in (COMPUTE, METHOD)
    ]
    edges = sorted({t for e in events for t in (e.start_seconds, e.end_seconds)})
    found: list[tuple[float, float]] = []
    for first, last in pairwise(edges):
        middle = (first + last) / 2
        travels = any(
            e.lane.startswith("link") and e.start_seconds <= middle < e.end_seconds
            for e in events
        )
        if travels and not any(a <= middle < b for a, b in busy):
            if found and first - found[-1][1] < 1e-9:
                found[-1] = (found[-1][0], last)
            else:
                found.append((first, last))
    return found


def draw(axes: Any, found: Timeline, title: str) -> None:
    """One method: three lanes."""
    events = one_step(found)
    for event in joined(events, 1e-4):
        lane = 0 if event.lane == COMPUTE else 1 if event.lane == METHOD else 2
        if lane == 0:
            colour = BACKWARD if event.name.startswith("backward") else FORWARD
        else:
            colour = WORK if lane == 1 else BUCKETS[(event.bucket or 0) % len(BUCKETS)]
        start, width = 1e3 * event.start_seconds, 1e3 * event.duration_seconds
        axes.broken_barh([(start, width)], (2.1 - lane, 0.8), facecolors=colour)
        if lane == 2 and width > 2:
            name = f"bucket {event.bucket}" if width > 7 else f"{event.bucket}"
            name = "all changes" if found.every > 1 else name
            axes.text(
                start + width / 2,
                0.5,
                name,
                ha="center",
                va="center",
                color="white",
                size=8,
            )
    for first, last in exposed_intervals(events):
        axes.axvspan(
            1e3 * first, 1e3 * last, color=EXPOSED, alpha=0.25, linewidth=0, zorder=0
        )
    axes.set_yticks([2.5, 1.5, 0.5], LANES)
    axes.set_ylim(0, 3)
    figures = f"{1e3 * found.step_seconds:.1f} ms a step, {1e3 * found.exposed_seconds:.1f} ms exposed"
    axes.set_title(f"{title}: {figures}", loc="left", size=10)
    axes.tick_params(labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))


def picture(name: str, found: dict[str, Timeline]) -> None:
    """One file."""
    link, titles = PICTURES[name]
    figure, rows = plt.subplots(len(found), 1, sharex=True, figsize=(9, 5.6))
    for axes, (label, step) in zip(rows, found.items()):
        draw(axes, step, titles[label])
    where = f"milliseconds; predicted: {MODEL}, {WORKERS} workers of one A100 and {BATCH} samples, {link}"
    rows[-1].set_xlabel(where, size=9)
    marks = {
        "forward": FORWARD,
        "backward": BACKWARD,
        "method's own work": WORK,
        "exchange": BUCKETS[0],
    }
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in marks.values()]
    handles.append(plt.Rectangle((0, 0), 1, 1, color=EXPOSED, alpha=0.25))
    figure.legend(
        handles,
        [*marks, "exposed"],
        loc="lower center",
        ncols=5,
        frameon=False,
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    plt.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "thinwire",
            "font.family": "sans-serif",
        }
    )
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    for name, (link, titles) in PICTURES.items():
        steps = {label: timeline(label, link) for label in titles}
        picture(name, steps)
        for label, step in steps.items():
            print(
                f"{label}: {1e3 * step.step_seconds:.1f} ms a step, {1e3 * step.exposed_seconds:.1f} ms exposed"
            )
