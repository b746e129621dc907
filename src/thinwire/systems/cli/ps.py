"""``thinwire ps``: asynchronous training with a parameter server."""

from __future__ import annotations

import json as json_module
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from thinwire.core.checks import check_number
from thinwire.core.words import counted
from thinwire.tools.cli.console import (
    Congestion,
    Delay,
    Jitter,
    Json,
    Loss,
    RunFailed,
    check_folder,
    check_output,
    check_plot,
    watched_load,
)

app = typer.Typer(
    help="Asynchronous training: a server, nodes that come and go, and a simulation in virtual time.",
    no_args_is_help=True,
)
_Option = typer.Option
Model = Annotated[str, _Option(help="chargpt, mlp, digits, ... or module:function; options as in mlp:width=512.")]
SettingsText = Annotated[
    str,
    _Option(
        "--settings",
        help="inhad, bsp, asp, ssp, n_softsync, fedbuff, async_local_sgd, delayed_nesterov, diloco; options as in "
        "inhad:max_staleness=2:update_every=nodes.",
    ),
]
OuterText = Annotated[str, _Option("--outer", help="The server's optimizer, such as sgd:lr=0.1:momentum=0.9.")]
Host = Annotated[str, _Option(help="Address to listen on; one that other machines can reach needs keys or a secret.")]
Keys = Annotated[
    Path | None, _Option(help="This machine's directory from `thinwire keys new`: TLS with certificates on both sides.")
]
SecretFile = Annotated[
    Path | None,
    _Option(help="File with this training's secret, the same on all machines; by default THINWIRE_SECRET_FILE."),
]
Insecure = Annotated[bool, _Option("--insecure", help="Without keys or a secret: admit anyone who reaches the port.")]
Updates = Annotated[int | None, _Option(help="Stop after this many updates.")]
Gradients = Annotated[int | None, _Option(help="Stop after this many applied gradients.")]
Shards = Annotated[int, _Option(help="Shards of the model, each with its own link; 0: the server holds the model.")]
Seed = Annotated[int, _Option(help="Seed of the initial weights.")]
Slow = Annotated[list[str] | None, _Option(help="NODE:FACTOR, to make that node this many times slower.")]


@app.command(epilog="Example: thinwire ps server --model mlp --nodes 2 --updates 100")
def server(
    model: Model = "chargpt",
    settings: SettingsText = "inhad",
    outer: OuterText = "auto",
    port: Annotated[int, _Option(help="Port to which nodes and shards connect.")] = 29400,
    host: Host = "127.0.0.1",
    keys: Keys = None,
    secret_file: SecretFile = None,
    insecure: Insecure = False,
    nodes: Annotated[int, _Option(help="Nodes to wait for before sending the first weights.")] = 1,
    shards: Annotated[int, _Option(help="Processes (`ps shard`) that each hold a slice of the weights.")] = 0,
    updates: Updates = None,
    gradients: Gradients = None,
    checkpoint_dir: Annotated[
        Path | None, _Option(help="Directory for checkpoints; the server continues from what it finds there.")
    ] = None,
    checkpoint_every: Annotated[int, _Option(help="Updates between checkpoints.")] = 100,
    journal: Annotated[Path | None, _Option(help="File for the log of updates, for `ps replay`.")] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Serve a model until it has seen a number of updates or gradients, with a live table of its nodes."""
    _check_end(updates, gradients)
    from thinwire.systems.cli.ps_work import check_words, live, make_service, read_secret_file

    check_words(model, settings, outer, nodes, shards)
    check_output("--journal", journal)
    if checkpoint_dir is not None:
        check_folder(checkpoint_dir, "--checkpoint-dir")
    with live(quiet=json) as screen:
        screen.say(f"building {model}")
        service = make_service(
            model, settings, outer, port=port, host=host, secret=read_secret_file(secret_file),
            keys=keys, insecure=insecure, nodes=nodes, shards=shards, updates=updates, gradients=gradients,
            checkpoint_dir=checkpoint_dir, checkpoint_every=checkpoint_every, journal=journal, seed=seed,
            on_status=lambda status: screen.status(status.to_dict()),
        )  # fmt: skip
        screen.say(f"serving {model} at {host}:{service.port}; nodes to wait for: {nodes}, shards: {shards}")
        status = service.run().to_dict()
    typer.echo(json_module.dumps(status) if json else _last_words(status))
    if service.saves.unsaved:
        raise RunFailed(service.saves.unsaved)


@app.command(epilog="Example: thinwire ps shard 127.0.0.1:29400 --index 0")
def shard(
    server: Annotated[str, typer.Argument(help="host:port of the server, started with --shards.")],
    index: Annotated[int, _Option(help="Number of the slice of the weights, from 0.")],
    outer: Annotated[
        str | None, _Option(help="The optimizer; by default the server's --outer, which it publishes.")
    ] = None,
    port: Annotated[int, _Option(help="Port at which nodes reach this shard; 0: a free one.")] = 0,
    host: Host = "127.0.0.1",
    keys: Keys = None,
    secret_file: SecretFile = None,
    insecure: Insecure = False,
    checkpoint_dir: Annotated[
        Path | None,
        _Option(help="Directory for checkpoints, needed if the server has one; the shard continues from it."),
    ] = None,
    json: Json = False,
) -> None:
    """Hold a slice of the weights for a server; it waits until the server starts, or starts again."""
    from thinwire.systems.cli.ps_work import read_secret_file, run_shard

    result = run_shard(
        server, index, outer, port, checkpoint_dir, host=host, keys=keys, secret=read_secret_file(secret_file),
        insecure=insecure,
    )  # fmt: skip
    typer.echo(json_module.dumps(result) if json else f"shard {index}: training ended at version {result['version']}")


@app.command(epilog="Example: thinwire ps node --server 127.0.0.1:29400 --model mlp")
def node(
    server: Annotated[str, _Option(help="host:port of the server.")],
    keys: Keys = None,
    secret_file: SecretFile = None,
    model: Model = "chargpt",
    node: Annotated[int | None, _Option(min=0, help="Number of this node; by default derived from the host's name.")]
    = None,
    workers: Annotated[int, _Option(help="Workers on this node, one process each.")] = 1,
    slowdown: Annotated[
        float, _Option(help="Emulate a slower machine: each step takes this many times longer.")
    ] = 1.0,
    pace: Annotated[float, _Option(help="Emulate: minimum seconds per step, times slowdown.")] = 0.0,
    seed: Annotated[int, _Option(help="Seed of the initial weights, which the server's replace.")] = 0,
    json: Json = False,
) -> None:  # fmt: skip
    """Work for a server: run this node's leader and its workers; workers that die are restarted."""
    check_number("--slowdown", slowdown, least=1, most=1e6)
    check_number("--pace", pace, least=0, most=1e6)
    from thinwire.systems.cli.ps_work import run_node

    result = run_node(
        server, model, node, workers, slowdown=slowdown, pace=pace, seed=seed, secret_file=secret_file, keys=keys
    )
    typer.echo(json_module.dumps(result) if json else f"node {result['node']}: {result['end']}")


@app.command(hidden=True)
def worker(
    leader: str, number: int, model: str, node: int, slowdown: float = 1.0, pace: float = 0.0, seed: int = 0,
    keys: Path | None = None,
) -> None:  # fmt: skip
    """One worker of `ps node`, in its own process."""
    from thinwire.systems.cli.ps_work import make_worker

    make_worker(leader, number, model, node, slowdown=slowdown, pace=pace, seed=seed, keys=keys).run()


@app.command(epilog="Example: thinwire ps run --nodes 4 --slow 3:4 --link 200mbit --seconds 60")
def run(
    model: Model = "chargpt:layers=2:width=128:heads=4",
    settings: SettingsText = "inhad",
    outer: OuterText = "auto",
    nodes: Annotated[int, _Option(help="Nodes besides the server's.")] = 4,
    workers: Annotated[int, _Option(min=1, help="Workers per node.")] = 1,
    shards: Shards = 0,
    link: Annotated[
        str, _Option(help="Rate of each link: the server's, the shards', the nodes', or one for all.")
    ] = "unlimited",
    delay: Delay = "0",
    jitter: Jitter = "0",
    loss: Loss = "0",
    congestion: Congestion = None,
    slow: Slow = None,
    pace: Annotated[
        float, _Option(help="Minimum seconds per step: shared cores then act like separate machines.")
    ] = 0.0,
    kill: Annotated[
        list[str] | None, _Option(help="NODE:SECONDS, to kill that node (kill -9) at that time; it then comes back.")
    ] = None,
    updates: Updates = None,
    gradients: Gradients = None,
    seconds: Annotated[float | None, _Option(help="Stop after this many seconds of training.")] = None,
    evaluate_every: Annotated[int, _Option(min=1, help="Updates between evaluations of the held-out loss.")] = 10,
    journal: Annotated[Path | None, _Option(help="File for the log of updates.")] = None,
    keys: Annotated[
        Path | None,
        _Option(
            help="TLS: where `thinwire keys new` made server, shard0, node0, ...; by default the run's own secret."
        ),
    ] = None,
    seed: Seed = 0,
    timeout: Annotated[float, _Option(help="Seconds after which the whole run is stopped.")] = 3600.0,
    plot: Annotated[
        Path | None, _Option(help="Also plot loss against seconds, with kills marked: .png or .html.")
    ] = None,
    json: Json = False,
) -> None:
    """Run a server and its nodes in the lab, over emulated links, with slow nodes and kills."""
    _check_end(updates, gradients, seconds)
    check_number("--pace", pace, least=0, most=1e6)
    check_plot(plot)
    check_output("--journal", journal)
    from thinwire.systems.cli.ps_work import LabSpec, lab_picture, run_lab
    from thinwire.tools.pictures import write_picture

    spec = LabSpec(
        model=model, settings=settings, outer=outer, nodes=nodes, workers=workers, link=link, delay=delay,
        jitter=jitter, loss=loss, congestion=congestion, pace=pace,
        slow=_pairs(slow, "--slow 1:4", nodes), kill=_pairs(kill, "--kill 2:10", nodes), updates=updates,
        gradients=gradients, seconds=seconds, evaluate_every=evaluate_every,
        journal=str(journal.absolute()) if journal else None, keys=str(keys) if keys else None,
        seed=seed, timeout=timeout, shards=shards,
    )  # fmt: skip
    with watched_load(1 + shards + nodes * workers) as load:
        result = run_lab(spec, quiet=json)
    result = load.with_load(result)
    if result["losses"]:
        picture = lab_picture(spec, result)
        result["picture"] = asdict(picture)
        if plot is not None:
            write_picture(picture, plot)
    elif plot is not None:
        raise RunFailed(f"{plot} was not drawn: {model} has no held-out loss")
    if json:
        typer.echo(json_module.dumps(result))
        return
    losses = result["losses"]
    typer.echo(_last_words(result["status"]))
    if losses:
        typer.echo(f"held-out loss {losses[0][2]:.3f} -> {losses[-1][2]:.3f} in {losses[-1][0]:.0f} s")
    typer.echo(f"{counted(nodes, 'node')} of {counted(workers, 'worker')}, and the server: {result['note']}")
    if plot is not None:
        typer.echo(f"written: {plot}")


@app.command(epilog="Example: thinwire ps simulate --nodes 16 --workers 4 --slow 0:4")
def simulate(
    settings: SettingsText = "inhad",
    nodes: Annotated[int, _Option(help="Nodes, each with a leader.")] = 4,
    workers: Annotated[int, _Option(help="Workers per node.")] = 1,
    step: Annotated[float, _Option(help="Median seconds of a worker's step.")] = 1.0,
    spread: Annotated[float, _Option(help="Log-normal spread of a step; 0: none.")] = 0.1,
    slow: Slow = None,
    parameters: Annotated[float, _Option(help="Parameters of the model, in millions.")] = 10.0,
    shards: Shards = 0,
    link: Annotated[str, _Option(help="Rate of every link, such as 1gbit.")] = "1gbit",
    delay: Annotated[str, _Option(help="One-way delay between nodes, such as 1ms.")] = "0.5ms",
    seconds: Annotated[float, _Option(help="Virtual seconds to simulate.")] = 300.0,
    seed: Annotated[int, _Option(help="Seed of all random draws.")] = 0,
    json: Json = False,
) -> None:
    """Predict what a setting would do, in virtual time, next to synchronous all-reduces on the same nodes and links."""
    from rich.console import Console

    from thinwire.systems.cli.ps_work import predict, prediction_table

    slower = dict(_pairs(slow, "--slow 1:4", nodes))
    rows = predict(settings, nodes, workers, step, spread, slower, parameters, link, delay, seconds, seed, shards)
    if json:
        typer.echo(json_module.dumps(rows))
    else:
        Console().print(prediction_table(rows))


@app.command(epilog="Example: thinwire ps replay run.jsonl")
def replay(
    journal: Annotated[Path, typer.Argument(help="File that --journal wrote.")],
    out: Annotated[Path | None, _Option(help="File for the weights, in torch's format.")] = None,
    json: Json = False,
) -> None:
    """Repeat a recorded run, update by update, and print the hash of its final weights."""
    check_output("--out", out)
    from thinwire.systems.cli.ps_work import replay_file

    result = replay_file(journal, out)
    typer.echo(json_module.dumps(result) if json else f"{result['updates']} updates, weights {result['hash']}")


def _check_end(*ends: float | None) -> None:
    if all(end is None for end in ends):
        raise ValueError("say when to end: give --updates or --gradients")
    if any(end is not None and not 0 < end < math.inf for end in ends):
        raise ValueError("--updates, --gradients and --seconds must be above 0")


def _pairs(words: list[str] | None, example: str, nodes: int) -> list[tuple[int, float]]:
    found = []
    for word in words or []:
        left, _, right = word.partition(":")
        try:
            pair = int(left), float(right)
        except ValueError:
            raise ValueError(f"{word!r} is not NODE:NUMBER; use for example {example}") from None
        if not (0 <= pair[0] < nodes and 0 < pair[1] < math.inf):
            raise ValueError(f"{word!r}: there are nodes 0 to {nodes - 1}, and the number must be above 0")
        found.append(pair)
    return found


def _last_words(status: dict[str, object]) -> str:
    loss = status.get("loss")
    text = (
        f"version {status['version']}, {status['gradients']} gradients in {status['seconds']:.1f} s, mean staleness "
        f"{status['mean_staleness']:.2f}, max {status['max_staleness']}, "
        f"{(status['up_bytes'] + status['down_bytes']) / 1e6:.1f} MB"  # type: ignore[operator]
    )
    return text + (f", training loss {loss:.3f}" if loss is not None else "")
