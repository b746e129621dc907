"""Collect the facts of this machine, without judging them."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.predict.measure import network
from thinwire.predict.measure.facts import Facts
from thinwire.predict.measure.machine import usable_cores

_TORCHRUN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_VARIABLES = (*_TORCHRUN, "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_PREFIXES = ("TORCHELASTIC_", "GLOO_", "NCCL_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_", "THINWIRE_")
_REQUIREMENT = re.compile(r"""^([\w.-]+)[^;]*;.*extra == ['"]([\w-]+)['"]""")
_TOOLS = ("dev", "docs")


def collect_facts(lab: str = "loopback", lab_reason: str = "", lab_congestion_control: str | None = None) -> Facts:
    """Collect the facts of this machine.

    Args:
        lab: with which rights the lab emulates links; this layer cannot ask it.
        lab_reason: why no better rights are available.
        lab_congestion_control: TCP's congestion control on those links.
    """
    from thinwire import __version__

    names = ("gloo", "nccl", "mpi", "ucc")
    backends = [name for name in names if dist.is_available() and dist.is_backend_available(name)]
    packages, extras = _installed()
    if torch.version.cuda:
        packages["cuda"] = torch.version.cuda
    segments, again = network.tcp_segments()
    variables = {k: v for k, v in sorted(os.environ.items()) if k in _VARIABLES or k.startswith(_PREFIXES)}
    return Facts(
        thinwire=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform(),
        packages=packages,
        extras=tuple(extras),
        backends=tuple(backends),
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        gpu_driver=any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd")),
        cores=usable_cores(),
        quota=cpu_quota(),
        threads=torch.get_num_threads(),
        memory_bytes=_memory(),
        interfaces=network.interfaces(),
        default_route=network.default_route(),
        hostname=network.look_up(platform.node()),
        master=network.look_up(variables["MASTER_ADDR"]) if variables.get("MASTER_ADDR") else None,
        environment=variables,
        tcp=network.tcp_settings(),
        segments=segments,
        retransmitted=again,
        open_files=_open_files(),
        shm_bytes=_shm(),
        lab=lab,
        lab_reason=lab_reason,
        lab_congestion_control=lab_congestion_control,
    )


def _installed() -> tuple[dict[str, str], list[str]]:
    """Return versions of what thinwire and its extras need, and the extras of which nothing is missing."""
    try:
        lines = metadata.requires("thinwire") or []
    except metadata.PackageNotFoundError:  # run from a source tree without installation
        lines = []
    needs: dict[str, list[str]] = {}
    for package, extra in (asked.groups() for line in lines if (asked := _REQUIREMENT.match(line))):
        if extra not in _TOOLS and package != "thinwire":
            needs.setdefault(extra, []).append(package)
    optional = {package for some in needs.values() for package in some} | {"triton"}
    versions = {name: found for name in ("numpy", "typer", "rich", *sorted(optional)) if (found := _version(name))}
    return versions, sorted(extra for extra, some in needs.items() if all(name in versions for name in some))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu_quota(folder: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores that the control group grants, version 2 or version 1."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join((folder / name).read_text() for name in files).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # absent, or "max"
            continue
        if quota > 0 and period > 0:
            return quota / period
    return None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _open_files() -> tuple[int, int] | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    huge = 1 << 30  # "unlimited" is a negative number
    return soft if soft >= 0 else huge, hard if hard >= 0 else huge


def _shm() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        return None
    return found.f_frsize * found.f_blocks
