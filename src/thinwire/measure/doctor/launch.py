"""Whether torchrun's variables are consistent."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.measure.doctor.facts import Facts
from thinwire.measure.doctor.findings import ERROR, WARNING, Finding, Setting

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_REMEDY = "Start with torchrun, which sets them all, or unset what is left from an earlier start."


def nodes_of(facts: Facts) -> int | None:
    """Return the least number of machines that torchrun's variables imply; None if they do not say."""
    world, local = (_number(facts, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world is None or local is None or local < 1:
        return None
    return -(-world // local)


def launch(setting: Setting) -> Iterator[Finding]:
    """Yield all findings of this file."""
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
