"""Tables that pages write out in full are what was recorded."""

import re
from pathlib import Path

import pytest
import recorded

DOCS = Path(__file__).parents[3] / "docs"


def table(page, mark):
    """Cells of the rows below a mark, without the head."""
    lines = (DOCS / page).read_text().partition(mark)[2].partition("\n\n")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def figures(name, what):
    """Of each claim that begins and ends like this: what is between, and its figure."""
    begin, end = what
    claims = {row.what: row.figure.replace("\N{NO-BREAK SPACE}", " ") for row in recorded.rows(name)}
    return {
        text.removeprefix(begin).removesuffix(end): figure
        for text, figure in claims.items()
        if text.startswith(begin) and text.endswith(end)
    }


@pytest.mark.parametrize(("column", "name", "link"), [(1, "gpu_bench_10gbit", "10gbit"), (2, "gpu_bench", "1gbit")])
def test_steps_on_a_gpu(column, name, link):
    steps = figures(name, ("step of ", f", 26 M parameters, 2 ranks, {link}"))
    shown = table("gpu.md", "<!-- recorded: gpu_bench_10gbit, gpu_bench -->")
    cells = {re.match(r"`([^`]+)`", row[0])[1].replace(":", " "): row[column] for row in shown}
    assert {method: cell for method, cell in cells.items() if cell != "-"} == {
        method: step.split(",")[0] for method, step in steps.items() if method in cells
    }
    assert cells["ddp"] != "-"


def test_deaths_under_torchft():
    found = figures("going_on", ("", ""))
    shown = table("when_a_machine_dies.md", "<!-- recorded: going_on -->")
    modes = ("torchft-allreduce", "ssgd", "torchft-diloco", "local", "acp")
    assert len(shown) == len(modes)
    for (label, steps, loss), mode in zip(shown, modes):
        where = f"{mode}, 3 replicas, 100mbit, each dies once in 60 s"
        assert (steps, loss) == (found[f"{where}: steps"], found[f"{where}: loss"])
        assert label.startswith("torchft: " if mode.startswith("torchft") else f"thinwire: `{mode}`")
