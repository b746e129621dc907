"""A verb is a record: a frozen dataclass whose fields are its options. Here it becomes a command, is read, and runs.

To add a verb, write such a record in a file of this folder, or for a system in ``systems/cli``, and name it in
``main.py``, or in its module's ``VERBS``::

    class CountVerb(LabOptions, JsonOption):  # options that verbs share are records too, in options.py
        '''Count the ranks that answer.

        Example: thinwire count --most 3
        '''

        most: int = option(10, "How many are waited for.", least=1)
        out: Path | None = option(None, "File for their names.", writes="file")

        def run(self, output: Output) -> Any:
            output.say("2 ranks answer")
            return {"count": 2}

``--most 3`` makes ``CountVerb(most=3)``. A record refuses wrong values wherever it is made, and before it runs, paths
that cannot be written. ``run`` prints for people, and returns what ``--json`` prints on stdout; all else then goes to
stderr. A ``ValueError`` is about the words (exit code 2), a ``RunFailed`` about the run (1). From Python:
``CountVerb(most=3).run(Output())``.
"""

from __future__ import annotations

import functools
import inspect
import json as json_module
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from typer.core import TyperCommand

from thinwire.core.checks import check_choice, check_count, check_number
from thinwire.core.events import python
from thinwire.core.records import Record, plain
from thinwire.tools.cli.console import Output, RunFailed, check_path

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # of Python 3.11

    def dataclass_transform(**_: Any) -> Any:
        return lambda kind: kind


def option(default: Any, help: str, **rules: Any) -> Any:
    """Return the field of an option; ``...`` as the default: it must be given. Its name is the field's.

    Rules: ``least``, ``above`` and ``most`` bound a number, ``choices`` a word; ``writes`` says what a path will be: a
    "file", a "folder" or a "plot"; ``end`` moves the option to the end of the help page.
    """
    return field(default=MISSING if default is ... else default, metadata={"help": help, **rules})


def argument(default: Any, help: str, **rules: Any) -> Any:
    """Return the field of a word without a name, called ``metavar`` in the help."""
    return option(default, help, argument=True, **rules)


def rules_of(kind: Any) -> dict[str, Mapping[str, Any]]:
    """Return the rules of a verb's options, its bases' first; a field that only has another default keeps them."""
    found: dict[str, Mapping[str, Any]] = {}
    for base in reversed(kind.__mro__):
        own, panel = vars(base).get("__dataclass_fields__", {}), vars(base).get("panel")
        stated = {name: own[name].metadata for name in inspect.get_annotations(base) if name in own}
        found |= {name: {"panel": panel, **rules} for name, rules in stated.items() if rules}
    return dict(sorted(found.items(), key=lambda item: item[1].get("end", 0)))


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Verb(Record):
    """The base of all verbs, and of the records of options that several share: each is a frozen dataclass."""

    called: ClassVar[str] = "a verb's options"
    panel: ClassVar[str | None] = None  # the part of the help page for the options stated in this class
    command_settings: ClassVar[Mapping[str, Any]] = {}  # as typer names them

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        for name, rules in rules_of(type(self)).items():
            bounds = {key: rules[key] for key in ("least", "above", "most") if key in rules}
            value = getattr(self, name)
            if "choices" in rules:
                check_choice(flag(name), value, rules["choices"])
            elif bounds and isinstance(value, int) and "most" not in bounds:
                check_count(flag(name), value, bounds.get("least", 1))
            elif bounds and value is not None:
                check_number(flag(name), value, **bounds)

    def run(self, output: Output) -> Any:
        raise NotImplementedError

    def on_rank(self, *words: str) -> None:
        """Be one of the processes that the verb starts by the command of :meth:`rank_command`."""
        raise NotImplementedError

    def rank_command(self, *words: str) -> list[str]:
        kind = type(self)
        return python("-m", "thinwire.tools.cli.rank", kind.__module__, kind.__name__, self.to_json(), *words)

    def given(self, names: Iterable[str]) -> str:
        """Return those of the options that differ from their defaults, in words."""
        default = {one.name: one.default for one in fields(self)}
        return ", ".join(flag(name) for name in names if getattr(self, name) != default[name])

    def part(self, kind: Any) -> dict[str, Any]:
        """Return the options that are also fields of another record, or named in a list."""
        names = kind if isinstance(kind, (tuple, list)) else [one.name for one in fields(kind)]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


def execute(verb: Verb) -> None:
    """Run a verb as its command does; ``typer.Exit`` with its exit code, unless that is 0."""
    for name, rules in rules_of(type(verb)).items():
        if "writes" in rules and getattr(verb, name) is not None:
            check_path(flag(name), getattr(verb, name), rules["writes"])
    json = getattr(verb, "json", False)
    output = Output(quiet=False, stderr=json)
    result = verb.run(output)
    if (path := getattr(verb, "plot", None)) is not None and "picture" in (result or ()):
        from thinwire.tools.pictures import write_picture

        write_picture(result["picture"], path)
        output.wrote(path)
    if json and result is not None:
        typer.echo(json_module.dumps(plain(result), indent=2 if sys.stdout.isatty() else None))
    if output.failure:
        raise RunFailed(output.failure)
    if output.code:
        raise typer.Exit(output.code)


def add(app: typer.Typer, *kinds: type[Verb], group: str = "", panel: str | None = None) -> None:
    """Add verbs to an app: PsRunVerb of the group "ps" is called "run"; docstrings, with an example, are the help."""
    for kind in kinds:
        name = kind.__name__.removesuffix("Verb").removeprefix(group.capitalize()).lower()
        text, _, example = inspect.cleandoc(kind.__doc__ or "").partition("Example: ")
        settings = {"help": text, "epilog": f"Example: {example}", "rich_help_panel": panel, **kind.command_settings}
        app.command(name, cls=Command, **settings)(_command(kind))


class PlainTypes:
    """In help pages a flag has no type, and an option that may be repeated has that of one value."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in found:
            if one.param_type_name == "option" and one.metavar is None:
                one.metavar = "" if one.is_flag else "<str>" if one.multiple else None
        return found


class Command(PlainTypes, TyperCommand):
    pass


def _command(kind: type[Verb]) -> Callable[..., None]:
    """Return a function whose signature is the verb's options, as typer reads it."""

    def command(**words: Any) -> None:
        execute(kind(**words))

    parameters, known = [], {one.name: one for one in fields(kind)}
    for name, rules in rules_of(kind).items():
        one, names = known[name], [flag(name)]
        annotation, default = _evaluated(str(one.type)), ... if one.default is MISSING else one.default
        if default is True:
            names = [f"{names[0]}/--no-{name}"]
        info = (
            typer.Argument(default, help=rules["help"], metavar=rules.get("metavar"))
            if "argument" in rules
            else typer.Option(default, *names, help=rules["help"], rich_help_panel=rules["panel"])
        )
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=annotation))
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@functools.cache
def _evaluated(annotation: str) -> Any:
    return eval(annotation, {"Path": Path})  # of a few words, each only once: a verb must start quickly
