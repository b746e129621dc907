"""``thinwire kfac``: what second-order preconditioning will cost on a model and a network, before anything is run."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.core.checks import check_choice
from thinwire.tools.cli.console import Plot, check_output, check_plot, plain_table, progress, watched_load

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.systems.kfac.plan import KFACPlan
    from thinwire.systems.kfac.predict import KFACPrediction
    from thinwire.systems.kfac.tuning import Trial


app = typer.Typer(
    help="Second order: plan K-FAC's messages and inversions, measure inversions, try dampings.", no_args_is_help=True
)


@app.command("plan", epilog="Example: thinwire kfac plan resnet50 --workers 16 --link 10gbit")
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="resnet50, resnet152, densenet201, vgg16, bert-base, bert-large; a file from thinwire profile; or a "
            "model of the bench or module:function, which is measured here."
        ),
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Rate of each machine's link, such as 1gbit; by default 10gbit.")
    ] = None,
    delay: Annotated[str | None, typer.Option(help="Start-up of a message, such as 20us; by default 50us.")] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Measured costs: a file from thinwire probe or thinwire kfac calibrate.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Total number of ranks; by default that of --costs, or 16.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Assumed rates: cpu, t4, v100, a100 or h100.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per rank, for the built-in models.")] = None,
    schedules: Annotated[
        str | None,
        typer.Option(help="Separated by commas: dkfac, mpd, spd, kaisa:<fraction>, dp; by default all that fit."),
    ] = None,
    planner: Annotated[
        str, typer.Option(help="Fusion under spd: optimal, spd, fixed:<MiB>MB, layer, one.")
    ] = "optimal",
    inverse_rule: Annotated[
        str, typer.Option(help="What every rank inverts under spd: cost, threshold:<side>, all, none.")
    ] = "cost",
    method: Annotated[str, typer.Option(help="inverse, inverse_pi or eigen.")] = "inverse",
    factor_update_steps: Annotated[int, typer.Option(help="Steps between new statistics.")] = 10,
    inv_update_steps: Annotated[int, typer.Option(help="Steps between inversions.")] = 100,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also show the messages and owners of the fastest plan.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the fastest plan to this file, for Variant(plan=).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON on stdout.")] = False,
) -> None:
    """Predict a step of each schedule: messages, who inverts what, seconds. No GPU or cluster is needed."""
    from rich.console import Console

    from thinwire.systems.kfac.assignment import make_plan
    from thinwire.systems.kfac.predict import predict
    from thinwire.systems.kfac.prices import LayerTimes, layers_of
    from thinwire.systems.kfac.variant import METHODS, Variant
    from thinwire.tools.cli.plan_inputs import read_question

    if model is None:
        raise ValueError("give a model: a built-in name such as resnet50, or a file from thinwire profile")
    console = Console(quiet=json)
    for name, value in (("--factor-update-steps", factor_update_steps), ("--inv-update-steps", inv_update_steps)):
        if value < 1:
            raise ValueError(f"{name} {value} must be at least 1")
    check_output("--out", out)
    question = read_question(
        model, link=link, delay=delay, costs=costs, workers=workers, ranks_per_node=1, methods="ssgd",
        batch_size=batch_size, device=device, flops=None, profile=None,
    )  # fmt: skip
    world, prices, profile = question.topology.world_size, question.costs(), question.profile
    if not (layers := layers_of(profile)):
        raise ValueError(f"{profile.name} has no Linear or Conv2d layer that K-FAC can use")
    check_choice("--method", method, METHODS)
    times = LayerTimes.of_profile(profile, layers)
    found: list[tuple[KFACPlan, KFACPrediction]] = []
    for name in _schedules(schedules, world):
        made = make_plan(layers, world, Variant(name, planner, inverse_rule), prices, times, method=method)
        found.append((made, predict(made, profile, prices)))
    found.sort(key=lambda pair: pair[1].step_seconds(factor_update_steps, inv_update_steps))
    answer = {
        "question": question.to_data(),
        "layers": len(layers),
        "factor_update_steps": factor_update_steps,
        "inv_update_steps": inv_update_steps,
        "plans": [
            {**json_module.loads(made.to_json()), **asdict(predicted),
             "step_seconds": predicted.step_seconds(factor_update_steps, inv_update_steps)}
            for made, predicted in found
        ],
    }  # fmt: skip
    title = f"{profile.name}, {len(layers)} layers, {world} ranks, {question.describe_network()}"
    console.print(_table(title, found, factor_update_steps, inv_update_steps))
    if explain:
        console.print(_explained(found[0][0]))
    if "inverse" not in prices.compute and method != "eigen":
        console.print("Inversions are assumed from FLOPs: thinwire kfac calibrate measures them.")
    if out is not None:
        out.write_text(found[0][0].to_json() + "\n", encoding="utf-8")
        console.print(f"written: {out}", markup=False)
    if json:
        typer.echo(json_module.dumps(answer, indent=2))


@app.command("calibrate", epilog="Example: thinwire kfac calibrate --out costs.json")
def calibrate(
    costs: Annotated[Path | None, typer.Option(help="A file from thinwire probe, whose costs are written too.")] = None,
    largest: Annotated[int, typer.Option(help="Side of the largest matrix.")] = 4096,
    seconds: Annotated[
        float, typer.Option(help="Time for each of the two curves; what does not fit into it is extrapolated.")
    ] = 20.0,
    device: Annotated[str, typer.Option(help="What to measure: cpu, or cuda: the current GPU.")] = "cpu",
    out: Annotated[Path, typer.Option(help="File for the costs.")] = Path("costs.json"),
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON on stdout.")] = False,
) -> None:
    """Measure how long this device takes to invert and to decompose factors, by their side."""
    import torch
    from rich.console import Console

    from thinwire.core.pricing.costs import Costs
    from thinwire.predict.measure.kernels import KINDS, curve, inversion_points, sides
    from thinwire.tools.bench.device import check_device
    from thinwire.tools.cli.plan_inputs import read_record

    check_output("--out", out)
    if not seconds > 0:
        raise ValueError(f"--seconds must be positive, not {seconds:g}")
    check_device(device)
    chosen = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    known = Costs({}) if costs is None else read_record(costs, Costs)
    name = torch.cuda.get_device_name(chosen) if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    found = {}
    with (
        watched_load(torch.get_num_threads()) as load,
        progress(f"inverting on {name}", 2 * len(sides(largest))) as bar,
    ):
        for kind in KINDS:
            found[kind] = inversion_points(
                kind, chosen, largest=largest, seconds=seconds,
                on_point=lambda d, kind=kind: bar(bar.completed + 1, description=f"{kind} {d}"),  # type: ignore[misc]
            )  # fmt: skip
    curves = {kind: curve(points, "measured here", name) for kind, points in found.items()}
    out.write_text(replace(known, compute={**known.compute, **curves}).to_json() + "\n", encoding="utf-8")
    if json:
        typer.echo(json_module.dumps(load.with_load({"device": name, "seconds": found})))
    console = Console(quiet=json)
    table = plain_table(f"seconds on {name}", ("side", *KINDS), close=True)
    for (d, a), (_, b) in zip(found["inverse"], found["eigen"]):
        table.add_row(str(d), f"{a:.3g}", f"{b:.3g}")
    console.print(table)
    console.print(f"written: {out}", markup=False)


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
    table = plain_table(f"{title}; ms", columns, close=True)
    for plan_, p in found:
        parts = [p.factor_compute_seconds, p.factor_wait_seconds, p.invert_seconds, p.send_seconds]
        parts.append(p.precondition_seconds + p.return_seconds)
        steps = (p.step_seconds(factor_update_steps, inv_update_steps), p.step_seconds())
        table.add_row(
            plan_.schedule,
            f"{len(plan_.a_buckets)}+{len(plan_.g_buckets)}",
            f"{sum(owner < 0 for owner in plan_.owners)}/{len(plan_.owners)}",
            *map(_ms, (*parts, *steps)),
        )
    plain = found[0][1].passes_seconds + found[0][1].gradient_seconds
    table.caption = (
        f"A+G: messages of statistics. by all: factors that every rank inverts. each: preconditioning, on every step. "
        f"Last two: the mean step at these intervals; without K-FAC {_ms(plain)} ms."
    )
    table.caption_justify = "left"
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def _explained(plan_: KFACPlan) -> Table:
    title = f"{plan_.schedule}: messages and owners ({plan_.transport})"
    table = plain_table(title, ("layer", "A", "in", "by", "G", "in", "by"), close=True)
    where = [{i: b for b, bucket in enumerate(side) for i in bucket} for side in (plan_.a_buckets, plan_.g_buckets)]
    for i, layer in enumerate(plan_.layers):
        owners = ["all" if owner < 0 else str(owner) for owner in plan_.owners[2 * i : 2 * i + 2]]
        cells = [str(where[0].get(i, "-")), owners[0], str(layer.d_g), str(where[1].get(i, "-")), owners[1]]
        table.add_row(layer.name, str(layer.d_a), *cells)
    return table


@app.command("tune", epilog="Example: thinwire kfac tune --plot tune.png")
def tune(
    model: Annotated[
        str, typer.Argument(help="teacher, digits, mlp, resnet18, or module:function of your own, as for the bench.")
    ] = "teacher",
    dampings: Annotated[str, typer.Option(help="Dampings to try, separated by commas.")] = "0.001,0.003,0.01,0.03,0.1",
    rates: Annotated[
        str, typer.Option(help="Learning rates of SGD with momentum 0.9, which takes the step.")
    ] = "0.03,0.3",
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 200,
    target: Annotated[float | None, typer.Option(help="Loss to reach; by default the lowest that SGD reaches.")] = None,
    method: Annotated[str, typer.Option(help="inverse, inverse_pi or eigen.")] = "inverse",
    kl_clip: Annotated[float, typer.Option(help="Bound on a step; 0: none.")] = 1e-3,
    factor_update_steps: Annotated[int, typer.Option(help="Steps between new statistics.")] = 5,
    inv_update_steps: Annotated[int, typer.Option(help="Steps between inversions.")] = 25,
    threads: Annotated[int, typer.Option(help="Number of torch's threads.")] = 1,
    plot: Plot = None,
    json: Annotated[bool, typer.Option("--json", help="Print all runs as JSON on stdout.")] = False,
) -> None:
    """Try dampings and rates in short runs on one process, next to SGD; the fastest to a loss comes first."""
    import torch
    from rich.console import Console

    from thinwire.systems.kfac.tuning import Tuning, best, lowest_of_sgd, tuning_picture
    from thinwire.tools.pictures import write_picture

    check_plot(plot)
    for name, value in (("--steps", steps), ("--threads", threads)):
        if value < 1:
            raise ValueError(f"{name} {value} must be at least 1")
    torch.set_num_threads(threads)
    options: dict[str, Any] = {"method": method, "kl_clip": kl_clip or None}
    options |= {"factor_update_steps": factor_update_steps, "inv_update_steps": inv_update_steps}
    tuning = Tuning(model, _numbers("--dampings", dampings), _numbers("--rates", rates), steps, options)
    console = Console(quiet=json)
    trials: list[Trial] = []
    with watched_load(threads) as load:
        with progress("the first steps", quiet=json):
            longest = tuning.seconds_at_most()
        console.print(f"{len(tuning.grid)} runs of {steps} steps: at most about {_duration(longest)}", highlight=False)
        with progress("", len(tuning.grid) * steps, quiet=json) as bar:
            for damping, rate in tuning.grid:
                bar(description=f"SGD, rate {rate:g}" if damping is None else f"damping {damping:g}, rate {rate:g}")
                trials.append(tuning.trial(damping, rate, lambda step: bar(len(trials) * steps + step)))
    goal = lowest_of_sgd(trials) if target is None else target
    ranked = best(trials, goal)
    picture = tuning_picture(trials, goal, f"{model}: K-FAC ({method}) and SGD, each with its best rate")
    if json:
        rows = [asdict(one) for one in ranked]
        data = {"model": model, "target": goal, "trials": rows, "picture": asdict(picture)}
        typer.echo(json_module.dumps(load.with_load(data)))
    console.print(_trials_table(ranked, goal, f"{model}, {method}, {steps} steps; fastest first"))
    if plot is not None:
        write_picture(picture, plot)
        console.print(f"written: {plot}", markup=False)
    for sentence in _verdict(ranked, goal, options):
        console.print(sentence, markup=False, highlight=False)


def _numbers(option: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or not all(0 < number < float("inf") for number in found):
        raise ValueError(f"{option} {text!r}: give numbers above 0 separated by commas, such as 0.01,0.03")
    return found


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _trials_table(ranked: Sequence[Trial], goal: float | None, title: str) -> Table:
    to = "the loss" if goal is None else f"{goal:.3g}"
    table = plain_table(title, ("damping", "rate", "last loss", f"steps to {to}", f"seconds to {to}", "ms a step"))
    for one in ranked:
        met = None if goal is None or one.diverged else one.reached(goal)
        cells = ["" if met is None else f"{met[0]}", "" if met is None else f"{met[1]:.2f}"]
        each = 1e3 * one.seconds[-1] / max(1, one.steps[-1])
        loss = "diverged" if one.diverged else f"{one.losses[-1]:.4g}"
        damping = "SGD" if one.damping is None else f"{one.damping:g}"
        table.add_row(damping, f"{one.rate:g}", loss, *cells, f"{each:.2f}")
    if _rate_is_idle(ranked):
        table.caption = "The rate makes no difference to K-FAC here: kl_clip bounds its steps."
        table.caption_justify = "left"
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
