"""The ranks of one run: their command, environment and cores; start them, pass on their output, end them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from thinwire.tools.lab import child
from thinwire.tools.lab.cluster import Cluster, LabError

_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_SELDOM_GIVEN = range(20_000, 32_000)  # below the ports that Linux gives by default
_OF_ANOTHER_LAUNCHER = ("GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
_CHUNK = 65536
_DRAIN_SECONDS = 2.0


def check_command(command: Sequence[str], environment: Mapping[str, str]) -> None:
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


def rank_environment(
    base: Mapping[str, str], cluster: Cluster, rank: int, *, master_address: str, master_port: int, interface: str
) -> dict[str, str]:
    """Return the environment of one rank; of ``base``, what an outer torchrun left is dropped."""
    kept = {k: v for k, v in base.items() if not k.startswith("TORCHELASTIC_") and k not in _OF_ANOTHER_LAUNCHER}
    node, local_rank = divmod(rank, cluster.ranks_per_node)
    return {
        "OMP_NUM_THREADS": "1",
        **kept,
        "PYTHONUNBUFFERED": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(node),
        "WORLD_SIZE": str(cluster.workers),
        "LOCAL_WORLD_SIZE": str(cluster.ranks_per_node),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "NCCL_NET": "Socket",  # over that interface; between nodes, which are hosts of their own,
        "NCCL_HOSTID": f"thinwire node {node}",  # and not through memory that they share only here
        **({"THINWIRE_CONGESTION": cluster.congestion} if cluster.congestion else {}),  # thinwire's own, too
    }


def own_cores(node: int, nodes: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Return a node's cores: equally many in a row for each; with more nodes than cores, one each, shared in turn."""
    each = len(cores) // nodes
    return tuple(cores[node * each : (node + 1) * each]) if each else (cores[node % len(cores)],)


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def child_command(command: Sequence[str], hosts: str = "", cores: Sequence[int] = ()) -> list[str]:
    """Return the command line that runs `command` here and dies with this process; ``hosts``: text of /etc/hosts."""
    script, places = str(Path(child.__file__)), ",".join(map(str, cores))
    return [sys.executable, "-I", "-S", script, str(os.getpid()), os.getcwd(), hosts, places, *command]


class RankProcesses:
    """All ranks of a run; leaving the context ends every process group that was started.

    An ended rank stays a zombie until then, so that the id of its group cannot be reused.
    """

    def __init__(self, on_line: Callable[[int, str], None]) -> None:
        self.exit_codes: list[int | None] = []
        self._on_line = on_line
        self._processes: list[subprocess.Popen[bytes]] = []
        self._began: list[tuple[Sequence[str], Mapping[str, str]]] = []
        self._pending: list[bytes] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        try:
            if kind is None:
                self._drain()
        finally:
            self._selector.close()
            for process in self._processes:
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the next rank, in a session of its own, standard error merged into standard output."""
        self._began.append((command, environment))
        self._processes.append(self._spawned(len(self._processes)))
        self._pending.append(b"")
        self.exit_codes.append(None)

    def start_again(self, rank: int) -> None:
        old = self._processes[rank]
        assert old.stdout is not None
        end = time.monotonic() + _DRAIN_SECONDS
        while old.stdout in {key.fileobj for key in self._selector.get_map().values()}:
            if time.monotonic() > end:  # one of its children still holds it open
                self._selector.unregister(old.stdout)
            else:
                self._read(0.05)
        old.wait()
        old.stdout.close()
        self._pending[rank] = b""
        self._processes[rank] = self._spawned(rank)
        self.exit_codes[rank] = None

    def _spawned(self, rank: int) -> subprocess.Popen[bytes]:
        command, environment = self._began[rank]
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, rank)
        return process

    @property
    def running(self) -> bool:
        return None in self.exit_codes

    def step(self, seconds: float) -> None:
        """Pass on the ranks' output, waiting at most that long for some, and note which have ended."""
        if self._selector.get_map():
            self._read(seconds)
        else:
            time.sleep(seconds)
        for rank, process in enumerate(self._processes):
            if self.exit_codes[rank] is None:
                self.exit_codes[rank] = _exit_code(process.pid)

    def signal(self, number: int, rank: int | None = None) -> None:
        for one, (process, code) in enumerate(zip(self._processes, self.exit_codes)):
            if code is None and rank in (None, one):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _read(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            rank = int(key.data)
            data = os.read(key.fd, _CHUNK)
            *lines, rest = (self._pending[rank] + data).split(b"\n")
            if not data:
                self._selector.unregister(key.fileobj)
                lines, rest = ([rest] if rest else []), b""
            self._pending[rank] = rest
            for line in lines:
                self._on_line(rank, line.decode(errors="replace").removesuffix("\r"))

    def _drain(self) -> None:
        end = time.monotonic() + _DRAIN_SECONDS
        while self._selector.get_map() and time.monotonic() < end:
            self._read(0.05)
        for rank, rest in enumerate(self._pending):
            if rest:
                self._on_line(rank, rest.decode(errors="replace"))


def _exit_code(pid: int) -> int | None:
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # something else in this process waited for it
        return 255
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else 128 + status.si_status
