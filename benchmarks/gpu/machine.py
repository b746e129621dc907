"""Which device the scripts beside this file measure, what they say of it, and how they show rows."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> dict[str, Any]:
    """Card, driver and versions."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "card": None}
    if importlib.util.find_spec("triton"):
        import triton

        found["triton"] = triton.__version__
    if DEVICE.type == "cuda":
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            driver = None  # AMD's, or a container without the tool
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        card = torch.cuda.get_device_name()
        found |= {"card": card, "driver": driver, "cuda": torch.version.cuda, "nccl": nccl}
    return found


def shown(title: str, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    for row in rows:
        cells = (row.get(column) for column in columns)
        table.add_row(*("-" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v) for v in cells))
    Console(width=110).print(table)
