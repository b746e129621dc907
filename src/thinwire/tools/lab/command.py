"""Checks of the command to run, before anything is built."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from thinwire.tools.lab.errors import LabError

_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_SELDOM_GIVEN = range(20_000, 32_000)  # below the ports that Linux gives by default


def check_command(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise `LabError` unless the program exists and, if it is Python, its script too."""
    if not command:
        raise LabError("no command to run: give one after --, for example: -- python train.py")
    if shutil.which(command[0], path=environment.get("PATH", os.defpath)) is None:
        raise LabError(
            f"command {command[0]!r} does not exist or cannot be executed: give one after --, as in -- python train.py"
        )
    script = _python_script(command)
    if script is not None and not Path(script).exists():
        raise LabError(f"script {script!r} does not exist in {os.getcwd()}: give a path such as ./train.py")


def _python_script(command: Sequence[str]) -> str | None:
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return None
    words = iter(command[1:])
    for word in words:
        if word in _OPTIONS_WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            return word
        elif word == "-" or re.match(r"-[A-Za-z]*[cm]", word):
            return None  # standard input, -c code or -m module
    return None


def check_port(port: int | None) -> None:
    """Raise `LabError` unless the port is a valid TCP port."""
    if port is not None and not 1 <= port <= 65535:
        raise LabError(f"master port {port} is not between 1 and 65535: use for example --master-port 29500")


def loopback_port(port: int | None) -> int:
    """Return the given port if nobody listens on it, or a free one; raise `LabError` if it is taken.

    Rank 0 listens there seconds later, so the free one is not of those that a system gives to whoever asks for any.
    """
    for tried in [port] if port else random.SystemRandom().sample(_SELDOM_GIVEN, 20):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", tried))
                probe.listen(1)
            except OSError as error:
                why = error.strerror
            else:
                return tried
    raise LabError(f"master port {tried} cannot be used ({why}): choose another --master-port or leave it out")
