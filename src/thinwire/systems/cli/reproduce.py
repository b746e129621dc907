"""``thinwire reproduce``: what papers claim, and what of it holds here."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.systems.papers import NAMES
from thinwire.tools.cli.console import Json, check_output, plain_table, progress, watched_load

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.systems.papers.paper import Reproduced


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"{', '.join(NAMES)}; without names all."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Longer runs and more seeds.")] = False,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Only what is simulated at a paper's scale: seconds, and no verdict.")
    ] = False,
    out: Annotated[Path, typer.Option(help="File for the results; those of other papers stay in it.")] = Path(
        "claims.json"
    ),
    json: Json = False,
) -> None:
    """Show what holds of eleven papers: simulated at their scale, measured here in the small, and the verdict."""
    from rich.console import Console

    from thinwire.core.durable import write_whole
    from thinwire.core.records import plain
    from thinwire.systems.papers.paper import paper
    from thinwire.systems.papers.paper import reproduce as run
    from thinwire.systems.papers.workbench import Workbench

    asked = [paper(name).name for name in dict.fromkeys(names or NAMES)]
    check_output("--out", out)
    kept = _read(out)
    with watched_load(2):  # that of other work: before the first paper
        for place, name in enumerate(asked, 1):
            with progress(f"{name} ({place} of {len(asked)})") as bar:

                def tell(text: str, bar: Any = bar, name: str = name) -> None:
                    bar(description=f"{name}: {text}")

                result = run(name, None if simulated else Workbench(full, tell))
            kept[name] = plain(result)
            if not simulated:
                write_whole(out, json_module.dumps(kept, indent=1) + "\n", synced=False, shared=True)
            if not json:
                _show(result, Console())
    if json:
        typer.echo(json_module.dumps({name: kept[name] for name in asked}, indent=2))
    elif not simulated:
        typer.echo(f"written: {out}")


def _read(out: Path) -> dict[str, Any]:
    if not out.exists():
        return {}
    try:
        kept = json_module.loads(out.read_text(encoding="utf-8") or "{}")
    except ValueError:
        kept = None
    if not isinstance(kept, dict):
        raise ValueError(f"--out {out} holds something else than results of thinwire reproduce: give another file")
    return kept


def _show(result: Reproduced, console: Console) -> None:
    from thinwire.systems.papers.paper import paper

    told = paper(result.name)
    say = {"markup": False, "highlight": False}
    console.print(f"{told.system}: {told.title}, {told.authors}", style="bold", **say)  # type: ignore[arg-type]
    console.print(f"claim: {told.claim} ({told.setting}). {told.link}", **say)  # type: ignore[arg-type]
    table = plain_table("", ("what", "paper", "here", ""), left=("",))
    for one in result.shown:
        table.add_row(one.what, one.published or "-", f"{one.value:.4g} {one.unit}".rstrip(), one.how)
    console.print(table)
    style = {"holds": "green", "holds where": "yellow"}.get(result.word, "red")
    console.print(result.verdict, style=style, **say)  # type: ignore[arg-type]
    console.print()
