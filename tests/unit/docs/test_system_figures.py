"""The tables of measurements on the pages of systems are what benchmarks/results holds, in two digits."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def recorded(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def table(page, head):
    """Cells of the rows under a head, without backquotes."""
    lines = iter((ROOT / "docs" / f"{page}.md").read_text().splitlines())
    assert head in lines, f"{page}.md has no table {head}"
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]


def two(value):
    return f"{value:.2g}"


def same(said, values):
    assert [two(float(cell)) for cell in said] == [two(value) for value in values]


def test_asynchronous_training():
    data = recorded("parameter_server")
    rows = list(
        table(
            "parameter_server", "| sequences per gradient | scheme | gradients per second | seconds to a loss of 2.7 |"
        )
    )
    assert len(rows) == 5
    for batch, scheme, *said in rows:
        (run,) = (runs[-1] for name, runs in data[f"slow, batch {batch}"].items()
                  if name.startswith(scheme) and "S=4" not in name)  # fmt: skip
        same(said, [run["rate"], next(at for at, _, loss in run["losses"] if loss <= 2.7)])


def test_split_bytes_and_seconds():
    data = recorded("split")
    rows = {row["plan"].replace(":", ", "): row for row in data["bytes"] if row["batch"] == "32x128"}
    for plan, said, ratio in table("split", "| cut | bytes through the socket | of the plain cut |"):
        assert int(said.replace(",", "")) == rows[plan]["wire"]
        assert int(ratio.removeprefix("1/")) == round(rows[plan]["wire_ratio"])
    for link, *said in table("split", "| link | `boundary` | `lowrank` |"):
        rate = link.replace(" Mb/s", "mbit")
        measured = [data["link"][f"{plan}, {rate}, delay 0"]["measured"] for plan in ("boundary", "lowrank")]
        same([cell.removesuffix(" s") for cell in said], measured)


def test_a_supernet_over_a_slow_link():
    cases = {str(case["sub_nets"]): {row["row"]: row for row in case["rows"]} for case in recorded("supernet")["cases"]}
    rows = list(table("supernet", "| sub-networks per step | row | seconds per step | MB per step |"))
    assert len(rows) == 6
    for count, name, seconds, sent in rows:
        inside = "active topk" if "topk" in name else name.partition(",")[0].lower()
        row = cases[count.partition(",")[0]][inside]
        same([seconds], [row["seconds"]])
        if sent != "all":
            same([sent], [row["bytes_per_step"] / 1e6])


def test_rounds_of_a_federation():
    speed = recorded("federated")["speed"]
    for name, said in table("federated", "| framework | seconds |"):
        key = name if name in speed else name.removesuffix(", one process")
        same([said], [speed[key]["median"]])


def test_cached_input():
    tables = {round(1e3 * one["step_seconds"]): one["rows"] for one in recorded("cache")["tables"]}
    for step, *said in table("data", "| a step takes | from files | half cached | all cached |"):
        rows = tables[int(step.removesuffix(" ms"))]
        same(said, [rows[name]["of_decoded"] for name in ("files", "cached 50%", "cached 100%")])


@pytest.mark.parametrize(("column", "model"), [(0, "resnet"), (1, "mlp")])
def test_schedules_of_kfac(column, model):
    rows = recorded("kfac")[f"schedules, {model}, 1gbit"]["rows"]
    for name, *said in table("kfac", "| schedule | small ResNet-18 | perceptron of equal layers |"):
        if said[column]:
            same([said[column]], [1e3 * rows[name]["step"]])
