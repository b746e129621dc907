"""How much memory a cache may take on this machine."""

from __future__ import annotations

import os
from pathlib import Path

_SHARE, _AUTO_SHARE = 0.9, 0.5


def room(directory: Path, root: Path = Path("/")) -> dict[str, int]:
    """Return the free bytes by their limit: memory, the control group, the file system of ``directory``.

    Args:
        directory: folder of the arena.
        root: folder under which ``proc`` and ``sys`` are read.

    Raises:
        OSError: not on Linux.
    """
    bounds = {}
    table = root / "proc/meminfo"
    if not table.exists():
        raise OSError("a data cache needs Linux: its memory is a file on a tmpfs, reserved with posix_fallocate")
    for line in table.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            bounds["free memory"] = 1024 * int(line.split()[1])
    group = _group_room(root)
    if group is not None:
        bounds["left under the cgroup limit"] = group
    if directory.is_dir():
        status = os.statvfs(directory)
        bounds[f"free space in {directory}"] = status.f_bavail * status.f_frsize
    return bounds


def budget(memory_bytes: int | str, directory: Path, held: int, root: Path = Path("/")) -> int:
    """Return the size of an arena in bytes.

    Args:
        memory_bytes: requested bytes, or "auto": half of what is free.
        directory: folder of the arena.
        held: bytes that it already holds, from an earlier run or another rank; they count as free.
        root: see :func:`room`.

    Raises:
        ValueError: more than nine tenths of what is free, or not a positive number.
    """
    bounds = {what: free + held for what, free in room(directory, root).items()}
    tightest = min(bounds, key=lambda what: bounds[what])
    if memory_bytes == "auto":
        return int(_AUTO_SHARE * bounds[tightest])
    if isinstance(memory_bytes, bool) or not isinstance(memory_bytes, int) or memory_bytes <= 0:
        raise ValueError(f'memory_bytes={memory_bytes!r} must be a positive number of bytes or "auto"')
    if memory_bytes > _SHARE * bounds[tightest]:
        raise ValueError(
            f"memory_bytes={memory_bytes} is more than nine tenths of the {bounds[tightest]} bytes {tightest}: ask for "
            f'at most {int(_SHARE * bounds[tightest])}, or use memory_bytes="auto"'
        )
    return memory_bytes


def _group_room(root: Path) -> int | None:
    """Return limit minus use of the tightest control group of this process; None without a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, use, inactive = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit, use, inactive = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        folder = top / path.strip("/")
        while True:  # a group is bound by its ancestors too; in a container only the last may be visible
            try:
                most = (folder / limit).read_text().strip()
                if most != "max" and int(most) < 1 << 60:  # version 1 writes a huge number for no limit
                    taken = int((folder / use).read_text())
                    statistics = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                    found.append(int(most) - taken + int(statistics.get(inactive, 0)))  # page cache can be reclaimed
            except OSError:
                pass
            if folder == top:
                break
            folder = folder.parent
    return max(0, min(found)) if found else None
