"""The console script ``thinwire`` and its verbs. Starts without torch; a verb imports what it needs when it runs."""

from __future__ import annotations

try:
    import functools
    import gc
    import importlib
    from typing import Annotated, Any

    import typer
    from typer.core import TyperGroup
    from typer.main import get_group

    from thinwire import __version__
    from thinwire.tools.cli import bench, demo, doctor, measure, plan, race, report
    from thinwire.tools.cli.console import known_errors
    from thinwire.tools.cli.verb import PlainTypes, add

    _REPRODUCE = importlib.import_module("thinwire.systems.cli.reproduce").ReproduceVerb
except KeyboardInterrupt:  # these imports take most of a short verb's time
    raise SystemExit(130) from None

_OBJECTS = 50_000
"""New objects between two garbage collections: those of torch's import all stay, and scanning them again and again
costs a tenth of a verb that takes two seconds."""
_SYSTEMS = {  # by name: the systems stand above these tools
    "keys": "Certificates for the machines of a training.",
    "kfac": "Second order: plan K-FAC's messages and inversions, measure inversions, try dampings.",
    "ps": "Asynchronous training: a server, nodes that come and go, and a simulation in virtual time.",
    "federated": "Federated learning: many clients, few devices.",
    "split": "Fine-tune a model across a cut between an edge and a cloud (SFT).",
    "supernet": "EASNet: one stereo network whose kernels, depth, width and scales can be cut.",
}


class FriendlyErrors(PlainTypes, TyperGroup):
    """Known errors become ``error: <sentence>``: 2 for wrong words, 1 for a run that failed, 130 for ctrl-C."""

    def make_context(self, *words: Any, **options: Any) -> Any:
        with known_errors():
            return super().make_context(*words, **options)

    def invoke(self, ctx: Any) -> Any:
        with known_errors():
            return super().invoke(ctx)


class OfModule(PlainTypes, TyperGroup):
    """The verbs of a module, which is imported when they are asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.commands

    @functools.cached_property
    def commands(self) -> Any:  # type: ignore[override]
        wing = "systems" if self.name in _SYSTEMS else "tools"
        app = typer.Typer()
        add(app, *importlib.import_module(f"thinwire.{wing}.cli.{self.name}").VERBS, group=str(self.name))
        return get_group(app).commands


app = typer.Typer(
    cls=FriendlyErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Examples: thinwire demo --quick, and with a script of yours: "
    "thinwire lab run --link 1gbit -- python train.py",
)
_LOOK = "Look at a machine, a model, a run"
add(app, demo.DemoVerb, plan.PlanVerb, race.RaceVerb, bench.BenchVerb, _REPRODUCE, panel="Choose a method")
add(app, doctor.DoctorVerb, measure.ProbeVerb, measure.ProfileVerb, report.ReportVerb, report.WatchVerb, panel=_LOOK)


def _add_group(name: str, help: str, panel: str) -> None:
    app.add_typer(typer.Typer(cls=OfModule, help=help, no_args_is_help=True), name=name, rich_help_panel=panel)


_add_group("lab", "An emulated cluster on this machine: namespaces, shaped links, one process per rank.", _LOOK)
for _name, _help in _SYSTEMS.items():
    _add_group(_name, _help, "Systems, each with its own verbs")


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
    try:
        app()
    except KeyboardInterrupt:  # before or after the verb
        raise SystemExit(130) from None
