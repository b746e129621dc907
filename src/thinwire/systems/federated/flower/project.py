"""The folder that Flower requires for an app: the user's files, and two of thinwire's."""

from __future__ import annotations

import shutil
from pathlib import Path

_PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "federation"
version = "1.0.0"
description = "A thinwire federation."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "thinwire"

[tool.flwr.app.components]
serverapp = "thinwire_app:server"
clientapp = "thinwire_app:client"

[tool.flwr.app.config]
nodes = 1
timeout = 3600.0
out = ""
"""
_APP = """from {module} import {function}

from thinwire.systems.federated.flower.app import client_app, server_app

server = server_app({function})
client = client_app({function})
"""


def write_app(folder: Path, federation: str) -> None:
    """Make a Flower app from the ``.py`` files next to the module that ``module:function`` names.

    Raises:
        ValueError: the module is not a file in this folder.
    """
    module, colon, function = federation.partition(":")
    module = module.removesuffix(".py")
    source = Path.cwd() / f"{module}.py"
    if not colon or not function.isidentifier() or not source.is_file():
        raise ValueError(
            f"{federation!r} must be module:function with a file {module}.py in this folder, which Flower copies to "
            "the nodes"
        )
    folder.mkdir(parents=True)
    for path in source.parent.glob("*.py"):
        shutil.copy(path, folder / path.name)
    (folder / "pyproject.toml").write_text(_PROJECT)
    (folder / "thinwire_app.py").write_text(_APP.format(module=module, function=function))
