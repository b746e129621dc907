"""``thinwire doctor``: what this machine offers to thinwire."""

from __future__ import annotations

import importlib.util
import json as json_module
import os
import platform
from importlib import metadata
from typing import Annotated, Any

import typer

_LAB = {
    "root": "emulated links as root",
    "user": "emulated links in a user namespace",
    "loopback": "no rights for network namespaces: ranks run on plain loopback, links are not emulated",
}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
) -> None:
    """Say what this machine has: versions, backends, cores, rights, interface, GPU."""
    found = examine()
    if json:
        typer.echo(json_module.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "found", show_header=False)
    for name, value in found.items():
        table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
    Console().print(table)


def examine() -> dict[str, Any]:
    """Look around."""
    import torch
    import torch.distributed as dist

    from thinwire import __version__, lab
    from thinwire.measure.cores import usable_cores

    backends = [name for name in ("gloo", "nccl", "mpi") if dist.is_available() and dist.is_backend_available(name)]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "thinwire": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backends": backends,
        "backend in use": "nccl" if gpus and "nccl" in backends else "gloo",
        "cores": usable_cores(),
        "gpus": gpus or ["none"],
        "interface": os.environ.get("GLOO_SOCKET_IFNAME") or default_interface() or "unknown",
        "lab": _LAB[lab.available()],
        "extras": [name for name in ("matplotlib", "plotly", "transformers", "triton") if _has(name)] or ["none"],
        "torch.compile": "coupled methods give equal results; overlap only across graph breaks",
    }


def default_interface() -> str | None:
    """The interface of the default route, which Gloo most likely takes."""
    try:
        with open("/proc/net/route") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[1] == "00000000":
                    return fields[0]
    except OSError:
        pass
    return None


def _has(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return importlib.util.find_spec(name) is not None
    return True
