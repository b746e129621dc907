"""Remember what was measured of a network, in a file on rank 0, for the next start on the same machines.

The file: ``$XDG_CACHE_HOME/thinwire/network-<digest>.json``, else below ``~/.cache``. If it cannot be read or written,
the log gets a line, and nothing is remembered.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from thinwire.core.durable import user_cache, write_whole
from thinwire.core.pricing.costs import Costs
from thinwire.core.records import UNREADABLE

SWITCH = "THINWIRE_REMEMBER"
"""The environment variable that turns this off if it is ``0``; rank 0's counts."""

logger = logging.getLogger("thinwire")


@dataclass(frozen=True)
class Remembered:
    """Costs, and the day on which they were measured."""

    day: str
    costs: Costs


def recall(network: dict[str, Any]) -> Remembered | None:
    """Return what is remembered of the network that these facts describe."""
    path = _path(network)
    if path is None:
        return None
    try:
        data = json.loads(path.read_text())
        if data["network"] != network:
            raise ValueError("it belongs to another network")
        return Remembered(date.fromisoformat(data["day"]).isoformat(), Costs.from_json(json.dumps(data["costs"])))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (*UNREADABLE, OSError) as error:
        logger.info("thinwire: what is remembered about this network cannot be read: %s: %s", path, error)
        return None


def keep(network: dict[str, Any], costs: Costs) -> None:
    """Remember costs that were measured today."""
    path = _path(network)
    if path is None:
        return
    data = {"day": date.today().isoformat(), "network": network, "costs": json.loads(costs.to_json())}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(data), shared=True)
    except (OSError, ValueError) as error:
        logger.info("thinwire: this network cannot be remembered: %s", error)


def _path(network: dict[str, Any]) -> Path | None:
    if os.environ.get(SWITCH, "") == "0":
        return None
    digest = hashlib.blake2b(json.dumps(network, sort_keys=True).encode(), digest_size=8).hexdigest()
    try:
        return user_cache() / f"network-{digest}.json"
    except ValueError:  # there is no home directory
        return None
