"""``thinwire plan``: which method pays for a model on a network, and why, before anything is run."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.tools.cli.console import check_output, progress

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.predict.choose import ExplainedBucket, Map, Ranking
    from thinwire.tools.cli.plan_inputs import Question


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="resnet50, resnet152, densenet201, vgg16, bert-base, bert-large, gpt2; a file from thinwire profile; "
            "or a model of the bench or module:function, which is measured here."
        ),
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Rate of each machine's link, such as 1gbit; by default 10gbit.")
    ] = None,
    delay: Annotated[str | None, typer.Option(help="Start-up of a message, such as 20us; by default 50us.")] = None,
    costs: Annotated[Path | None, typer.Option(help="Measured costs: a file from thinwire probe.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Total number of ranks; by default that of --costs, or 16.")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks per machine; by default that of --costs, or 1.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Separated by commas, such as acp:rank=4,topk:density=0.01; by default all that are known."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per rank, for the built-in models.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Assumed rates: cpu, t4, v100, a100 or h100; by default a100 for built-in models, else cpu."),
    ] = None,
    device_flops: Annotated[
        float | None, typer.Option(help="FLOP/s that training sustains, for the built-in models.")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="The model, as a file from thinwire profile.")] = None,
    worth: Annotated[
        Path | None, typer.Option(help="What a step of each method is worth on your model: a file from thinwire race.")
    ] = None,
    lossy: Annotated[bool, typer.Option("--lossy/--no-lossy", help="Whether lossy methods may be recommended.")] = True,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also show the buckets, and the densities of sparse ones.")
    ] = False,
    map: Annotated[bool, typer.Option("--map", help="Also show the winners over link rates and workers.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write the best method's timeline to this file, for Perfetto.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file: method, buckets, ranking.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON on stdout.")] = False,
) -> None:
    """Predict every method's step on a network and say which one to use, if any."""
    from rich.console import Console

    from thinwire.tools.cli.plan_inputs import read_question

    if model is None and profile is None:
        raise ValueError("give a model: a built-in name such as resnet50, or a file from thinwire profile")
    console = Console(quiet=json)
    for option, path in (("--trace", trace), ("--out", out)):
        check_output(option, path)
    question = read_question(
        model, link=link, latency=delay, costs=costs, workers=workers, ranks_per_node=ranks_per_node, methods=methods,
        batch_size=batch_size, device=device, flops=device_flops, profile=profile, worth=worth,
    )  # fmt: skip
    try:
        answer = _answer(question, console, lossy=lossy, explain=explain, map=map, trace=trace, out=out)
    except LookupError as error:
        raise ValueError(str(error.args[0] if error.args else error)) from error
    if json:
        typer.echo(json_module.dumps(answer, indent=2))


def _answer(question: Question, console: Console, *, lossy: bool, explain: bool, map: bool, trace: Path | None,
            out: Path | None) -> dict[str, Any]:  # fmt: skip
    """Rank, print results as they come, write the files. Return what JSON shows."""
    from dataclasses import asdict

    from thinwire.predict.choose import choose
    from thinwire.tools.cli.plan_tables import ddp_answer, ddp_sentence, ranking_table, sentences

    profile, topology, prices = question.profile, question.topology, question.costs()
    where = {**question.where, "worth": question.worth}
    ranking = choose(question.candidates, profile, topology, prices, **where, lossy=lossy)
    knees = _knees(question, ranking)
    answer: dict[str, Any] = {"question": question.to_data(), "ranking": ranking.to_data(), "knee": knees}
    console.print(ranking_table(question, ranking))
    for sentence in sentences(question, ranking, knees):
        console.print(sentence, markup=False, highlight=False)
    if (ddp := ddp_answer(question, ranking)) is not None:
        answer["ddp"] = ddp
        console.print(ddp_sentence(ddp), markup=False, highlight=False)
    if explain:
        groups = _explain(question, ranking, console)
        answer["explain"] = {label: [{**asdict(g), "density": g.density} for g in gs] for label, gs in groups.items()}
    if map:
        answer["map"] = _map(question, console, lossy).to_data()
    if trace is not None or out is not None:
        _write(question, ranking, answer, trace, out)
        for path in filter(None, (trace, out)):
            console.print(f"written: {path}", markup=False)
    return answer


def _knees(question: Question, ranking: Ranking) -> dict[str, int | None]:
    from thinwire.predict.choose import knee

    method_of = dict(question.candidates)
    rest = {"ranks_per_node": question.ranks_per_node, "worth": question.worth, **question.where}
    labels = dict.fromkeys(e.label for e in (ranking.best_exact, ranking.best) if e.label in method_of)
    return {label: knee(method_of[label], question.profile, question.prices, **rest) for label in labels}


def _explain(question: Question, ranking: Ranking, console: Console) -> dict[str, tuple[ExplainedBucket, ...]]:
    from thinwire.predict.choose import explain
    from thinwire.tools.cli.plan_tables import groups_table

    priced = {entry.label for entry in ranking.entries}
    wanted = question.named or (ranking.best.label, ranking.best_exact.label)
    method_of, groups = dict(question.candidates), {}
    for label in dict.fromkeys(label for label in wanted if label in priced):
        groups[label] = explain(
            method_of[label], question.profile, question.topology, question.costs(), backend=question.device.backend
        )
        console.print(groups_table(label, groups[label]))
    return groups


def _map(question: Question, console: Console, lossy: bool) -> Map:
    from thinwire.predict.choose import map_of
    from thinwire.predict.choose.grid import WORKERS
    from thinwire.tools.cli.plan_tables import map_table

    per_node = question.ranks_per_node
    workers = [count * per_node for count in WORKERS]
    with progress("map") as bar:
        found = map_of(
            question.candidates, question.profile, workers=workers, costs=question.assumed, ranks_per_node=per_node,
            **question.where, lossy=lossy, worth=question.worth, on_cell=bar,
        )  # fmt: skip
    console.print(map_table(question, found))
    return found


def _write(question: Question, ranking: Ranking, answer: dict[str, Any], trace: Path | None, out: Path | None) -> None:
    from thinwire.predict.choose import resolved
    from thinwire.predict.timeline import simulate, write_trace

    label = ranking.best.label
    setting = (question.profile, question.topology, question.costs())
    method = resolved(dict(question.candidates)[label], *setting, worth=question.worth, **question.where)
    timeline = simulate(method, *setting, **question.where)
    if trace is not None:
        write_trace(trace, timeline.events, label=f"predicted, {label}")
    if out is not None:
        chosen = {"method": ranking.best.method, "options": ranking.best.options}
        data = {**json_module.loads(timeline.plan.to_json()), **chosen, **answer}
        out.write_text(json_module.dumps(data) + "\n", encoding="utf-8")
