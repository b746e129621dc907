"""The console script ``thinwire``. Starts without torch; every verb imports what it needs when it runs."""

from __future__ import annotations

try:
    import gc
    import importlib
    from collections.abc import Iterator
    from contextlib import contextmanager
    from typing import Annotated, Any

    import typer
    from typer.core import TyperGroup

    from thinwire import __version__
    from thinwire.tools.cli import bench, demo, doctor, lab, measure, plan, race, report
    from thinwire.tools.cli.console import exit_code, sentence

    _OF_SYSTEMS = {
        name: importlib.import_module(f"thinwire.systems.cli.{name}").app
        for name in ("keys", "kfac", "ps", "federated", "split", "supernet")
    }  # by name: the systems stand above these tools
    _REPRODUCE = importlib.import_module("thinwire.systems.cli.reproduce").reproduce
except KeyboardInterrupt:  # these imports take most of a short verb's time
    raise SystemExit(130) from None

_OBJECTS = 50_000
"""New objects between two garbage collections: those of torch's import all stay, and scanning them again and again
costs a tenth of a verb that takes two seconds."""


class FriendlyErrors(TyperGroup):
    """Known errors become ``error: <sentence>``: 2 for wrong words, 1 for a run that failed, 130 for ctrl-C."""

    def make_context(self, *words: Any, **options: Any) -> Any:
        _plain_types(self)
        with _known_errors():
            return super().make_context(*words, **options)

    def invoke(self, ctx: Any) -> Any:
        with _known_errors():
            return super().invoke(ctx)


def _plain_types(command: Any) -> None:
    """In help pages a flag has no type, and an option that may be repeated has that of one value."""
    for one in command.get_params(typer.Context(command)):
        if one.param_type_name == "option" and one.metavar is None:
            one.metavar = "" if one.is_flag else "<str>" if one.multiple else None
    for verb in getattr(command, "commands", {}).values():
        _plain_types(verb)


@contextmanager
def _known_errors() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as error:
        if (code := exit_code(error)) is None:
            raise
        typer.echo(f"error: {sentence(error)}", err=True)
        raise typer.Exit(code) from error


app = typer.Typer(
    cls=FriendlyErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Examples: thinwire demo --quick, and with a script of yours: "
    "thinwire lab run --link 1gbit -- python train.py",
)
_CHOOSE, _LOOK, _SYSTEMS = "Choose a method", "Look at a machine, a model, a run", "Systems, each with its own verbs"
for _panel, _verb, _words in (
    (_CHOOSE, demo.demo, "--quick"),
    (_CHOOSE, plan.plan, "resnet50 --link 1gbit --workers 4"),
    (_CHOOSE, race.race, "mymodule:build --link 100mbit --workers 4"),
    (_CHOOSE, bench.bench, "--model mlp --link 200mbit --methods ddp,powersgd:rank=4"),
    (_CHOOSE, _REPRODUCE, "acp dear"),
    (_LOOK, doctor.doctor, "--nodes 2"),
    (_LOOK, measure.probe, "--workers 2 --link 100mbit"),
    (_LOOK, measure.profile, "mymodule:build --out profile.json"),
    (_LOOK, report.report, "thinwire-out/race.json --out race.html"),
    (_LOOK, report.watch, "steps.jsonl --open"),
):
    _name = _verb.__name__
    app.command(_name, rich_help_panel=_panel, epilog=f"Example: thinwire {_name} {_words}")(_verb)
app.add_typer(lab.app, name="lab", rich_help_panel=_LOOK)
for _name, _verbs in _OF_SYSTEMS.items():
    app.add_typer(_verbs, name=_name, rich_help_panel=_SYSTEMS)


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
