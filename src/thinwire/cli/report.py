"""``thinwire report``: results of the other verbs as one HTML page."""

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

    from thinwire.cli.console import check_output
    from thinwire.report import read_files, render

    for path in files:
        if not path.is_file():
            raise ValueError(f"{path} is not a file")
    check_output("--out", out)
    if out.resolve() in {path.resolve() for path in files}:
        raise ValueError(f"--out {out} is one of the files to read")
    page = render(read_files(files))
    out.write_text(page, encoding="utf-8")
    Console().print(f"written: {out} ({len(page) / 1e6:.1f} MB; opens without a network)", markup=False)
