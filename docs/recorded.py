"""What the benchmarks recorded, as tables and single figures, which ``python docs/made.py`` writes into the pages.

A benchmark that has recorded nothing yet is listed with its command. Figures that miss their target stay.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.tools.bench.session import reached

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
NBSP = "\u00a0"  # keeps a figure on one line
PERCENT = f"{NBSP}%"
UNREADABLE = "docs/recorded.py does not know the layout of this file"


class Row(NamedTuple):
    """One claim: the recorded figure, what it should be, and whether it is (None: nothing was asked for).

    ``words``: what a ratio means, with its direction; "": the figure is none.
    """

    what: str
    figure: str
    target: str = ""
    met: bool | None = None
    words: str = ""


@dataclass(frozen=True)
class Source:
    """One file of results.

    Attributes:
        command: makes it again.
        page: where the figures are explained.
        read: its claims.
        of_cards: there may be a file for each card, whose names begin alike, and none yet.
    """

    command: str
    page: str
    read: Callable[[Any], Iterator[Row]]
    of_cards: bool = False

    def files(self, name: str) -> list[Path]:
        """Those that are there."""
        return sorted(
            RESULTS.glob(f"{name}*.json" if self.of_cards else f"{name}.json")
        )


def claim(
    what: str,
    value: float,
    unit: str = "",
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """A row; ``unit`` follows the figure and the target; "a / b" and "a over b" are ratios."""
    figure, target, met = f"{number(value)}{unit}", "", None
    if at_most is not None:
        target, met = f"≤{NBSP}{number(at_most)}{unit}", value <= at_most
    elif at_least is not None:
        target, met = f"≥{NBSP}{number(at_least)}{unit}", value >= at_least
    words = in_words(value) if not unit and re.search(" / | over ", what) else ""
    return Row(what, figure, target, met, words)


def in_words(ratio: float) -> str:
    """What the first of two takes beside the second."""
    if abs(ratio - 1) < 0.005:
        return "as much"
    if ratio < 0.2:
        return f"1/{1 / ratio:.0f} of it"
    if ratio < 2:
        return (
            f"{abs(100 * (ratio - 1)):.0f}{PERCENT} {'less' if ratio < 1 else 'more'}"
        )
    return f"{ratio:.2g} times" if ratio < 99.5 else f"{ratio:,.0f} times"


def number(value: float) -> str:
    """Three digits; whole numbers above a hundred with commas."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main_figures(data: Any) -> Iterator[Row]:
    """The figures with their own targets; a load far above the workers is shown beside the figure."""
    for f in data["figures"]:
        unit = "" if f["unit"] == "x" else f"{NBSP}{f['unit']}"
        busy = (
            f"{NBSP}(load{NBSP}{f['load_average']:g})"
            if f["load_average"] > 2 * data["machine"]["cores"]
            else ""
        )
        figure = f"{number(f['value'])}{unit}{busy}"
        words = "" if unit else in_words(f["value"])
        if f["target"] is None:
            yield Row(f["what"], figure, words=words)
        else:
            sign = "≤" if (f["value"] <= f["target"]) == f["met"] else "≥"
            target = f"{sign}{NBSP}{f['target']:g}{unit}"
            yield Row(f["what"], figure, target, f["met"], words)


def predictions(data: Any) -> Iterator[Row]:
    """Errors by number of workers, and how often the first choice was right."""
    cells = data["cells"]
    for workers in sorted({c["workers"] for c in cells}):
        errors = [
            100 * abs(c["predicted"] / c["measured"] - 1)
            for c in cells
            if c["workers"] == workers
        ]
        enough = workers <= 2  # cores, on the machine that measured
        where, middle = f"predicted step, {workers} workers", statistics.median(errors)
        yield claim(
            f"{where}: median error", middle, PERCENT, at_most=10.0 if enough else 20.0
        )
        yield claim(
            f"{where}: worst of {len(errors)}",
            max(errors),
            PERCENT,
            at_most=25.0 if enough else None,
        )
    networks = {(c["model"], c["link"], c["workers"]) for c in cells}
    right = 0
    for network in networks:
        here = [c for c in cells if (c["model"], c["link"], c["workers"]) == network]
        first = min(here, key=lambda c: c["predicted"])
        right += first["measured"] <= 1.05 * min(c["measured"] for c in here)
    share = 100 * right / len(networks)
    yield claim(
        f"networks, of {len(networks)}, whose first choice is within 5 %",
        share,
        PERCENT,
        at_least=90.0,
    )


def hierarchy(data: Any) -> Iterator[Row]:
    """HiTopK against the exact torus, on both sides of the break-even."""
    seconds = {row["method"]: row["measured_seconds"] for row in data["rows"]}
    torus = seconds["ssgd collective=torus"]
    yield claim("torus / flat all-reduce, step", torus / seconds["ssgd"])
    for method, value in seconds.items():
        if method.startswith("hitopk"):
            density = float(method.partition("=")[2])
            below = density < data["break_even_density"]
            bound = {"at_most": 1.0} if below else {"at_least": 1.0}
            yield claim(
                f"hitopk, density {density:g} / torus, step", value / torus, **bound
            )


def selection(data: Any) -> Iterator[Row]:
    """At the largest size and at the smallest, where it loses."""
    largest = max(row["elements"] for row in data["rows"])
    for size, goals in ((largest, {"threshold": 2.0}), (65536, {})):
        for row in data["rows"]:
            if (
                row["data"] == "normal"
                and row["density"] == 0.001
                and row["elements"] == size
            ):
                for name in ("exact", "threshold"):
                    what = f"torch.topk / {name}, {size:,} elements, density 0.001"
                    yield claim(what, row["ratio"][name], at_least=goals.get(name))


def kfac(data: Any) -> Iterator[Row]:
    """Two tasks, and schedules side by side."""
    tasks = data["tasks"]
    ours = tasks["teacher, kfac"]["steps"]
    yield claim("K-FAC, steps to 0.3 on the ill-conditioned teacher", ours, at_most=260)
    for name, words in (("sgd", "tuned SGD"), ("adamw", "AdamW"), ("muon", "Muon")):
        steps = tasks[f"teacher, {name}"]["steps"]
        yield Row(
            f"{words}, the same",
            "not in 400 steps" if steps is None else f"{steps} steps",
        )
    for name in ("sgd", "adamw", "muon"):
        ratio = tasks["digits, kfac"]["seconds"] / tasks[f"digits, {name}"]["seconds"]
        yield claim(f"K-FAC / {name}, seconds to 0.62 on the digits", ratio)
    for place in sorted(key for key in data if key.startswith("schedules")):
        rows = data[place]["rows"]
        for other in ("dkfac", "mpd", "spd, published rules", "spd, threshold 1400"):
            if {"spd", other} <= set(rows):
                ratio = rows["spd"]["step"] / rows[other]["step"]
                yield claim(
                    f"{place.partition(', ')[2]}: spd / {other}, step",
                    ratio,
                    at_most=1.0,
                )


def parameter_server(data: Any) -> Iterator[Row]:
    """One node four times slower: the best settings of each scheme, by sequences per gradient."""
    for where in sorted(key for key in data if key.startswith("slow")):
        runs = {
            name.rpartition(", ")[0]: found[-1] for name, found in data[where].items()
        }
        plain, batch = runs["S-SGD (all-reduce)"], where.partition(", ")[2]
        for name, ours in runs.items():
            what = f"{batch}: {name} / S-SGD"
            if ours is plain:
                continue
            yield claim(
                f"{what}, gradients per second",
                ours["rate"] / plain["rate"],
                at_least=2.0,
            )
            for goal in (2.8, 2.7):
                at, theirs = _first(ours["losses"], goal), _first(plain["losses"], goal)
                if at is None or theirs is None:
                    yield Row(
                        f"{what}, seconds to a loss of {goal:g}",
                        "not reached",
                        f"≤{NBSP}1",
                        at is not None,
                    )
                else:
                    yield claim(
                        f"{what}, seconds to a loss of {goal:g}",
                        at / theirs,
                        at_most=1.0,
                    )
            if "asp" in runs and ours is not runs["asp"]:
                yield claim(
                    f"{batch}: asp / {name}, bytes per gradient",
                    runs["asp"]["mb"] / ours["mb"],
                    at_least=3.0,
                )
    for link, rows in data.get("shards", {}).items():
        ratio = statistics.median(rows["2"]) / statistics.median(rows["0"])
        yield claim(f"two shards / none, {link}, gradients per second", ratio)
    taken = data["in"]
    yield claim(
        "iteration numbers per second, one server",
        taken["taken_per_second"],
        at_least=10_000,
    )
    yield claim("the same: share of a core", taken["core_share"], at_most=1.0)


def _first(losses: list[list[float]], goal: float) -> float | None:
    return next((at for at, _, loss in losses if loss <= goal), None)


def federated(data: Any) -> Iterator[Row]:
    """A round beside other frameworks, and what a million clients take."""
    speed = data["speed"]
    plain = "Flower simulation, 1 actor"
    for name, goal in (
        ("Flower simulation, 2 actors", 10.0),
        (plain, 10.0),
        ("pfl-research", 1.0),
    ):
        if name in speed:
            yield claim(
                f"{name} / thinwire, seconds per round",
                speed[name]["ratio"],
                at_least=goal,
            )
    for budget, run in data["million"].items():
        what = f"1,000,000 clients, states in memory under a budget of {int(budget) / 1e6:.1f} MB"
        yield claim(
            what, run["states_peak"] / 1e6, f"{NBSP}MB", at_most=int(budget) / 1e6
        )
        under = f"1,000,000 clients, a budget of {int(budget) / 1e6:.1f} MB"
        yield claim(f"{under}, the process grows by", run["grown"] / 1e6, f"{NBSP}MB")
        seconds = statistics.median(run["seconds"])
        yield claim(f"{under}, seconds a round", seconds)
    equal = data["uneven"]["equal"]["makespan"]
    for name in ("lpt", "pull"):
        ratio = data["uneven"][name]["makespan"] / equal
        yield claim(f"schedule {name} / equal parts, makespan", ratio, at_most=1.0)


def split(data: Any) -> Iterator[Row]:
    """Bytes by formula, seconds on links, accuracy."""
    full = {row["plan"]: row for row in data["bytes"] if row["batch"] == "32x128"}
    what = "BERT-base, rank 8, 32 x 128: boundary / lowrank"
    yield claim(
        f"{what}, activations and gradients",
        full["lowrank"]["state_ratio"],
        at_least=96.0,
    )
    yield claim(
        f"{what}, all that crosses the socket",
        full["lowrank"]["wire_ratio"],
        at_least=95.0,
    )
    yield claim(
        f"{what} with int8", full["lowrank:int8"]["state_ratio"], at_least=300.0
    )
    rows = {key: row for key, row in data["task"].items() if "seed 0" in key}
    small = {
        key: row["score"] for key, row in rows.items() if key.endswith("lr 0.0003")
    }
    plain = next(
        (score for key, score in small.items() if key.startswith("lowrank,")), None
    )
    for name in ("int8,pack", "int4,pack"):
        score = next(
            (
                score
                for key, score in small.items()
                if key.startswith(f"lowrank:{name}")
            ),
            None,
        )
        if plain is not None and score is not None:
            lost = 100 * (plain - score)
            yield claim(
                f"lowrank with {name}: points lost from random weights, one seed",
                lost,
                at_most=1.0,
            )
    for width in (768, 256):
        here = {
            key: row
            for key, row in data["task"].items()
            if f"pretrained-{width}," in key
        }
        pairs = [
            (row, here.get(key.replace("lowrank,", "lowrank:int8,pack,", 1)))
            for key, row in here.items()
        ]
        coded = [
            (row["score"], other)
            for row, other in pairs
            if other is not None and other is not row
        ]
        if coded:
            what = f"lowrank with int8,pack, width {width}, from pre-trained weights"
            lost = statistics.mean(
                100 * (score - other["score"]) for score, other in coded
            )
            yield claim(
                f"{what}: points lost, mean of {len(coded)} seeds", lost, at_most=1.0
            )
            ratio = statistics.mean(other["wire_ratio"] for _, other in coded)
            yield claim(
                f"{what}: boundary / all that crosses the socket",
                ratio,
                at_least=300.0 if width == 768 else None,
            )
    worst = max(abs(row["off"]) for row in data["link"].values())
    yield claim(
        "seconds on a link, predicted: worst error", 100 * worst, PERCENT, at_most=15.0
    )


def supernet(data: Any) -> Iterator[Row]:
    """One sub-network per step, and six."""
    for case in data["cases"]:
        where = f"{case['sub_nets']} sub-network{'s' * (case['sub_nets'] > 1)} per step"
        yield claim(
            f"{where}: active / dense, step", case["active_over_dense"], at_most=0.80
        )
        yield claim(
            f"{where}: active / DDP, step", case["active_over_ddp"], at_most=0.65
        )


def locality(data: Any) -> Iterator[Row]:
    """Accuracy beside a global shuffle."""
    mean = {
        (row["nodes"], row["shuffle"]): statistics.mean(row["accuracy"])
        for row in data["rows"]
    }
    for nodes in sorted({nodes for nodes, _ in mean}):
        lost = 100 * (mean[nodes, "global shuffle"] - mean[nodes, "locality"])
        yield claim(
            f"{nodes} machines: points of accuracy lost to LocalitySampler", lost
        )


def hsdp(data: Any) -> Iterator[Row]:
    """Of every link: methods beside plain HSDP."""
    for run in data["runs"]:
        plain, *rest = run["rows"]
        for row in rest:
            what = f"{run['link']}: {row['label']} / {plain['label']}, step"
            yield claim(what, row["step_seconds"] / plain["step_seconds"])


def sites(data: Any) -> Iterator[Row]:
    """Of every row: beside the same shards without another site."""
    apart, *rest = data["rows"]
    for row in rest:
        label = row["label"].replace(":", " ")  # may break on a narrow screen
        what = f"{label} / no other site, {data['link']}, step"
        late = "delay=3" in row["label"]
        yield claim(
            what,
            row["step_seconds"] / apart["step_seconds"],
            at_most=1.05 if late else None,
        )


def auto(data: Any) -> Iterator[Row]:
    """Beside the best fixed exact method, with the spread of that one as its allowance where it is above 3 %."""
    for row in data:
        what = f"auto / {row['best']} (the best), {row['model'].split(':')[0]}, {row['link']}, {row['workers']} workers"
        yield claim(what, row["ratio"], at_most=max(1.03, round(1 + row["spread"], 2)))


def whole_runs(data: Any) -> Iterator[Row]:
    """Seconds of whole runs over those of the method that wins there, or over those without any exchange."""
    for network in data:
        seconds = {
            text: statistics.median(run["seconds"] for run in runs)
            for text, runs in network["rows"].items()
        }
        where = (
            f"{network['steps']} steps, {network['link']}, {network['workers']} workers"
        )
        if "local" in seconds:
            yield claim(
                f"local / no exchange, {where}", seconds["local"] / seconds["compute"]
            )
            yield claim(f"local, {where}", seconds["local"], " s")
            continue
        own = seconds.pop("auto:lossy=true")
        winner = min(seconds, key=seconds.__getitem__)
        yield claim(
            f"auto, lossy / {winner}, {where}", own / seconds[winner], at_most=1.10
        )


def merge_plans(data: Any) -> Iterator[Row]:
    """Every rule beside DDP as it comes."""
    for model, link in dict.fromkeys((row["model"], row["link"]) for row in data):
        here = {
            row["row"]: row
            for row in data
            if (row["model"], row["link"]) == (model, link)
        }
        for label, row in here.items():
            if label not in ("ddp", "compute") and row["measured"]:
                yield claim(
                    f"{label} / ddp, {model}, {link}",
                    row["measured"] / here["ddp"]["measured"],
                )


def bucket_view(data: Any) -> Iterator[Row]:
    """What it is worth that ``.grad`` is the bucket's memory."""
    for row in data:
        yield claim(
            f"ssgd, step with .grad in the bucket / with its own, {row['model']}",
            row["ratio"],
        )


def lars(data: Any) -> Iterator[Row]:
    """The price of the norms, and how exact the rates are."""
    for row in data["rows"]:
        if row["optimizer"] != row["beside"]:
            asked = (
                1.5
                if (row["model"], row["optimizer"]) == ("resnet50", "LARS")
                else None
            )
            what = f"{row['optimizer']} / {row['beside']}, a step on the shapes of {row['model']}"
            yield claim(what, row["ratio"], at_most=asked)
    for model, error in data["rate_errors"].items():
        yield Row(
            f"relative error of a layer's rate, {model}",
            f"{error:.1e}",
            f"≤{NBSP}1e-6",
            error <= 1e-6,
        )


def claims(data: Any) -> Iterator[Row]:
    """What holds of each paper; its figures have a page of their own."""
    for name, found in data.items():
        yield Row(f"{name}: verdict", found["word"].rstrip(":"))


def cache(data: Any) -> Iterator[Row]:
    """Epochs beside those of samples decoded in advance through the same loader; hits; what killed processes left."""
    for table in data["tables"]:
        step = f"step of {1e3 * table['step_seconds']:.0f} ms"
        files, full = table["rows"]["files"], table["rows"]["cached 100%"]
        yield claim(
            f"epoch from files / decoded in advance, {step}", files["of_decoded"]
        )
        asked = (
            1.1 if files["of_decoded"] > 1.1 else None
        )  # where decoding was the bound
        yield claim(
            f"epoch with a full cache / decoded in advance, {step}",
            full["of_decoded"],
            at_most=asked,
        )
        yield claim(
            f"the same / batches made in advance, no loader, {step}",
            full["of_synthetic"],
        )
    exact = data["hits_exact"]
    yield Row(
        "hits from the second epoch on are the cached share",
        "exactly" if exact else "no",
        "exactly",
        exact,
    )
    kills = data["options"]["kills"]
    yield claim(
        f"torn samples after {kills} kills of a process that fills a cache",
        data["torn"],
        at_most=0,
    )


OURS = ("local ", "powersgd ", "cast ")


def tolls(data: Any) -> Iterator[Row]:
    """Seconds to DDP's loss of thinwire's best row: over DDP's without a network, the others' best, and ``alone``.

    And of ``"local"`` as it comes: over DDP's steps without a network, and the best row of all.
    """
    bounds = {"10mbit": (1.30, 0.70), "100mbit": (1.10, 0.85), "1gbit": (1.06, 0.95)}
    bounds |= dict.fromkeys(("100mbit 25ms 0.1%", "20mbit 75ms 0.1%"), (None, 0.60))
    of_local = {("2", "100mbit"): 1.05, ("2", "10mbit"): 1.15}
    of_local |= {("8", "100mbit"): 1.15, ("8", "10mbit"): 1.35}
    hindsight = {"100mbit": 1.05, "10mbit": 1.10}
    trained = {one["name"]: one for one in data["trained"]}
    for network in data["clocked"]:
        one, link = trained[network["name"]], network["link"]
        chosen = network["chosen"]
        seconds = {}
        for label, pace in network["paces"].items():
            factors = (one["rows"] | chosen)[label]["factors"]
            steps = statistics.median(float("inf") if f is None else f for f in factors)
            seconds[label] = (
                pace["start_seconds"] + one["steps"] * steps * pace["seconds"]
            )
        as_it_comes = {label: seconds.pop(label) for label in chosen}
        mine = [label for label in seconds if label.startswith(OURS)]
        best = min(mine, key=seconds.__getitem__)
        peer = min(set(seconds) - {*mine, "alone"}, key=seconds.__getitem__)
        size, workers = network["name"].split("/")
        where = f"{size}, {workers} workers, {link}"
        toll, over = bounds.get(link, (None, None))
        alone = one["steps"] * network["compute_seconds"]
        yield claim(
            f"{where}: {best} / DDP without a network",
            seconds[best] / alone,
            at_most=toll,
        )
        yield claim(
            f"{where}: {best} / {peer}",
            seconds[best] / seconds[peer],
            at_most=over,
        )
        if "alone" in seconds:
            yield claim(
                f"{where}: {best} / one worker alone",
                seconds[best] / seconds["alone"],
                at_most=1.0,
            )
        for label, taken in as_it_comes.items():
            yield claim(
                f"{where}: {label} as it comes / DDP without a network",
                taken / alone,
                at_most=of_local.get((workers, link)),
            )
            yield claim(
                f"{where}: {label} as it comes / {min(seconds, key=seconds.__getitem__)}",
                taken / min(seconds.values()),
                at_most=hindsight.get(link),
            )


def long_wire(data: Any) -> Iterator[Row]:
    """Steps of thinwire over DDP's on the same wire; on lossy ones within a fifth of it."""
    for one in data:
        link, delay, loss, control = one["wire"].split("/")
        where = f"{link}, {delay} each way, {loss} lost, {'cubic' if control == 'cubic' else 'BBR asked for'}"
        ddp = one["rows"]["ddp"]["seconds"]
        for label, row in one["rows"].items():
            exact = label == "ssgd" and loss != "0%"
            if label != "ddp":
                yield claim(
                    f"{where}: {label} / DDP, step",
                    row["seconds"] / ddp,
                    at_most=0.2 if exact else None,
                )


def of_seeds(factors: list[float | None]) -> str:
    """The median, and the ends."""
    ordered = sorted(float("inf") if factor is None else factor for factor in factors)
    low, middle, high = (
        "never" if x == float("inf") else f"{x:.2f}"
        for x in (ordered[0], ordered[len(ordered) // 2], ordered[-1])
    )
    return f"{middle} ({low} to {high})"


SHORTEST = 192
"""Steps of DDP to the loss: in shorter runs the result of a seed is luck."""


def race(data: Any) -> Iterator[Row]:
    """Steps to DDP's loss, over DDP's: the median of three seeds, and their ends; the shortest runs are left out."""
    for one in data:
        track = one["track"]
        if not track["schedule"] and track["steps"] * one["share"] < SHORTEST:
            continue
        apart = (
            ", each with its own share of the text"
            if "shares" in track["model"]
            else ""
        )
        where = f"{one['elements'] / 1e6:.1f} M parameters, {track['workers']} workers{apart}, "
        if track["schedule"]:
            where += f"whole runs of {track['steps']:,} steps"
            where += ", Muon" if "muon" in track["model"] else ""
            where += (
                "" if "scaled_init" in track["model"] else ", all weights begin alike"
            )
        else:
            where += f"DDP's loss after {track['steps'] * one['share']:.0f} steps"
        for label, row in one["rows"].items():
            factors = [math.inf if f is None else f for f in row["factors"]]
            middle = sorted(factors)[len(factors) // 2]
            yield Row(
                f"{where}: {label}",
                f"{of_seeds(row['factors'])}, rate x{NBSP}{row['rate']:g}",
                words="" if math.isinf(middle) else f"{in_words(middle)} in steps",
            )


def other_models(data: Any) -> Iterator[Row]:
    """Times sooner than DDP at its loss, and steps over DDP's with their ends, of the rows that raced."""
    for one in data:
        for row in one["rows"]:
            if row["seeds"] and row["label"] != "ddp" and row["sooner"] is not None:
                where = f"{one['model']}, {one['workers']} workers, {one['link']}"
                ends = " to ".join(
                    f"{row[end]:.2f}" if row[end] else "never"
                    for end in ("fewest_steps", "most_steps")
                )
                steps = f"{row['steps']:.2f} times DDP's steps, {ends}"
                yield Row(
                    f"{where}: {row['label']}, times sooner than DDP",
                    f"{row['sooner']:.2g} ({steps})",
                )


def slow_rank(data: Any) -> Iterator[Row]:
    """Steps where one rank has less speed than the other, over those of equal ranks and over DDP's there."""
    for one in data:
        where = f"{one['workers']} workers, {one['link']}"
        equal, *others = one["seconds"]
        for speed in others:
            slow = f"one at {100 * float(speed):.0f} % speed"
            for label, seconds in one["seconds"][speed].items():
                over = seconds / one["seconds"][equal][label]
                yield claim(f"{where}, {slow} / equal: {label}, step", over)
                if label not in ("compute", "ddp"):
                    over = one["seconds"][speed]["ddp"] / seconds
                    yield claim(
                        f"{where}, {slow}: {label}, times faster than DDP", over
                    )


def uneven(data: Any) -> Iterator[Row]:
    """Seconds to the loss at which four in step end, over theirs, of two fast machines and two of half the speed."""
    step, fast = data["four in step"]["points"], data["four fast ones"]["points"]
    seconds, target = step[-1]
    names = (
        "own pace",
        "own pace, look 0.5",
        "the two fast ones alone",
        "four fast ones",
    )
    for name in names:
        there = reached(data[name]["points"], target)
        yield claim(
            f"{name} / four in step, seconds to its last loss",
            math.inf if there is None else there / seconds,
            at_most=0.65 if name == "own pace" else None,
        )
    for name in ("four in step", *names):
        yield claim(f"{name}, held-out loss at the end", data[name]["points"][-1][1])
    equal = data["four fast ones, own pace"]["points"]
    yield claim(
        "own pace / common pace, four fast ones, seconds of a run",
        equal[-1][0] / fast[-1][0],
        at_most=1.02,
    )


def late_rounds(data: Any) -> Iterator[Row]:
    """Steps to plain averaging's loss, over its own, of rounds that come back late: median and ends."""
    for one in data["rows"]:
        late, kept = one["delay"], one["kept"]
        what = f"every {data['every']}, " + (
            f"{late} steps late, {100 * kept:.0f} % kept" if late else "merged at once"
        )
        yield Row(what, of_seeds(one["factors"]))


def going_on(data: Any) -> Iterator[Row]:
    """A step under torchft over one without it, and over torchft's own; steps and loss with three deaths."""
    steps, deaths, link = data["steps"], data["deaths"], data["link"]
    for method in ("ssgd", "acp"):
        yield claim(
            f"{method} under torchft / by attach, 2 replicas, {link}, step",
            steps[method] / steps[f"attach-{method}"],
            at_most=1.10,
        )
    for method in ("ssgd", "acp"):
        yield claim(
            f"{method} under torchft / torchft's DDP, 2 replicas, {link}, step",
            steps[method] / steps["torchft-ddp"],
            at_most=1.0,
        )
    for mode, found in deaths.items():
        where = f"{mode}, 3 replicas, {link}, each dies once in 60 s"
        yield claim(f"{where}: steps", statistics.median(found["steps"]))
        yield claim(f"{where}: loss", statistics.median(found["loss"]))


def peer_link(data: Any) -> Iterator[Row]:
    """Rates of one way over another's, by link."""
    for link, rates in data.items():
        if link != "load_average":
            where = f"64 MB, {link} link, rate"
            yield claim(
                f"plain / gloo, {where}", rates["plain"] / rates["gloo"], at_least=1.0
            )
            yield claim(
                f"TLS / plain, {where}", rates["TLS"] / rates["plain"], at_least=0.8
            )


def local_steps(data: Any) -> Iterator[Row]:
    """Mean steps over compute alone, and what the training thread computes more."""
    bounds = {
        "100mbit": {
            "fragment_sync_delay=full": 1.03,
            "fragment_sync_delay=3": 1.03,
            "sync_every=8 codec=int8": 1.08,
        },
        "10mbit": {"local": 1.15, "codec=int2": 1.15},
    }
    for network in data:
        found, where = (
            network["result"],
            f"{network['workers']} workers, {network['link']}",
        )
        rows = {row["label"]: row for row in found["rows"]}
        alone = found["rows"][0]
        for label, row in rows.items():
            if row is not alone and not row["error"]:
                bound = next(
                    (
                        b
                        for end, b in bounds[network["link"]].items()
                        if label.endswith(end)
                    ),
                    None,
                )
                share = row["step_seconds"] / found["compute_seconds"]
                yield claim(
                    f"{where}: {label}, step over compute alone", share, at_most=bound
                )
                if label.startswith("local sync_every=8"):
                    more = 100 * (row["host_seconds"] / alone["host_seconds"] - 1)
                    yield claim(
                        f"{where}: {label}, more CPU time of the training thread",
                        more,
                        PERCENT,
                        at_most=5.0,
                    )


def gpu(data: Any) -> Iterator[Row]:
    """What was right on a card, of what ran there."""
    machine = data["machine"]
    where = (
        f"one {machine['cards'][0]}, torch {machine['torch']}, NCCL {machine['nccl']}"
    )
    yield Row(f"tests of kernels and optimizers, {where}", data["tests"]["says"][0])
    parts = (
        ("sanitizer", "2 ranks"),
        ("nccl alone", '2 ranks, in a group for "nccl" alone'),
        ("three ranks", "3 ranks"),
        ("four ranks", "4 ranks"),
    )
    for part, ranks in parts:
        rows = data[part]["rows"]
        right = f"{sum(row['right'] for row in rows)} of {len(rows)}"
        raced = (
            f"; {data[part]['races']} races found by torch's stream sanitizer"
            if part == "sanitizer"
            else ""
        )
        yield Row(f"methods as in LocalWorld, {ranks}", right + raced)
    ways = data["ways of training"]["rows"]
    right = f"{sum(row['right'] for row in ways)} of {len(ways)}"
    yield Row("ways of training that are right, 2 ranks", right)
    yield Row(
        "of these, the same bits as DDP, or as without a restart",
        f"{sum(row.get('as_ddp') == 0 for row in ways)}",
    )
    drawn = ("qsgd", "terngrad")  # a card draws other numbers than a CPU
    far = [
        row["as_cpu"]
        for row in ways
        if row.get("as_cpu") is not None and row["way"] not in drawn
    ]
    yield Row(
        f"largest difference of a loss from the CPU's, {len(far)} ways",
        f"{100 * max(far):.2g}{PERCENT}",
    )


def gpu_bench(data: Any) -> Iterator[Row]:
    """Steps on a card that two ranks share, over an emulated link."""
    where = f"{data['parameters'] / 1e6:.0f} M parameters, {data['workers']} ranks, {data['link']}"
    for row in data["rows"]:
        faster = row["speedup"]
        yield Row(
            f"step of {row['label']}, {where}",
            f"{1e3 * row['step_seconds']:.0f}{NBSP}ms"
            + (f", {faster:.1f} times as fast as DDP's" if faster else ""),
        )


def _card(data: Any) -> str:
    return f"{data['card'] or 'a CPU'}, torch {data['torch']}"


def gpu_kernels(data: Any) -> Iterator[Row]:
    """Of each kernel at its largest size: milliseconds, and beside the time in which the card copies its bytes."""
    largest = {
        (row["part"], row["name"]): row for row in data["rows"]
    }  # the last of each
    for (part, name), row in largest.items():
        size = f", {row['elements']:,} elements" if row["elements"] else ""
        launched = (
            f", {row['launches']} launches" if row["launches"] is not None else ""
        )
        yield Row(
            f"{part}: {name}{size}, {_card(data)}",
            f"{row['ms']:.3g}{NBSP}ms{launched}",
            words=f"{row['floor']:.2g} times the copy of its bytes",
        )


def gpu_exchange(data: Any) -> Iterator[Row]:
    """Of each method: a step that only exchanges GPT-2's gradients, and what the card does for it."""
    ddp = next((row["step"] for row in data["rows"] if row["name"] == "DDP"), None)
    for row in data["rows"]:
        if row["name"] == "empty":
            continue
        figure = f"{row['step']:.3g}{NBSP}ms"
        if "busy beyond empty" in row:
            figure += f"; card busy {row['busy beyond empty']:.2g}{NBSP}ms"
            figure += f" in {row['kernels beyond empty']:.0f} kernels"
        yield Row(
            f"step of {row['name']}, {data['ranks']} ranks, {_card(data)}",
            figure,
            words=f"{in_words(row['step'] / ddp)} beside DDP"
            if ddp and row["name"] != "DDP"
            else "",
        )


def gpu_long_runs(data: Any) -> Iterator[Row]:
    """Of each row of whole runs: the lowest final loss over its rates, beside DDP's with the same optimizer."""
    best: dict[tuple[str, str, str], float] = {}
    for row in data["rows"]:
        key = (row["size"], row["optimizer"], row["name"])
        if row["loss"] is not None:
            best[key] = min(row["loss"], best.get(key, row["loss"]))
    for (size, inner, name), loss in best.items():
        ddp = best.get((size, inner, "ddp"))
        beside = f"{loss - ddp:+.3f} beside DDP" if ddp and name != "ddp" else ""
        yield Row(
            f"{size}, {inner}, final loss of {name}, {_card(data)}",
            f"{loss:.3f}",
            words=beside,
        )


def device_rates(data: Any) -> Iterator[Row]:
    """Measured over assumed seconds: of models, and of the largest amount of each of the methods' own work."""
    where = f"{data['device']}, as --device {data['assumed']}"
    for row in data["models"]:
        what = (
            f"measured / assumed step of {row['model']} in {row['precision']}, {where}"
        )
        yield claim(what, row["ms"] / row["assumed_ms"])
    largest = {row["kernel"]: row for row in data["kernels"]}  # the last of each
    for name, row in largest.items():
        yield claim(
            f"measured / assumed {name}, {where}", row["us"] / row["assumed_us"]
        )


def members(data: Any) -> Iterator[Row]:
    """Members of a server: one of half the speed and one killed, then many kills and stops."""
    run, faults = data["run"], data["faults"]
    seconds, target = run["all in step"]["points"][-1]
    there = reached(run["own pace"]["points"], target)
    yield claim(
        "own pace / all in step, seconds to the last loss of the latter",
        math.inf if there is None else there / seconds,
        at_most=1.0,
    )
    for name in ("own pace", "all in step"):
        yield claim(f"{name}, held-out loss at the end", run[name]["points"][-1][1])
    calm = faults["undisturbed"]["loss"]
    for name in ("kills", "stops"):
        one = faults[name]
        what = f"{one[name]} {name} of members"
        yield claim(f"{what}, loss / undisturbed", one["loss"] / calm, at_most=1.03)
        yield claim(
            f"{what}, longest wait of one that was let alone, s",
            one["longest_wait"],
            at_most=1.2,
        )


ON_A_GPU = "thinwire bench --device cuda --model chargpt:layers=8:width=512:heads=8:block=256:batch=16"
ON_A_CARD = "python benchmarks/gpu/all.py"
SOURCES = {
    "device_rates": Source(
        "python benchmarks/device_rates.py", "plan.md", device_rates
    ),
    "device_rates_h100": Source(
        "python benchmarks/device_rates.py --on cuda --device h100",
        "plan.md",
        device_rates,
    ),
    "gpu": Source("make gpu", "gpu.md", gpu),
    "gpu_bench": Source(f"{ON_A_GPU} --link 1gbit", "gpu.md", gpu_bench),
    "gpu_bench_10gbit": Source(f"{ON_A_GPU} --link 10gbit", "gpu.md", gpu_bench),
    "gpu_kernels": Source(ON_A_CARD, "gpu.md", gpu_kernels, of_cards=True),
    "gpu_exchange": Source(ON_A_CARD, "gpu.md", gpu_exchange, of_cards=True),
    "gpu_long_runs": Source(ON_A_CARD, "gpu.md", gpu_long_runs, of_cards=True),
    "gpu_race": Source(
        "thinwire race chargpt:layers=8:width=320:heads=8:block=256:batch=16 --link 10gbit --device cuda --seeds 3",
        "gpu.md",
        other_models,
    ),
    "local_steps": Source(
        "python benchmarks/local_steps.py", "methods/local.md", local_steps
    ),
    "race": Source("python benchmarks/race.py", "methods/local.md", race),
    "other_models": Source(
        "python benchmarks/other_models.py", "race.md", other_models
    ),
    "uneven": Source("python benchmarks/uneven.py", "parameter_server.md", uneven),
    "members": Source(
        "python benchmarks/members.py faults", "parameter_server.md", members
    ),
    "slow_rank": Source(
        "python benchmarks/slow_rank.py", "parameter_server.md", slow_rank
    ),
    "late_rounds": Source(
        "python benchmarks/late_rounds.py", "methods/local.md", late_rounds
    ),
    "main_figures": Source(
        "python benchmarks/main_figures.py --loss", "methods/exact.md", main_figures
    ),
    "predictions": Source("python benchmarks/predictions.py", "plan.md", predictions),
    "auto": Source("python benchmarks/auto.py --workers 4", "plan.md", auto),
    "whole_runs": Source("python benchmarks/whole_runs.py", "script.md", whole_runs),
    "bucket_view": Source(
        "python benchmarks/bucket_view.py", "what_differs_from_ddp.md", bucket_view
    ),
    "merge_plans": Source("python benchmarks/merge_plans.py", "attach.md", merge_plans),
    "hierarchy": Source(
        "python benchmarks/hierarchy.py", "methods/sparse.md", hierarchy
    ),
    "hsdp": Source("python benchmarks/hsdp.py", "frameworks.md", hsdp),
    "sites": Source("python benchmarks/sites.py", "larger_than_a_card.md", sites),
    "going_on": Source(
        "python benchmarks/going_on.py", "when_a_machine_dies.md", going_on
    ),
    "peer_link": Source("python benchmarks/peer_link.py", "security.md", peer_link),
    "tolls": Source("python benchmarks/peers/tolls.py", "peers.md", tolls),
    "long_wire": Source("python benchmarks/long_wire.py", "two_sites.md", long_wire),
    "select": Source("python benchmarks/selection.py", "methods/sparse.md", selection),
    "claims": Source(
        "thinwire reproduce --out benchmarks/results/claims.json", "papers.md", claims
    ),
    "lars": Source("python benchmarks/lars.py", "large_batch.md", lars),
    "cache": Source("python benchmarks/cache.py", "data.md", cache),
    "locality": Source("python benchmarks/locality.py", "data.md", locality),
    "kfac": Source("python benchmarks/kfac.py tasks", "kfac.md", kfac),
    "parameter_server": Source(
        "python benchmarks/parameter_server.py", "parameter_server.md", parameter_server
    ),
    "federated": Source("python benchmarks/federated.py", "federated.md", federated),
    "split": Source("python benchmarks/split.py", "split.md", split),
    "supernet": Source("python benchmarks/supernet.py", "supernet.md", supernet),
}
"""By the name of the file in ``benchmarks/results``."""
ELSEWHERE = {
    "encode_time": "compares two commits",
    "step_cpu": "compares two commits",
    "peers": "benchmarks/peers/page.py makes tables of it",
    "parameter_server_rates_batch1": "the rates tried in virtual time",
    "parameter_server_rates_batch4": "the rates tried in virtual time",
}
"""Files of results without a claim, and why."""


def rows(name: str) -> list[Row]:
    """The claims of a file; none if it was not recorded. A file of another layout says so in a last row."""
    found: list[Row] = []
    for path in SOURCES[name].files(name):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found.extend(SOURCES[name].read(data))
        except (KeyError, IndexError, TypeError) as error:
            found.append(Row(f"{UNREADABLE}: {error!r}", "see the file"))
    return found


def table(name: str) -> str:
    """As Markdown: the command, the page, the claims."""
    source, found = SOURCES[name], rows(name)
    head = f"`{source.command}`; explained in [{source.page}](../../docs/{source.page})"
    if not found:
        none = "No card has run this yet." if source.of_cards else "Not recorded."
        return f"{head}. {none}"
    lines = [
        f"{head}.\n",
        "| claim | recorded | in words | target reached |",
        "|---|---|---|---|",
    ]
    for row in found:
        reached = (
            "" if row.met is None else f"{row.target}: {'yes' if row.met else '**no**'}"
        )
        lines.append(f"| {row.what} | {row.figure} | {row.words} | {reached} |")
    return "\n".join(lines)


def tally() -> str:
    """How many targets were reached, over all files."""
    judged = [row.met for name in SOURCES for row in rows(name) if row.met is not None]
    return f"{sum(judged)} of {len(judged)} figures that have a target reach it."


def missed() -> str:
    """Every figure that misses its target, below the command that makes it."""
    lines = []
    for name, source in SOURCES.items():
        found = [row for row in rows(name) if row.met is False]
        if found:
            lines += ["", f"`{source.command}`:", ""]
        lines += [f"* {row.what}: {row.figure}; target {row.target}" for row in found]
    return "\n".join(lines)


def gpu_steps() -> str:
    """Steps of every row on the links of ``gpu_bench``."""
    columns = [
        {
            row.what.split(",")[0].removeprefix("step of "): row.figure.split(",")[0]
            for row in rows(name)
        }
        for name in ("gpu_bench_10gbit", "gpu_bench")
    ]
    lines = ["| row | 10 Gb/s | 1 Gb/s |", "|---|---|---|"]
    for label in columns[0] | columns[1]:
        cells = " | ".join(column.get(label, "-") for column in columns)
        lines.append(f"| `{label.replace(' ', ':')}` | {cells} |")
    return "\n".join(lines)


DEATHS = {
    "torchft-allreduce": "torchft: `Manager.allreduce` of each gradient",
    "ssgd": "thinwire: `ssgd`",
    "torchft-diloco": "torchft: `DiLoCo`, averaging every 16 steps",
    "local": "thinwire: `local`, int8, every 16 steps",
    "acp": "thinwire: `acp`, rank 4",
}


def deaths() -> str:
    """How far replicas that die get, in ``going_on``."""
    found = {row.what: row.figure for row in rows("going_on")}
    lines = ["| | steps | loss at the end |", "|---|---|---|"]
    for mode, label in DEATHS.items():
        where = f"{mode}, 3 replicas, 100mbit, each dies once in 60 s"
        steps, loss = found[f"{where}: steps"], found[f"{where}: loss"]
        lines.append(f"| {label} | {steps} | {loss} |")
    return "\n".join(lines)


VIEWS = {f.__name__: f for f in (tally, missed, gpu_steps, deaths)}


def made(name: str) -> str:
    """One of ``VIEWS``, or the table of a file."""
    return VIEWS[name]() if name in VIEWS else table(name)


def figure(text: str) -> str:
    """One figure, for example of "kfac: K-FAC / muon, seconds to 0.62 on the digits".

    Raises:
        ValueError: there is no such file or claim, or it was not recorded.
    """
    name, _, what = text.partition(": ")
    for row in rows(name) if name in SOURCES else []:
        if row.what == what:
            return row.figure
    raise ValueError(
        f"{text!r} is no recorded figure: benchmarks/results/figures.md has them"
    )
