"""Command-line options that several verbs have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Device = Annotated[
    str, typer.Option(help="Where ranks compute: cpu, or cuda: on this machine's GPUs, which ranks may share.")
]
Plot = Annotated[Path | None, typer.Option(help="Also plot the result to this .png or .html file.")]


def check_folder(out: Path) -> None:
    """Raise ``ValueError`` if no files can be written into the folder of ``--out``; it need not exist yet."""
    there = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"--out {out}{' is' if there == out.absolute() else f': {there} is'} a file: give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--out {out}: {there} is not writable: give another folder")
