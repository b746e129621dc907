"""``thinwire keys``: certificates for the machines of a training."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.tools.cli.console import Json

if TYPE_CHECKING:
    from thinwire.systems.link.keys import Issued

app = typer.Typer(help="Certificates for the machines of a training.", no_args_is_help=True)


@app.command(epilog="Example: thinwire keys new keys --names server,a,b --host 10.0.0.1")
def new(
    directory: Annotated[
        Path, typer.Argument(help="Directory of the certificate authority; created if it does not exist.")
    ],
    names: Annotated[
        str, typer.Option(help="Machine names, separated by commas; the one that the others connect to comes first.")
    ],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address at which the others reach the first one; may be repeated.")
    ] = None,
    days: Annotated[int, typer.Option(help="Days for which the certificates are valid.")] = 90,
    json: Json = False,
) -> None:
    """Make an identity for each machine, each in its own directory, and a development CA if there is none."""
    from thinwire.systems.link.keys import new_keys

    if days > 36_500:  # no certificate goes beyond the year 9999
        raise ValueError(f"--days {days} must be at most 36500")
    made = new_keys(directory, [name.strip() for name in names.split(",")], host or (), days)
    _tell(made, json)
    if not json:
        typer.echo(
            f"copy each directory to its machine, for --keys there; {directory / 'ca.key'} signs more and stays here"
        )


@app.command(epilog="Example: thinwire keys show keys")
def show(
    directory: Annotated[
        Path, typer.Argument(help="Directory that thinwire keys new wrote, or one machine's part of it.")
    ],
    json: Json = False,
) -> None:
    """Show the certificates of a directory: who they name, until when they are valid, and their fingerprints."""
    from thinwire.systems.link.keys import show_keys

    _tell(show_keys(directory), json)


def _tell(identities: list[Issued], json: bool) -> None:
    if json:
        typer.echo(json_module.dumps([asdict(identity) for identity in identities], default=str))
        return
    for one in identities:
        called = f", reached at {', '.join(one.hosts)}" if one.hosts else ""
        typer.echo(f"{one.directory}: {one.name}{called}; until {one.expires}; {one.fingerprint}")
