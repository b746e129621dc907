"""Command-line options that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Device = Annotated[
    str, typer.Option(help="Where ranks compute: cpu, or cuda: on this machine's GPUs, which ranks may share.")
]
Plot = Annotated[Path | None, typer.Option(help="Also plot the result to this .png or .html file.")]
