"""The console script ``thinwire``. Starts without torch; every verb imports what it needs when it runs."""

from __future__ import annotations

import gc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from thinwire import __version__
from thinwire.cli import (
    bench,
    demo,
    doctor,
    federated,
    keys,
    kfac,
    lab,
    plan,
    probe,
    profile,
    ps,
    race,
    report,
    split,
    supernet,
)
from thinwire.cli.errors import exit_code

_OBJECTS = 50_000
"""New ones between two collections: those of torch's import all stay, and to look through them again and again costs a
tenth of a verb that takes two seconds."""


class FriendlyErrors(TyperGroup):
    """Errors of ours become ``error: <sentence>``: 2 for wrong words, 1 for a run that failed, 130 for ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except (ValueError, RuntimeError) as error:
            if (code := exit_code(error)) is None:
                raise
            typer.echo(f"error: {error}", err=True)
            ctx.exit(code)
        except KeyboardInterrupt:
            ctx.exit(130)


app = typer.Typer(
    cls=FriendlyErrors,
    help="Train deep networks over thin wires.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)
app.command("race")(race.race)
app.command("doctor")(doctor.doctor)
app.command("probe")(probe.probe)
app.command("profile")(profile.profile)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.add_typer(lab.app, name="lab")
app.add_typer(kfac.app, name="kfac")
app.add_typer(supernet.app, name="supernet")
app.add_typer(ps.app, name="ps")
app.add_typer(split.app, name="split")
app.add_typer(keys.app, name="keys")
app.add_typer(federated.app, name="federated")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thinwire {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Train deep networks over thin wires."""


def run() -> None:
    """Entry point of the console script."""
    gc.set_threshold(_OBJECTS)
    app()
