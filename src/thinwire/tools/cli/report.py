"""``thinwire report`` and ``thinwire watch``: results as one HTML page, and a page that follows a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Files of race and demo, --json output of bench, plan and others, step logs, journals, Chrome traces.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="File for the page.")] = Path("report.html"),
) -> None:
    """Make one self-contained HTML page from results, predicted and measured."""
    from rich.console import Console

    from thinwire.tools.cli.console import check_output
    from thinwire.tools.report.inputs import read_files
    from thinwire.tools.report.page import render

    for path in files:
        if not path.is_file():
            raise ValueError(f"{path} is not a file")
    check_output("--out", out)
    if out.resolve() in {path.resolve() for path in files}:
        raise ValueError(f"--out {out} is one of the files to read")
    page = render(read_files(files))
    out.write_text(page, encoding="utf-8")
    Console().print(f"written: {out} ({len(page) / 1e6:.1f} MB; opens without a network)", markup=False)


def watch(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Files of tw.StepLog or ps server --journal; they may appear later."),
    ],
    port: Annotated[int, typer.Option(help="Port on this machine's loopback; 0: a free one.")] = 0,
    open: Annotated[bool, typer.Option(help="Open the page in the browser.")] = False,
) -> None:
    """Follow a run in the browser: loss, seconds and bytes of its steps, from the file that it writes."""
    import webbrowser

    from thinwire.tools.report.watch import WatchPage

    for path in files:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"{path} is not a file, and none can be created there")
    with WatchPage(files, port) as page:
        for path in files:
            if not path.exists():
                typer.echo(f"{path} does not exist yet: the page shows it as soon as it does", err=True)
        typer.echo(f"watching {', '.join(map(str, files))} at {page.address} ; ctrl-C stops it")
        if open:
            webbrowser.open(page.address)
        page.serve_forever()
