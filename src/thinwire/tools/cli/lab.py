"""``thinwire lab``: an emulated cluster on this machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from thinwire.tools import lab
from thinwire.tools.cli.console import Congestion, Delay, Jitter, Link, Loss, RanksPerNode, Workers

app = typer.Typer(
    help="An emulated cluster on this machine: namespaces, shaped links, one process per rank.", no_args_is_help=True
)


@app.command(context_settings={"allow_interspersed_args": False}, epilog="Example: thinwire lab run -- python train.py")
def run(
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: what every rank runs, such as python train.py.")
    ] = None,
    workers: Workers = 2,
    ranks_per_node: RanksPerNode = 1,
    link: Link = "unlimited",
    delay: Delay = "0",
    jitter: Jitter = "0",
    loss: Loss = "0",
    congestion: Congestion = None,
    grace: Annotated[
        float, typer.Option(help="Seconds that the other ranks may continue after one has failed.")
    ] = 30.0,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which the run is stopped (exit code 124).")
    ] = None,
    master_port: Annotated[int | None, typer.Option(help="Port of rank 0; by default a free one.")] = None,
    share_cores: Annotated[
        bool, typer.Option("--share-cores", help="Let every node use all cores; by default each has its own.")
    ] = False,
    kill: Annotated[
        list[str] | None, typer.Option(help="Kill a rank: 2:30s is rank 2 after 30 s. May be repeated.")
    ] = None,
    restart: Annotated[
        str | None, typer.Option(help="Restart killed ranks after this time, such as 5s; without it they stay dead.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop a rank: 1:10s:3s is rank 1 after 10 s, for 3 s. May be repeated.")
    ] = None,
    cut: Annotated[
        list[str] | None, typer.Option(help="Cut the link of a rank's node: 1:10s:3s. May be repeated.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on stdout; the ranks' output goes to stderr.")
    ] = False,
) -> None:
    """Run a command as the ranks of an emulated cluster; the exit code is the worst of the ranks'.

    It says how long the command took. Whether a method is faster at the same loss: thinwire race.
    """
    faults = lab.parse_kills(kill or [], restart)
    faults += [*lab.parse_pauses("stop", stop or []), *lab.parse_pauses("cut", cut or [])]
    stream = sys.stderr if json else sys.stdout
    result = lab.run(
        lab.Cluster.parse(workers, ranks_per_node, link, delay, jitter, loss, congestion),
        command or [],
        on_line=lambda rank, line: print(f"[{rank}] {line}", file=stream, flush=True),
        grace_seconds=grace,
        timeout_seconds=timeout,
        master_port=master_port,
        share_cores=share_cores,
        faults=faults,
    )
    if json:
        typer.echo(result.to_json())
    elif result.emulated:
        sent = ", ".join(f"{count / 1e6:.2f}" for count in result.sent_bytes)
        typer.echo(f"{result.note}: {result.seconds:.1f} s, MB sent per node: {sent}", err=True)
    raise typer.Exit(result.exit_code)


@app.command(epilog="Example: thinwire lab clean")
def clean(
    all: Annotated[bool, typer.Option("--all", help="Also remove what belongs to runs that are still alive.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the removed names as JSON on stdout.")] = False,
) -> None:
    """Remove what killed runs left behind."""
    from json import dumps

    removed = lab.clean(all=all)
    if json:
        typer.echo(dumps({"removed": removed}))
        return
    for name in removed:
        typer.echo(f"removed {name}")
    if not removed:
        typer.echo("nothing to remove")
