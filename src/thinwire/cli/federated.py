"""``thinwire federated``: simulate a federation, predict its rounds, deploy it on Flower."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.console import progress
from thinwire.cli.errors import RunFailed
from thinwire.cli.ranks import torchrun_group

if TYPE_CHECKING:
    from thinwire.federated import RoundRecord

app = typer.Typer(help="Federated learning: many clients, few devices.", no_args_is_help=True)

_FEDERATION = Annotated[
    str, typer.Argument(help="digits, text, million, or module:function of your own; options as digits:clients=50.")
]


@app.command()
def run(
    federation: _FEDERATION = "digits",
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="fedavg, fedprox, fedopt, fednova, mime, scaffold, feddyn, as scaffold:lr=0.1; "
            "what is not named stays as the federation has it."
        ),
    ] = None,
    compress: Annotated[str | None, typer.Option(help="Method for the clients' changes, as topk:density=0.01.")] = None,
    rounds: Annotated[int | None, typer.Option(help="In all; a resumed run goes on to this number.")] = None,
    clients_per_round: Annotated[int | None, typer.Option(help="How many train in a round.")] = None,
    devices: Annotated[int | None, typer.Option(help="Emulated devices. Not under torchrun: a rank is one.")] = None,
    schedule: Annotated[str, typer.Option(help="auto, equal, lpt or pull.")] = "auto",
    reduction: Annotated[str | None, typer.Option(help="fp32, fp64 or exact.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of cohorts and clients.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="In rounds.")] = None,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="A folder; a run that is there goes on.")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="In rounds.")] = 1,
    state_memory: Annotated[int, typer.Option(help="Bytes of client states in memory; the rest is on disk.")] = 1 << 30,
    threads: Annotated[int, typer.Option(help="torch's, in each process; more than 1 pays for large models.")] = 1,
    trace: Annotated[Path | None, typer.Option(help="Speeds of the clients' own devices, for their clock.")] = None,
    out: Annotated[Path | None, typer.Option(help="Weights, by name, as safetensors.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw: a .png or .html file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="The history as JSON on stdout.")] = False,
) -> None:
    """Train a federation here: in this process, or on the ranks that torchrun has started."""
    from rich.console import Console

    from thinwire.bench.federations import build_algorithm, build_federation, compressed
    from thinwire.cli.federated_tables import failures, in_force, outcome, rounds_table, traffic
    from thinwire.federated import ClientStateStore, ClientTrace
    from thinwire.federated.picture import history_picture
    from thinwire.pictures import check_plot, write_picture

    check_plot(plot)
    if threads < 1:
        raise ValueError(f"--threads {threads} must be at least 1")
    import torch

    torch.set_num_threads(threads)
    made = build_federation(federation)
    if algorithm is not None:
        made.algorithm = build_algorithm(algorithm, made.algorithm, compress)
    else:
        made.algorithm = compressed(made.algorithm, compress)
    given = {"rounds": rounds, "clients_per_round": clients_per_round, "seed": seed, "reduction": reduction}
    for name, value in {**given, "evaluate_every": evaluate_every}.items():
        if value is not None:
            setattr(made, name, value)
    options: dict[str, Any] = {"checkpoint_dir": checkpoint_dir, "checkpoint_every": checkpoint_every}
    options |= {"schedule": schedule, "devices": devices}
    options["trace"] = None if trace is None else ClientTrace.read(trace)
    if made.algorithm.stateful:
        folder = None if checkpoint_dir is None else checkpoint_dir / "states"
        options["state"] = ClientStateStore(len(made.clients), folder, state_memory)
    console = Console()
    with torchrun_group() as (rank, _), progress("first round", made.rounds, quiet=rank != 0) as bar:

        def shown(row: RoundRecord) -> None:
            numbers = {**row.metrics, **row.evaluation}
            words = ", ".join(f"{name} {value:.3g}" for name, value in list(numbers.items())[:3])
            bar(completed=row.round + 1, description=words)

        if rank == 0 and not json:
            console.print(in_force(made.algorithm), markup=False, highlight=False)
        try:
            history = made.simulate(on_round=shown, **options)
        except (OverflowError, OSError) as error:
            raise RunFailed(str(error)) from error
    if rank != 0:
        return
    if out is not None:
        from thinwire.durable import write_whole
        from thinwire.federated import files

        write_whole(out, files.pack({**dict(made.model.named_parameters()), **dict(made.model.named_buffers())}))
    picture = history_picture(history, f"{federation}, {history.about['algorithm']}")
    if plot is not None:
        write_picture(picture, plot)
    if json:
        typer.echo(json_module.dumps({**json_module.loads(history.to_json()), "picture": asdict(picture)}))
        return
    console.print(rounds_table(history))
    console.print(outcome(history), markup=False)
    console.print(traffic(history), markup=False)
    for sentence in failures(history):
        console.print(sentence, style="yellow", markup=False)


@app.command()
def predict(
    devices: Annotated[
        Path | None, typer.Option(help='Speeds, a JSON list as [{"seconds_per_sample": 0.01}, ...].')
    ] = None,
    fast: Annotated[int, typer.Option(help="Without --devices: devices of 10 ms a sample.")] = 4,
    slow: Annotated[int, typer.Option(help="Without --devices: devices four times slower.")] = 4,
    clients: Annotated[int, typer.Option(help="In all.")] = 1000,
    clients_per_round: Annotated[int, typer.Option(help="How many train in a round.")] = 100,
    mean: Annotated[float, typer.Option(help="Samples of a client, mean of a log-normal distribution.")] = 50.0,
    spread: Annotated[float, typer.Option(help="Standard deviation of its logarithm; 0: all alike.")] = 1.0,
    rounds: Annotated[int, typer.Option(help="How many.")] = 10,
    seed: Annotated[int, typer.Option(help="Of sizes and cohorts.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="All rounds as JSON on stdout.")] = False,
) -> None:
    """Seconds a round under each schedule, by the clock alone: nothing is trained."""
    import math

    import numpy as np
    from rich.console import Console

    from thinwire.cli.federated_tables import schedules_table
    from thinwire.federated import Speed
    from thinwire.federated import predict as predicted
    from thinwire.federated.clocks import read_speeds

    if not (math.isfinite(mean) and mean > 0 and math.isfinite(spread) and spread >= 0):
        raise ValueError(f"--mean {mean:g} must be above 0, and --spread {spread:g} at least 0")
    if min(fast, slow) < 0 or clients < 1:
        raise ValueError("--fast and --slow must be at least 0, and --clients at least 1")
    speeds = read_speeds(devices) if devices else [Speed(0.01)] * fast + [Speed(0.04)] * slow
    draw = np.random.default_rng(seed).lognormal(math.log(mean) - spread**2 / 2, spread, size=clients)
    sizes = np.maximum(1, np.rint(draw)).astype(int)
    numbers: dict[str, Any] = {"rounds": rounds, "clients_per_round": clients_per_round, "seed": seed}
    schedules = ("equal", "lpt", "pull", "auto")
    found = [predicted(name, clients, lambda i: int(sizes[i]), speeds, **numbers) for name in schedules]
    if json:
        typer.echo(json_module.dumps([{**asdict(one), "ratio": one.ratio} for one in found]))
        return
    title = f"{clients_per_round} of {clients} clients a round on {len(speeds)} devices"
    Console().print(schedules_table(found, title))


@app.command()
def serve(
    federation: Annotated[str, typer.Argument(help="module:function of your own, a file in this folder.")],
    nodes: Annotated[int, typer.Option(help="SuperNodes to wait for.")] = 2,
    local: Annotated[bool, typer.Option("--local", help="Also start these SuperNodes here.")] = False,
    host: Annotated[str, typer.Option(help="Address of the SuperLink.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port; 0: a free one.")] = 0,
    certificates: Annotated[
        Path | None, typer.Option(help="Folder of ca.crt, server.pem, server.key; made if it is not there.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for weights and history.")] = Path("federated-result"),
    timeout: Annotated[float, typer.Option(help="Seconds for nodes to connect and to answer.")] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="The history as JSON on stdout.")] = False,
) -> None:
    """Deploy a federation on Flower: a SuperLink with TLS here, SuperNodes here or elsewhere."""
    from rich.console import Console

    from thinwire.adapters.flower_deploy import Deployment
    from thinwire.cli.federated_tables import failures, outcome
    from thinwire.federated import History

    console = Console(stderr=True)
    deployment = Deployment(federation, nodes, local, host, port, certificates, out, timeout)
    with console.status("starting the SuperLink") as status:
        deployment.run(lambda text: status.update(text), lambda text: console.print(text, markup=False))
    history = History.from_json((out / "history.json").read_text())
    if json:
        typer.echo(history.to_json())
        return
    typer.echo(f"{outcome(history)}, on {history.about['nodes']} nodes; written: {out}")
    for sentence in failures(history):
        console.print(sentence, style="yellow", markup=False)
