"""Run ``ip`` and ``tc`` where the namespaces live."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thinwire.tools.lab.errors import LabError

_TIMEOUT_SECONDS = 60.0


def tool(name: str) -> str:
    """Return the absolute path of a system tool; also looks where an ordinary user's PATH does not."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    found = shutil.which(name, path=path)
    if found is None:
        package = "iproute2" if name in ("ip", "tc") else "util-linux"
        raise LabError(f"the tool {name!r} is missing: install the package {package}")
    return found


@dataclass(frozen=True)
class Shell:
    """A place to run commands: this process's own namespaces, or those that `enter` leads to."""

    enter: tuple[str, ...] = ()

    def run(self, *command: str, stdin: str = "") -> str:
        """Run one command and return its output; raise `LabError` with its error message."""
        done = subprocess.run(
            [*self.enter, tool(command[0]), *command[1:]],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            start_new_session=True,  # ctrl-C in the terminal is for the lab, not for its tools
        )
        if done.returncode:
            complaint = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
            raise LabError(f"`{' '.join(command)}` failed: {complaint}")
        return done.stdout

    def batch(self, program: str, namespace: str, lines: Iterable[str]) -> None:
        """Pass many lines to one ``ip`` or ``tc`` inside a namespace."""
        text = "".join(line + "\n" for line in lines)
        if text:
            self.run(program, "-n", namespace, "-batch", "-", stdin=text)

    def inside(self, namespace: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` inside a namespace, keeping its process id."""
        return [*self.enter, tool("ip"), "netns", "exec", namespace, *command]
