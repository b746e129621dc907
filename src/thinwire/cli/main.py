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
    watch,
)
from thinwire.cli.errors import exit_code

_OBJECTS = 50_000
"""New objects between two garbage collections: those of torch's import all stay, and scanning them again and again
costs a tenth of a verb that takes two seconds."""


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
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_CHOOSE, _LOOK, _SYSTEMS = "Choose a method", "Look at a machine, a model, a run", "Systems, each with its own verbs"
app.command("demo", rich_help_panel=_CHOOSE)(demo.demo)
app.command("plan", rich_help_panel=_CHOOSE)(plan.plan)
app.command("race", rich_help_panel=_CHOOSE)(race.race)
app.command("bench", rich_help_panel=_CHOOSE)(bench.bench)
app.command("doctor", rich_help_panel=_LOOK)(doctor.doctor)
app.command("probe", rich_help_panel=_LOOK)(probe.probe)
app.command("profile", rich_help_panel=_LOOK)(profile.profile)
app.command("report", rich_help_panel=_LOOK)(report.report)
app.command("watch", rich_help_panel=_LOOK)(watch.watch)
app.add_typer(lab.app, name="lab", rich_help_panel=_LOOK)
app.add_typer(keys.app, name="keys", rich_help_panel=_SYSTEMS)
app.add_typer(kfac.app, name="kfac", rich_help_panel=_SYSTEMS)
app.add_typer(ps.app, name="ps", rich_help_panel=_SYSTEMS)
app.add_typer(federated.app, name="federated", rich_help_panel=_SYSTEMS)
app.add_typer(split.app, name="split", rich_help_panel=_SYSTEMS)
app.add_typer(supernet.app, name="supernet", rich_help_panel=_SYSTEMS)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thinwire {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train in parallel where the network is slow: choose a method by numbers, see it work, measure it."""


def run() -> None:
    """Entry point of the console script."""
    gc.set_threshold(_OBJECTS)
    app()
