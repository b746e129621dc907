"""Command-line options that several verbs have."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Device = Annotated[
    str, typer.Option(help="Where ranks compute: cpu, or cuda: on this machine's GPUs, which ranks may share.")
]
Plot = Annotated[Path | None, typer.Option(help="Also plot the result to this .png or .html file.")]


def check_folder(out: Path, option: str = "--out") -> None:
    """Create the folder of an option; raise ``ValueError`` if no files can be written into it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()  # some folders refuse even root
    except OSError as error:
        raise ValueError(
            f"{option} {out} is not a folder that can be written ({error.strerror}): give another"
        ) from error
