"""``thinwire keys``: certificates for the machines of a training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.tools.cli.console import Output
from thinwire.tools.cli.options import JsonOption
from thinwire.tools.cli.verb import argument, option

if TYPE_CHECKING:
    from thinwire.systems.link.keys import Issued


class KeysNewVerb(JsonOption):
    """Make an identity for each machine, each in its own directory, and a development CA if there is none.

    Example: thinwire keys new keys --names server,a,b --host 10.0.0.1
    """

    directory: Path = argument(..., "Directory of the certificate authority; created if it does not exist.")
    names: str = option(..., "Machine names, separated by commas; the one that the others connect to comes first.")
    host: list[str] | None = option(None, "Name or address at which the others reach the first one; may be repeated.")
    days: int = option(90, "Days for which the certificates are valid.", most=36_500)  # to the year 9999

    def run(self, output: Output) -> Any:
        from thinwire.systems.link.keys import new_keys

        names = [name.strip() for name in self.names.split(",")]
        made = _listed(new_keys(self.directory, names, self.host or (), self.days), output)
        signs = self.directory / "ca.key"
        output.line(f"copy each directory to its machine, for --keys there; {signs} signs more and stays here")
        return made


class KeysShowVerb(JsonOption):
    """Show the certificates of a directory: who they name, until when they are valid, and their fingerprints.

    Example: thinwire keys show keys
    """

    directory: Path = argument(..., "Directory that thinwire keys new wrote, or one machine's part of it.")

    def run(self, output: Output) -> Any:
        from thinwire.systems.link.keys import show_keys

        return _listed(show_keys(self.directory), output)


def _listed(identities: list[Issued], output: Output) -> list[dict[str, Any]]:
    for one in identities:
        called = f", reached at {', '.join(one.hosts)}" if one.hosts else ""
        output.line(f"{one.directory}: {one.name}{called}; until {one.expires}; {one.fingerprint}")
    return [{**asdict(one), "expires": str(one.expires)} for one in identities]


VERBS = (KeysNewVerb, KeysShowVerb)
