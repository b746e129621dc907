"""``thinwire bench``: compare methods on one set of ranks, in turns."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from typing import Annotated

import typer

from thinwire.tools.cli.console import (
    Congestion,
    Delay,
    Device,
    Jitter,
    Json,
    Link,
    Loss,
    Plot,
    RanksPerNode,
    RunFailed,
    Workers,
    check_plot,
    run_ranks,
    slow_wire,
    slowest_link,
    watched_load,
)


def bench(
    model: Annotated[
        str, typer.Option(help="chargpt, mlp, resnet18, bert-small or module:function; options as in mlp:width=512.")
    ] = "chargpt",
    workers: Workers = 2,
    ranks_per_node: RanksPerNode = 1,
    link: Link = "unlimited",
    delay: Delay = "0",
    jitter: Jitter = "0",
    loss: Loss = "0",
    congestion: Congestion = None,
    methods: Annotated[
        str, typer.Option(help="Rows: ddp, ddp-best, ddp-fp16, torch-powersgd, ssgd, acp:rank=4, topk:density=0.01 ...")
    ] = "ddp,ddp-best,ssgd,acp",
    steps: Annotated[int, typer.Option(help="Timed steps per row in each round.")] = 10,
    rounds: Annotated[int, typer.Option(help="How many turns each row gets.")] = 3,
    warmup: Annotated[int, typer.Option(help="Untimed steps before a row's first turn.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which the whole run is stopped.")] = 3600.0,
    operation_timeout: Annotated[
        float, typer.Option(help="Seconds that an exchange may hang before its row fails.")
    ] = 300.0,
    predict: Annotated[
        bool,
        typer.Option("--predict", help="Also measure the network and the model, and show what the planner predicts."),
    ] = False,
    device: Device = "cpu",
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Compare methods on one model and one network: step time, exposed communication, bytes, loss."""
    from rich.console import Console

    from thinwire.tools.bench.device import check_device
    from thinwire.tools.bench.models.registry import check_model
    from thinwire.tools.bench.rows import parse_rows
    from thinwire.tools.bench.session import BenchSpec
    from thinwire.tools.bench.summary import bench_table, plot_bench, summarise
    from thinwire.tools.lab import Cluster

    cluster = Cluster.parse(workers, ranks_per_node, link, delay, jitter, loss, congestion)
    check_plot(plot)
    check_device(device)
    check_model(model)
    rows = parse_rows(methods)
    bits = slowest_link(cluster)
    spec = BenchSpec(
        model=model,
        rows=rows,
        workers=workers,
        link=slow_wire(cluster),
        link_bits=bits,
        steps=steps,
        rounds=rounds,
        warmup=warmup,
        seed=seed,
        operation_seconds=operation_timeout,
        timeout_seconds=timeout,
        predict=predict,
        ranks_per_node=ranks_per_node,
        device=device,
    )
    total = (len(rows) + 1) * (warmup + rounds * steps + rounds - 1)
    with watched_load(workers) as load:
        record, launched = run_ranks(spec, cluster, total_steps=total)
    try:
        result = summarise(spec, record, emulated=launched.emulated, note=launched.note)
    except RuntimeError as error:
        raise RunFailed(str(error)) from error
    if plot is not None:
        plot_bench(result, plot)
    if json:
        typer.echo(json_module.dumps(load.with_load(asdict(result)), indent=2))
    else:
        Console().print(bench_table(result))
    if all(row.error for row in result.rows[1:]):
        raise typer.Exit(1)
