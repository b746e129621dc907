"""``thinwire kfac tune``: which damping trains, and whether K-FAC pays at all, by short runs beside SGD."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.tools.cli.console import Plot, check_plot, plain_table, progress, watched_load

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.systems.kfac.tuning import Trial


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
    console.print(_table(ranked, goal, f"{model}, {method}, {steps} steps; fastest first"))
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


def _table(ranked: Sequence[Trial], goal: float | None, title: str) -> Table:
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
