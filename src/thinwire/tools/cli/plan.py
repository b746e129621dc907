"""``thinwire plan``: which method pays for a model on a network, and why, before anything is run."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from thinwire.tools.cli.console import check_output


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
    delay: Annotated[
        str | None, typer.Option(help="One-way delay between machines, such as 25ms; by default 50us, a start-up.")
    ] = None,
    loss: Annotated[str, typer.Option(help="Share of packets that get lost, such as 0.1%.")] = "0%",
    congestion: Annotated[str, typer.Option(help="TCP's congestion control: cubic or bbr.")] = "cubic",
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
    memory: Annotated[
        bool, typer.Option("--memory", help="Only count what local steps hold on each GPU and in host memory.")
    ] = False,
    shards: Annotated[int, typer.Option(help="With --memory: ranks of a site, over which FSDP2 cuts the model.")] = 1,
    sites: Annotated[int, typer.Option(help="With --memory: how many sites.")] = 2,
    dtype: Annotated[str, typer.Option(help="With --memory: of the weights: fp32, bf16 or fp16.")] = "fp32",
    trace: Annotated[
        Path | None, typer.Option(help="Write the best method's timeline to this file, for Perfetto.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file: method, buckets, ranking.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON on stdout.")] = False,
) -> None:
    """Predict every method's step on a network and say which one to use, if any."""
    from rich.console import Console

    from thinwire.tools.cli.plan_answer import answer_of
    from thinwire.tools.cli.plan_inputs import read_question

    if model is None and profile is None:
        raise ValueError("give a model: a built-in name such as resnet50, or a file from thinwire profile")
    console = Console(quiet=json)
    network = {"--link": link, "--delay": delay, "--costs": costs, "--workers": workers, "--worth": worth}
    ignored = {**network, "--profile": profile, "--trace": trace, "--out": out, "--map": map, "--explain": explain}
    if memory and (given := [option for option, value in ignored.items() if value]):
        raise ValueError(f"--memory only counts: leave out {', '.join(given)}")
    counting = {"--shards": shards != 1, "--sites": sites != 2, "--dtype": dtype != "fp32"}
    if not memory and (given := [option for option, value in counting.items() if value]):
        raise ValueError(f"{', '.join(given)}: these belong to --memory")
    if memory:
        from thinwire.tools.cli.plan_memory import show

        if model is None:
            raise ValueError("--memory counts a model: give a built-in name, or module:function")
        counted = show(model, methods, console, shards=shards, sites=sites, dtype=dtype)
        if json:
            typer.echo(json_module.dumps(counted, indent=2))
        return
    for option, path in (("--trace", trace), ("--out", out)):
        check_output(option, path)
    question = read_question(
        model, link=link, delay=delay, loss=loss, congestion=congestion, costs=costs, workers=workers,
        ranks_per_node=ranks_per_node, methods=methods, batch_size=batch_size, device=device, flops=device_flops,
        profile=profile, worth=worth,
    )  # fmt: skip
    try:
        answer = answer_of(question, console, lossy=lossy, buckets=explain, map=map, trace=trace, out=out)
    except LookupError as error:
        raise ValueError(str(error.args[0] if error.args else error)) from error
    if json:
        typer.echo(json_module.dumps(answer, indent=2))
