"""``thinwire kfac``: what second-order preconditioning will cost on a model and a network, before anything is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.checks import check_choice
from thinwire.core.records import plain
from thinwire.core.words import duration, in_milliseconds
from thinwire.tools.cli.console import Output, plain_table, progress, read_record, watched_load
from thinwire.tools.cli.measure import CostsOptions
from thinwire.tools.cli.options import JsonOption, PlanOptions, PlotOption, ThreadsOption
from thinwire.tools.cli.verb import argument, option

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.systems.kfac.plan import KFACPlan
    from thinwire.systems.kfac.predict import KFACPrediction
    from thinwire.systems.kfac.tuning import Trial


class KfacOptions(JsonOption):
    method: str = option("inverse", "inverse, inverse_pi or eigen.")
    factor_update_steps: int = option(10, "Steps between new statistics.", least=1)
    inv_update_steps: int = option(100, "Steps between inversions.", least=1)


class KfacPlanVerb(KfacOptions, PlanOptions):
    """Predict a step of each schedule: messages, who inverts what, seconds. No GPU or cluster is needed.

    Example: thinwire kfac plan resnet50 --workers 16 --link 10gbit
    """

    schedules: str | None = option(
        None, "Of dkfac, mpd, spd, spd-published, kaisa:<fraction>, dp; by default all that fit."
    )
    explain: bool = option(False, "Also show the messages and owners of the fastest plan.")
    out: Path | None = option(None, "Write the fastest plan to this file, for Variant(plan=).", writes="file")

    def run(self, output: Output) -> Any:
        from thinwire.systems.kfac.assignment import make_plan
        from thinwire.systems.kfac.predict import predict
        from thinwire.systems.kfac.prices import LayerTimes, layers_of
        from thinwire.systems.kfac.published import named
        from thinwire.systems.kfac.variant import METHODS
        from thinwire.tools.cli.plan_inputs import read_question

        question = read_question(self)
        profile, topology, prices = question.setting
        world = topology.world_size
        if not (layers := layers_of(profile)):
            raise ValueError(f"{profile.name} has no Linear or Conv2d layer that K-FAC can use")
        check_choice("--method", self.method, METHODS)
        times = LayerTimes.of_profile(profile, layers)
        intervals = (self.factor_update_steps, self.inv_update_steps)
        found: list[tuple[KFACPlan, KFACPrediction]] = []
        for name in _schedules(self.schedules, world):
            made = make_plan(layers, world, prices, times, maker=named(name), method=self.method)
            found.append((made, predict(made, profile, prices)))
        found.sort(key=lambda pair: pair[1].step_seconds(*intervals))
        title = f"{profile.name}, {len(layers)} layers, {world} ranks, {question.describe_network()}"
        output.say(_table(title, found, *intervals))
        if self.explain:
            output.say(_explained(found[0][0]))
        if "inverse" not in prices.compute and self.method != "eigen":
            output.say("Inversions are assumed from FLOPs: thinwire kfac calibrate measures them.")
        if self.out is not None:
            output.write(self.out, found[0][0].to_json())
        return {
            "question": question.to_data(),
            "layers": len(layers),
            **self.part(["factor_update_steps", "inv_update_steps"]),
            "plans": [
                {**plain(made), **asdict(predicted), "step_seconds": predicted.step_seconds(*intervals)}
                for made, predicted in found
            ],
        }


class KfacCalibrateVerb(CostsOptions):
    """Measure how long this device takes to invert and to decompose factors, by their side.

    Example: thinwire kfac calibrate --out costs.json
    """

    costs: Path | None = option(None, "A file from thinwire probe, whose costs are written too.")
    largest: int = option(4096, "Side of the largest matrix.")
    seconds: float = option(20.0, "Time for each of the two curves; what does not fit is extrapolated.", above=0)
    device: str = option("cpu", "What to measure: cpu, or cuda: the current GPU.")

    def run(self, output: Output) -> Any:
        import torch

        from thinwire.core.pricing.costs import Costs
        from thinwire.predict.measure.kernels import KINDS, curve, inversion_points, sides
        from thinwire.tools.bench.device import check_device, rank_device

        check_device(self.device)
        device, threads = rank_device(self.device), torch.get_num_threads()
        known = Costs({}) if self.costs is None else read_record(self.costs, Costs)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {threads} threads"
        with watched_load(threads) as load, progress(f"inverting on {name}", 2 * len(sides(self.largest))) as bar:
            found = {
                kind: inversion_points(
                    kind, device, **self.part(["largest", "seconds"]),
                    on_point=lambda d, kind=kind: bar(bar.completed + 1, description=f"{kind} {d}"),  # type: ignore[misc]
                )
                for kind in KINDS
            }  # fmt: skip
        rows = ((str(d), f"{a:.3g}", f"{b:.3g}") for (d, a), (_, b) in zip(found["inverse"], found["eigen"]))
        output.say(plain_table(f"seconds on {name}", ("side", *KINDS), rows, close=True))
        curves = {kind: curve(points, "measured here", name) for kind, points in found.items()}
        self.keep(replace(known, compute={**known.compute, **curves}), output)
        return load.with_load({"device": name, "seconds": found})


class KfacTuneVerb(KfacOptions, ThreadsOption, PlotOption):
    """Try dampings and rates in short runs on one process, next to SGD; the fastest to a loss comes first.

    Example: thinwire kfac tune --plot tune.png
    """

    model: str = argument("teacher", "teacher, digits, mlp, resnet18 or module:function of your own, as for the bench.")
    dampings: str = option("0.001,0.003,0.01,0.03,0.1", "Dampings to try, separated by commas.")
    rates: str = option("0.03,0.3", "Learning rates of SGD with momentum 0.9, which takes the step.")
    steps: int = option(200, "Steps of each run.", least=1)
    target: float | None = option(None, "Loss to reach; by default the lowest that SGD reaches.")
    kl_clip: float = option(1e-3, "Bound on a step; 0: none.")
    factor_update_steps: int = 5
    inv_update_steps: int = 25

    def run(self, output: Output) -> Any:
        import torch

        from thinwire.systems.kfac.tuning import Tuning, best, lowest_of_sgd, tuning_picture

        torch.set_num_threads(self.threads)
        options = {"method": self.method, "kl_clip": self.kl_clip or None}
        options |= self.part(["factor_update_steps", "inv_update_steps"])
        grids = _numbers("--dampings", self.dampings), _numbers("--rates", self.rates)
        tuning = Tuning(self.model, *grids, self.steps, options)
        trials: list[Trial] = []
        with watched_load(self.threads) as load:
            with progress("the first steps"):
                longest = tuning.seconds_at_most()
            output.say(f"{len(tuning.grid)} runs of {self.steps} steps: at most about {duration(longest)}")
            with progress("", len(tuning.grid) * self.steps) as bar:
                for damping, rate in tuning.grid:
                    bar(description=f"SGD, rate {rate:g}" if damping is None else f"damping {damping:g}, rate {rate:g}")
                    done = len(trials) * self.steps
                    trials.append(tuning.trial(damping, rate, lambda step, done=done: bar(done + step)))  # type: ignore[misc]
        goal = lowest_of_sgd(trials) if self.target is None else self.target
        ranked = best(trials, goal)
        picture = tuning_picture(trials, goal, f"{self.model}: K-FAC ({self.method}) and SGD, each with its best rate")
        about = f"{self.model}, {self.method}, {self.steps} steps; fastest first"
        output.say(_trials_table(ranked, goal, about), *_verdict(ranked, goal, options))
        return load.with_load({"model": self.model, "target": goal, "trials": ranked, "picture": picture})


VERBS = (KfacPlanVerb, KfacCalibrateVerb, KfacTuneVerb)


def _schedules(text: str | None, world: int) -> list[str]:
    """Return the requested schedules; else all that fit and compute the same. (DP-KFAC is another algorithm.)"""
    if text is not None:
        if not (named := [name.strip() for name in text.split(",") if name.strip()]):
            raise ValueError(f"--schedules {text!r}: give schedules separated by commas, such as dkfac,spd")
        return named
    return ["dkfac", "mpd", "spd", *(["kaisa:1/2"] if world > 2 and world % 2 == 0 else [])]


def _table(
    title: str, found: list[tuple[KFACPlan, KFACPrediction]], factor_update_steps: int, inv_update_steps: int
) -> Table:
    names = ("schedule", "A+G", "by all", "factors", "+wait", "invert", "+send", "each")
    columns = (*names, f"{factor_update_steps}/{inv_update_steps}", "1/1")
    without = found[0][1].passes_seconds + found[0][1].gradient_seconds
    caption = (
        f"A+G: messages of statistics. by all: factors that every rank inverts. each: preconditioning, on every step. "
        f"Last two: the mean step at these intervals; without K-FAC {in_milliseconds(without)} ms."
    )
    table = plain_table(f"{title}; ms", columns, close=True, caption=caption)
    for plan_, p in found:
        parts = [p.factor_compute_seconds, p.factor_wait_seconds, p.invert_seconds, p.send_seconds]
        parts.append(p.precondition_seconds + p.return_seconds)
        steps = (p.step_seconds(factor_update_steps, inv_update_steps), p.step_seconds())
        table.add_row(
            plan_.schedule,
            f"{len(plan_.a_buckets)}+{len(plan_.g_buckets)}",
            f"{sum(owner < 0 for owner in plan_.owners)}/{len(plan_.owners)}",
            *map(in_milliseconds, (*parts, *steps)),
        )
    return table


def _explained(plan_: KFACPlan) -> Table:
    title = f"{plan_.schedule}: messages and owners ({plan_.transport})"
    table = plain_table(title, ("layer", "A", "in", "by", "G", "in", "by"), close=True)
    where = [{i: b for b, bucket in enumerate(side) for i in bucket} for side in (plan_.a_buckets, plan_.g_buckets)]
    for i, layer in enumerate(plan_.layers):
        owners = ["all" if owner < 0 else str(owner) for owner in plan_.owners[2 * i : 2 * i + 2]]
        cells = [str(where[0].get(i, "-")), owners[0], str(layer.d_g), str(where[1].get(i, "-")), owners[1]]
        table.add_row(layer.name, str(layer.d_a), *cells)
    return table


def _numbers(option: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or not all(0 < number < float("inf") for number in found):
        raise ValueError(f"{option} {text!r}: give numbers above 0 separated by commas, such as 0.01,0.03")
    return found


def _trials_table(ranked: Sequence[Trial], goal: float | None, title: str) -> Table:
    to = "the loss" if goal is None else f"{goal:.3g}"
    columns = ("damping", "rate", "last loss", f"steps to {to}", f"seconds to {to}", "ms a step")
    idle = "The rate makes no difference to K-FAC here: kl_clip bounds its steps." * _rate_is_idle(ranked)
    table = plain_table(title, columns, caption=idle)
    for one in ranked:
        met = None if goal is None or one.diverged else one.reached(goal)
        cells = ["" if met is None else f"{met[0]}", "" if met is None else f"{met[1]:.2f}"]
        each = 1e3 * one.seconds[-1] / max(1, one.steps[-1])
        loss = "diverged" if one.diverged else f"{one.losses[-1]:.4g}"
        damping = "SGD" if one.damping is None else f"{one.damping:g}"
        table.add_row(damping, f"{one.rate:g}", loss, *cells, f"{each:.2f}")
    return table


def _rate_is_idle(trials: Sequence[Trial]) -> bool:
    """Return whether, with each damping, all learning rates of K-FAC have reached the same loss."""
    ends: dict[float, list[float]] = {}
    for one in trials:
        if one.damping is not None:
            ends.setdefault(one.damping, []).append(one.losses[-1])
    return all(len(found) > 1 and max(found) - min(found) <= 1e-3 * abs(max(found)) for found in ends.values())


def _verdict(ranked: Sequence[Trial], goal: float | None, options: dict[str, Any]) -> list[str]:
    """Return what to write into a script, or that K-FAC does not pay off here."""
    first = next((one for one in ranked if one.damping is not None and not one.diverged), None)
    if first is None:
        return ["K-FAC diverged with all of these dampings: try a larger one"]
    if goal is None:
        return [f"lowest loss: {first.losses[-1]:.4g}, with damping {first.damping:g}", _line(first, options)]
    met = first.reached(goal)
    if met is None:
        return [f"K-FAC does not reach {goal:.3g} in this many steps: try other dampings, or stay with SGD"]
    said = f"to {goal:.3g}: K-FAC takes {met[0]} steps and {met[1]:.2f} s"
    plain = next((found for one in ranked if one.damping is None and (found := one.reached(goal)) is not None), None)
    said += ", SGD does not reach it" if plain is None else f", SGD {plain[0]} steps and {plain[1]:.2f} s"
    if plain is not None and plain[1] <= met[1]:
        return [f"{said}: SGD is faster here, unless a step's exchange costs much more than its arithmetic"]
    return [said, _line(first, options)]


def _line(trial: Trial, options: dict[str, Any]) -> str:
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"next: KFAC(model, sync, damping={trial.damping:g}, {words})"
