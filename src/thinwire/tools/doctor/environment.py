"""Whether torchrun's variables are consistent, and torch, this process's limits and the lab suitable for training."""

from __future__ import annotations

import re
from collections.abc import Iterator

from thinwire.predict.measure.facts import Facts
from thinwire.tools.doctor.findings import ERROR, NOTE, WARNING, Finding, Setting

OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 9)
_FILES = 1024
_SHARED = 256 << 20  # bytes; containers get 64 MiB by default
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_REMEDY = "Start with torchrun, which sets them all, or unset what is left from an earlier start."


def environment(setting: Setting) -> Iterator[Finding]:
    """Yield the findings on torch, limits and the lab."""
    facts = setting.facts
    for name, have, oldest in (("Python", facts.python, OLDEST_PYTHON), ("torch", facts.torch, OLDEST_TORCH)):
        if _version(have) < oldest:
            least = ".".join(map(str, oldest))
            yield Finding(
                ERROR,
                "too-old",
                f"{name} is {have}, and thinwire needs {least} or newer.",
                f"Install {name} {least} or newer, in a virtual environment if others need the old one.",
            )
    if not {"gloo", "nccl"} & set(facts.backends):
        yield Finding(
            ERROR,
            "no-backend",
            "This build of torch has neither Gloo nor NCCL, so ranks cannot communicate.",
            "Install torch from PyPI or pytorch.org; your own builds need USE_DISTRIBUTED=1.",
        )
    if facts.gpu_driver and not facts.gpus and "CUDA_VISIBLE_DEVICES" not in facts.environment:
        yield Finding(
            WARNING,
            "gpu-unused",
            f"This machine has a GPU driver, but torch {facts.torch} sees no GPU: training will run on the processor.",
            "Install a build of torch for the driver's CUDA version (pytorch.org says which).",
        )
    if facts.quota is not None and facts.quota < facts.cores and facts.threads > max(1.0, facts.quota):
        yield Finding(
            WARNING,
            "quota",
            f"The container may use {facts.quota:g} of {facts.cores} cores, but torch starts {facts.threads} "
            "threads, which will be "
            "throttled.",
            f"Set OMP_NUM_THREADS={max(1, int(facts.quota))}.",
        )
    if facts.open_files is not None and facts.open_files[0] < _FILES:
        soft, hard = facts.open_files
        yield Finding(
            WARNING,
            "open-files",
            f"This process may open {soft} files; every pair of ranks takes several sockets, data loaders more.",
            f"`ulimit -n {min(65536, hard)}` before the start"
            + (", and raise the hard limit." if hard < _FILES else "."),
        )
    if facts.shm_bytes is not None and facts.shm_bytes < _SHARED:
        yield Finding(
            WARNING,
            "shared-memory",
            f"/dev/shm holds {facts.shm_bytes / (1 << 20):.0f} MiB: DataLoader workers and NCCL's ranks on one machine "
            "exchange their data there, and die with a bus error when it is full.",
            "Start the container with --shm-size=8g or --ipc=host.",
        )
    if facts.environment.get("GLOO_DEVICE_TRANSPORT", "").upper() == "TCP_TLS":
        yield Finding(
            NOTE,
            "gloo-tls",
            "GLOO_DEVICE_TRANSPORT=TCP_TLS: Gloo carries everything that ranks exchange, encrypted; thinwire's own TCP "
            "connections, which are plain and faster, are not used.",
            "Nothing to do if the network is not trusted; otherwise unset it.",
        )
    if facts.lab == "loopback":
        yield Finding(
            NOTE,
            "no-lab",
            "`thinwire lab`, `bench` and `probe` cannot emulate links here"
            + (f" ({facts.lab_reason})." if facts.lab_reason else "."),
            "Run as root, or allow user namespaces, and install iproute2; training does not need it.",
        )


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def nodes_of(facts: Facts) -> int | None:
    """Return the least number of machines that torchrun's variables imply; None if they do not say."""
    world, local = (_number(facts, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world is None or local is None or local < 1:
        return None
    return -(-world // local)


def launch(setting: Setting) -> Iterator[Finding]:
    """Yield the findings on torchrun's variables."""
    facts = setting.facts
    there = [name for name in _NEEDED if name in facts.environment]
    missing = [name for name in _NEEDED if name not in facts.environment]
    if there and missing and {"RANK", "WORLD_SIZE"} & set(there):
        yield Finding(
            ERROR,
            "variables-missing",
            f"{', '.join(there)} is set but {', '.join(missing)} is not: init_process_group will refuse to start.",
            _REMEDY,
        )
    for name in _NUMBERS:
        value = facts.environment.get(name)
        if value is not None and _number(facts, name) is None:
            yield Finding(ERROR, "variables-wrong", f"{name}={value!r} is not a number.", _REMEDY)
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE")):
        low, high = _number(facts, rank), _number(facts, size)
        most = high if rank == "LOCAL_WORLD_SIZE" else None if high is None else high - 1
        if low is not None and most is not None and low > most:
            yield Finding(
                ERROR,
                "variables-wrong",
                f"{rank}={low} does not fit {size}={high}: it must be at most {most}.",
                _REMEDY,
            )
    port = _number(facts, "MASTER_PORT")
    if port is not None and not 0 < port < 1 << 16:
        yield Finding(ERROR, "variables-wrong", f"MASTER_PORT={port} is not a port: it must be 1 to 65535.", _REMEDY)
    yield from _threads(facts)


def _threads(facts: Facts) -> Iterator[Finding]:
    ranks = _number(facts, "LOCAL_WORLD_SIZE")
    if ranks is not None and ranks > 1 and ranks * facts.threads > facts.cores and facts.threads > 1:
        fair = max(1, facts.cores // ranks)
        yield Finding(
            WARNING,
            "too-many-threads",
            f"{ranks} ranks with {facts.threads} threads each share {facts.cores} cores: they slow one another down.",
            f"Set OMP_NUM_THREADS={fair}.",
        )


def _number(facts: Facts, name: str) -> int | None:
    value = facts.environment.get(name, "").strip()
    return int(value) if value.isascii() and value.isdigit() else None
