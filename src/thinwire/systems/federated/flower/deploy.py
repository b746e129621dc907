"""Start a Flower deployment, and stop all of it: certificates, the app's folder, a SuperLink with TLS, SuperNodes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.core.checks import check_count, check_number
from thinwire.systems.federated.flower.app import require_flower
from thinwire.systems.link.keys import new_keys

CA, CERTIFICATE, KEY = "ca.crt", "server.pem", "server.key"
_DAYS = 365


def ensure_certificates(folder: Path, host: str) -> None:
    """Make the three files unless they exist. The authority's private key is not kept: it signs only once."""
    there = [name for name in (CA, CERTIFICATE, KEY) if (folder / name).exists()]
    if len(there) == 3:
        return
    if there:
        raise ValueError(f"{folder} holds {', '.join(there)} only: give all of {CA}, {CERTIFICATE}, {KEY}, or none")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        new_keys(made, ["server"], [host], _DAYS)
        for given, name in (("ca.crt", CA), ("identity.crt", CERTIFICATE), ("identity.key", KEY)):
            (Path(made) / "server" / given).rename(folder / name)


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
    """Make a Flower app from the ``.py`` files next to the module that ``module:function`` names."""
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


_POLL_SECONDS = 2.0
_CONNECTION = "here"
_OFF = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class DeploymentFailed(RuntimeError):
    """A process of the deployment ended, or the run did not succeed."""


class Deployment:
    """One run on a SuperLink that is started for it; the arguments are the options of ``thinwire federated serve``."""

    def __init__(
        self, federation: str, nodes: int, local: bool, host: str, port: int, certificates: Path | None, out: Path,
        timeout: float,
    ) -> None:  # fmt: skip
        require_flower()
        self.nodes, self.timeout = check_count("nodes", nodes), check_number("timeout", timeout, above=0)
        self.federation, self.local, self.host, self.port = federation, local, host, port or _free_port(host)
        self.certificates, self.out = certificates, out.absolute()
        self._processes: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def run(self, on_status: Callable[[str], None], say: Callable[[str], None]) -> None:
        """Start, wait for the run's end, stop everything.

        ``on_status`` is called with the current state, ``say`` with what the user should do, such as the command that
        starts a SuperNode. ``DeploymentFailed`` has the last output of the process that failed.
        """
        work = Path(tempfile.mkdtemp(prefix="thinwire-flower-"))
        try:
            folder = self.certificates or work / "certificates"
            ensure_certificates(folder, self.host)
            write_app(work / "app", self.federation)
            self._environment = self._home(work / "home", folder)
            self._superlink(work / "superlink.log", folder)
            link = ["flower-supernode", "--superlink", f"{self.host}:{self.port}", "--root-certificates"]
            if self.local:
                for number in range(self.nodes):
                    config = f'partition-id={number} num-partitions={self.nodes} state-dir="{work / "states"}"'
                    command = [*link, str(folder / CA), "--port", str(_free_port("127.0.0.1")), "--node-config", config]
                    self._start(f"SuperNode {number}", command, work / f"supernode-{number}.log")
            else:
                say(
                    f"waiting for {self.nodes} SuperNodes; on each, with a copy of {folder / CA}:\n"
                    f"  {' '.join(link)} {CA} --node-config 'partition-id=NUMBER num-partitions={self.nodes}'"
                )
            on_status("submitting the run")
            self._follow(self._submit(work / "app"), on_status)
        finally:
            self._stop()
            shutil.rmtree(work, ignore_errors=True)

    def _home(self, home: Path, certificates: Path) -> dict[str, str]:
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
            f'address = "{self.host}:{self.port}"\nroot-certificates = "{(certificates / CA).absolute()}"\n'
        )
        scripts = str(Path(sys.executable).parent)  # Flower's processes start each other by name
        path = f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, **_OFF, "FLWR_HOME": str(home), "PATH": path}

    def _superlink(self, log: Path, folder: Path) -> None:
        command = ["flower-superlink", "--disable-runtime-dependency-installation"]
        command += ["--host", self.host, "--port", str(self.port), "--ssl-ca-certfile", str(folder / CA)]
        command += ["--ssl-certfile", str(folder / CERTIFICATE), "--ssl-keyfile", str(folder / KEY)]
        self._start("the SuperLink", command, log)
        deadline = time.monotonic() + 60
        while not _listens(self.host, self.port):
            self._check()
            if time.monotonic() > deadline:
                raise DeploymentFailed(f"the SuperLink is not listening on {self.host}:{self.port} after 60 s")
            time.sleep(0.2)

    def _start(self, name: str, command: list[str], log: Path) -> None:
        with log.open("wb") as file:
            process = subprocess.Popen(
                [_script(command[0]), *command[1:]], stdout=file, stderr=subprocess.STDOUT, env=self._environment,
                start_new_session=True,
            )  # fmt: skip
        self._processes.append((name, process, log))

    def _submit(self, app: Path) -> str:
        settings = f'nodes={self.nodes} timeout={self.timeout} out="{self.out}"'
        answer = self._json("run", str(app), _CONNECTION, "--run-config", settings)
        if not answer.get("success"):
            raise DeploymentFailed(f"Flower refused the run: {str(answer.get('error-message')).strip()}")
        return str(answer["run-id"])

    def _follow(self, run: str, on_status: Callable[[str], None]) -> None:
        history = self.out / "history.json"
        history.unlink(missing_ok=True)
        while True:
            self._check()
            rows = self._json("list", _CONNECTION, "--run-id", run).get("runs", [])
            status = str(rows[0]["status"]) if rows else "unknown"
            on_status(f"run {run}: {status}")
            if status.startswith("finished"):
                if status != "finished:completed" or not history.exists():
                    log = self._flwr("log", run, _CONNECTION, "--show").stdout.splitlines()
                    why = [line.strip() for line in log if "rror" in line] or ["Flower's log says nothing"]
                    raise DeploymentFailed(f"the run ended with status {status}: {why[-1]}")
                return
            time.sleep(_POLL_SECONDS)

    def _flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [_script("flwr"), *arguments]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=120, check=False)

    def _json(self, *arguments: str) -> dict[str, Any]:
        done = self._flwr(*arguments, "--format", "json")
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            words = (done.stderr or done.stdout).strip().splitlines()
            raise DeploymentFailed(f"flwr {arguments[0]} failed: {words[-1] if words else 'no output'}") from None
        return answer

    def _check(self) -> None:
        for name, process, log in self._processes:
            if process.poll() is not None:
                words = log.read_text(errors="replace").strip().splitlines()[-5:]
                raise DeploymentFailed(f"{name} ended with exit code {process.returncode}: {' | '.join(words)}")

    def _stop(self) -> None:
        """End every process group started here, nodes first."""
        for _, process, _ in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for _, process, _ in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes.clear()


def _script(name: str) -> str:
    beside = Path(sys.executable).parent / name  # a console script of this environment
    return str(beside) if beside.exists() else name


def _free_port(host: str) -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


def _listens(host: str, port: int) -> bool:
    with socket.socket() as found:
        found.settimeout(1.0)
        return found.connect_ex((host, port)) == 0
