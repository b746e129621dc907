"""The picture of the page: bars of the seconds to a loss on every network."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from page import Verdict

GREY, ORANGE, BLUE = "#b4bcc6", "#d98a3d", "#2a6f97"


def draw_times(verdicts: list[Verdict], path: Path) -> None:
    """Three bars for each network: DDP, the best of the others, thinwire's best; 1 is a network that costs nothing."""
    figure, axis = plt.subplots(figsize=(9.0, 1.0 + 0.55 * len(verdicts)), layout="constrained")
    places = range(len(verdicts))[::-1]
    bars = {
        "DDP": ([one.ddp or 0.0 for one in verdicts], GREY),
        "best other library": ([one.other.times[1] for one in verdicts], ORANGE),
        "best thinwire row": ([one.ours.times[1] for one in verdicts], BLUE),
    }
    for number, (label, (values, colour)) in enumerate(bars.items()):
        axis.barh([place + 0.27 * (1 - number) for place in places], values, 0.25, color=colour, label=label)
    axis.set_yticks(list(places), [one.where for one in verdicts])
    axis.set_xscale("log")
    axis.set_xlim(left=0.9)
    axis.margins(y=0.01)
    axis.set_xticks((1, 2, 5, 10, 20, 50, 100), ["1", "2", "5", "10", "20", "50", "100"])
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xlabel("seconds to DDP's loss, over DDP's without a network; less is better")
    figure.legend(loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
