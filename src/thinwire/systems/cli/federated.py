"""``thinwire federated``: simulate a federation, predict its rounds, deploy it on Flower."""

from __future__ import annotations

import json as json_module
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.tools.cli.console import Plot, check_folder, check_output, check_plot, progress, torchrun_group

app = typer.Typer(help="Federated learning: many clients, few devices.", no_args_is_help=True)

_FEDERATION = Annotated[
    str, typer.Argument(help="digits, text, million, or module:function of your own; options as in digits:clients=50.")
]


@app.command(epilog="Example: thinwire federated run digits --algorithm fedavg,scaffold --rounds 20")
def run(
    federation: _FEDERATION = "digits",
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="fedavg, fedprox, fedopt, fednova, mime, scaffold, feddyn, fedrobust; options as in scaffold:lr=0.1; "
            "several, separated by commas, run side by side. Options not named stay as the federation has them."
        ),
    ] = None,
    compress: Annotated[
        str | None, typer.Option(help="Method for the clients' changes, such as topk:density=0.01.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Total number of rounds; a resumed run continues up to it.")
    ] = None,
    clients_per_round: Annotated[int | None, typer.Option(help="How many clients train in each round.")] = None,
    devices: Annotated[
        int | None, typer.Option(help="Number of emulated devices. Not under torchrun, where each rank is one.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="auto, equal, lpt or pull.")] = "auto",
    reduction: Annotated[str | None, typer.Option(help="fp32, fp64 or exact.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of cohorts and clients.")] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Rounds between evaluations; by default at most 20 evaluations.")
    ] = None,
    per_client: Annotated[
        bool, typer.Option("--per-client", help="Also show the accuracy of the median client and of the worst tenth.")
    ] = False,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints; a run found there is continued.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Rounds between checkpoints.")] = 1,
    state_memory: Annotated[int, typer.Option(help="Bytes of client states in memory; the rest is on disk.")] = 1 << 30,
    threads: Annotated[
        int, typer.Option(help="torch's threads in each process; more than 1 pays off for large models.")
    ] = 1,
    trace: Annotated[
        Path | None, typer.Option(help="File with the speeds of the clients' own devices, to compute their seconds.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the weights, by name, as safetensors.")] = None,
    plot: Plot = None,
    json: Annotated[bool, typer.Option("--json", help="Print the history as JSON on stdout.")] = False,
) -> None:
    """Train a federation here: in this process, or on the ranks that torchrun has started."""
    import torch
    from rich.console import Console

    from thinwire.systems.cli.federated_runs import federations, folder_of, spent, train
    from thinwire.systems.cli.federated_tables import (
        algorithms_table,
        failures,
        in_force,
        outcome,
        rounds_table,
        traffic,
    )  # fmt: skip
    from thinwire.systems.federated import ClientStateStore, ClientTrace, History
    from thinwire.systems.federated.options import use_ranks
    from thinwire.systems.federated.picture import history_picture
    from thinwire.systems.federated.schedule import check_schedule
    from thinwire.tools.pictures import write_picture

    check_plot(plot)
    check_output("--out", out)
    if threads < 1:
        raise ValueError(f"--threads {threads} must be at least 1")
    given = {
        "rounds": rounds, "clients_per_round": clients_per_round, "seed": seed, "reduction": reduction,
        "evaluate_every": evaluate_every,
    }  # fmt: skip
    asked = federations(federation, algorithm, compress, given, checkpoint_every, per_client=per_client)
    use_ranks("auto", devices, None, None)
    check_schedule(schedule)
    if checkpoint_dir is not None:
        check_folder(checkpoint_dir, "--checkpoint-dir")
    if out is not None and len(asked) > 1:
        raise ValueError("--out takes the weights of one algorithm: name only one")
    torch.set_num_threads(threads)
    options: dict[str, Any] = {"checkpoint_every": checkpoint_every, "schedule": schedule, "devices": devices}
    options["trace"] = None if trace is None else ClientTrace.read(trace)
    console = Console(quiet=json)
    runs: dict[str, History] = {}
    with torchrun_group() as (rank, _):
        console.quiet = json or rank != 0
        for name, made in asked.items():
            folder = folder_of(checkpoint_dir, name, len(asked))
            store = {}
            if made.algorithm.stateful:
                states = None if folder is None else folder / "states"
                store["state"] = ClientStateStore(len(made.clients), states, state_memory)
            console.print(in_force(made.algorithm), markup=False, highlight=False)
            runs[name] = train(name, made, rank, checkpoint_dir=folder, **options, **store)
    if rank != 0:
        return
    made = list(asked.values())[-1]
    title = f"{federation}, {made.clients_per_round} of {len(made.clients)} clients a round"
    picture = history_picture(runs, title, made.chance)
    if json:
        only = [json_module.loads(history.to_json()) for history in runs.values()]
        data = only[0] if len(runs) == 1 else {"runs": dict(zip(runs, only))}
        typer.echo(json_module.dumps({**data, "picture": asdict(picture)}))
    for name, history in runs.items():
        if len(runs) == 1:
            console.print(rounds_table(history, console.width))
            console.print(traffic(history), markup=False)
        for sentence in failures(history):
            console.print(sentence if len(runs) == 1 else f"{name}, {sentence}", style="yellow", markup=False)
    if len(runs) > 1:
        console.print(algorithms_table(runs, f"{title}, {made.rounds} rounds", console.width))
    if out is not None:
        from thinwire.core.durable import write_whole
        from thinwire.systems.federated import files

        write_whole(out, files.pack({**dict(made.model.named_parameters()), **dict(made.model.named_buffers())}))
        console.print(f"written: {out}", markup=False)
    if plot is not None:
        write_picture(picture, plot)
        console.print(f"written: {plot}", markup=False)
    for name, one in asked.items():
        if (said := spent(one)) is not None:
            console.print(said if len(runs) == 1 else f"{name}, {said}", markup=False, highlight=False)
    for name, history in runs.items():
        last = outcome(history, made.chance)
        console.print(last if len(runs) == 1 else f"{name}, {last}", markup=False, highlight=False)


@app.command(epilog="Example: thinwire federated predict --fast 4 --slow 4")
def predict(
    devices: Annotated[
        Path | None, typer.Option(help='File with speeds, a JSON list such as [{"seconds_per_sample": 0.01}, ...].')
    ] = None,
    fast: Annotated[int, typer.Option(help="Without --devices: number of devices that take 10 ms per sample.")] = 4,
    slow: Annotated[int, typer.Option(help="Without --devices: number of devices that are four times slower.")] = 4,
    clients: Annotated[int, typer.Option(help="Total number of clients.")] = 1000,
    clients_per_round: Annotated[int, typer.Option(help="How many clients train in each round.")] = 100,
    mean: Annotated[
        float, typer.Option(max=1e9, help="Mean number of samples per client, log-normally distributed.")
    ] = 50.0,
    spread: Annotated[
        float, typer.Option(max=10, help="Standard deviation of that number's logarithm; 0: all the same.")
    ] = 1.0,
    rounds: Annotated[int, typer.Option(help="Number of rounds to average over.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of sizes and cohorts.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print all rounds as JSON on stdout.")] = False,
) -> None:
    """Predict the seconds per round under each schedule, by the clock alone: nothing is trained."""
    import math

    import numpy as np
    from rich.console import Console

    from thinwire.systems.cli.federated_tables import schedules_table
    from thinwire.systems.federated import Speed
    from thinwire.systems.federated import predict as predicted
    from thinwire.systems.federated.clocks import read_speeds

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
        typer.echo(json_module.dumps([{**asdict(one), "seconds": one.seconds, "ratio": one.ratio} for one in found]))
        return
    title = f"{clients_per_round} of {clients} clients a round, {len(speeds)} devices, {rounds} rounds"
    Console().print(schedules_table(found, title))


@app.command(epilog="Example: thinwire federated new mine")
def new(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; created if it does not exist.")],
) -> None:
    """Start a federation of your own: a folder with a working one, whose data, model and algorithm you replace."""
    from importlib import resources

    template = resources.files("thinwire.systems.federated") / "template"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists and is not empty: give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("README.md", "federation.py", "speeds.json"):
            (folder / name).write_bytes(template.joinpath(name).read_bytes())
            typer.echo(f"written: {folder / name}")
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error.strerror}") from error
    typer.echo(f"next: cd {shlex.quote(str(folder))} && thinwire federated run federation:build")


@app.command(epilog="Example: thinwire federated serve federation:build --nodes 2 --local")
def serve(
    federation: Annotated[str, typer.Argument(help="module:function of your own, from a file in this folder.")],
    nodes: Annotated[int, typer.Option(help="SuperNodes to wait for.")] = 2,
    local: Annotated[bool, typer.Option("--local", help="Also start these SuperNodes here.")] = False,
    host: Annotated[str, typer.Option(help="Address of the SuperLink.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the SuperLink; 0: a free one.")] = 0,
    certificates: Annotated[
        Path | None, typer.Option(help="Folder of ca.crt, server.pem, server.key; created if it does not exist.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for weights and history.")] = Path("federated-result"),
    timeout: Annotated[float, typer.Option(help="Seconds for nodes to connect and to answer.")] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="Print the history as JSON on stdout.")] = False,
) -> None:
    """Deploy a federation on Flower: a SuperLink with TLS here, SuperNodes here or elsewhere."""
    from rich.console import Console

    from thinwire.systems.cli.federated_tables import failures, outcome
    from thinwire.systems.federated import History
    from thinwire.systems.federated.flower.deploy import Deployment

    deployment = Deployment(federation, nodes, local, host, port, certificates, out, timeout)
    with progress("starting the SuperLink") as bar:
        deployment.run(lambda text: bar(description=text), bar.log)
    history = History.from_json((out / "history.json").read_text())
    if json:
        typer.echo(history.to_json())
        return
    typer.echo(f"{outcome(history)}, on {history.about['nodes']} nodes; written: {out}")
    for sentence in failures(history):
        Console(stderr=True).print(sentence, style="yellow", markup=False)
