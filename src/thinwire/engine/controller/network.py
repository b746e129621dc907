"""Costs of exchanges and compute: given, remembered from an earlier start, or measured between the first steps.

Exchanges are measured for half a step in all, in as many pieces as there are steps to be timed, so that no pause is as
long as a step; a few of up to 64 KiB are measured at any cost. Messages too large for that time are priced by the
exchanges of the steps themselves. Compute is measured for some tens of milliseconds per curve; only lossy methods need
all curves. To check remembered costs takes five short all-reduces, of 10 ms at most.

Rank 0 remembers them in ``$XDG_CACHE_HOME/thinwire/network-<digest>.json``, else below ``~/.cache``. If that file
cannot be read or written, the log gets a line, and nothing is remembered.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from thinwire.core.durable import user_cache, write_whole
from thinwire.core.pricing.costs import Costs, assumed_compute
from thinwire.core.records import UNREADABLE
from thinwire.engine.ranks.communicator import Communicator

if TYPE_CHECKING:
    from thinwire.predict.measure.gradual import GradualProbe

SWITCH = "THINWIRE_REMEMBER"
"""The environment variable that turns remembering off if it is ``0``; rank 0's counts."""
TOLERANCE = 0.25  # of a short all-reduce; if it is off by more, everything is measured again
_SHARE = 0.5  # of a step's time, to measure exchanges
_NOTHING = Costs({})
_MEASURING = "measuring the network"
logger = logging.getLogger("thinwire")


class NetworkPrices:
    """The costs for one handle's ranks. All ranks must make the calls, between two steps."""

    def __init__(self, communicator: Communicator, costs: Costs | None, compute: Sequence[str]) -> None:
        self.costs, self.why = costs, ""  # where they come from, in words; empty if the user gave them
        self.measured = self.checked = 0  # exchanges timed for curves, and to check whether remembered costs hold
        self.seconds = 0.0  # spent on measuring, without training
        self._comm, self._wanted = communicator, tuple(compute)
        self._probe: GradualProbe | None = None
        self._known = _NOTHING
        self._facts: dict[str, Any] = {}

    def begin(self, step_seconds: float, pieces: int) -> None:
        """Look for remembered costs, and begin to measure what is missing, in so many pieces (calls of ``advance``)."""
        if self.costs is not None:
            return
        from thinwire.predict.measure.network import card

        if (watch := self._comm.executor.watch) is not None:
            watch.clear()
        began = time.perf_counter()
        with self._comm.meeting(_MEASURING):
            mine = json.dumps([platform.node(), *card(self._comm.backend), torch.get_num_threads(), step_seconds])
            rows = [json.loads(row) for row in self._comm.gather(mine.encode())]
            self._probe = probe = self._comm.gradual_probe()
            found = self._recall([row[:-1] for row in rows])
            holds = found is not None and self._holds(probe, *found)
            missing = [name for name in self._wanted if name not in self._known.compute]
            slowest = max(row[-1] for row in rows)
            probe.begin(_SHARE * slowest, pieces, exchanges=not holds, compute=missing)
        self.seconds += time.perf_counter() - began

    def advance(self) -> None:
        if self._probe is not None:
            began = time.perf_counter()
            with self._comm.meeting(_MEASURING):
                self._probe.advance()
            self.seconds += time.perf_counter() - began

    def finish(self) -> None:
        probe = self._probe
        if probe is None:
            return
        began = time.perf_counter()
        seen = self._comm.typical_exchange()
        known = Costs(self._known.exchanges, {**assumed_compute(), **self._known.compute}, self._known.cpu_share)
        self.costs = probe.costs(seen, known)
        self.measured, self.checked = probe.measured, probe.checked
        if self._comm.rank == 0 and (self.measured or set(self._wanted) - set(self._known.compute)):
            compute = {name: curve for name, curve in self.costs.compute.items() if curve.provenance != "assumed"}
            keep(self._facts, Costs(self.costs.exchanges, compute, self.costs.cpu_share))
        self._probe = None
        self.seconds += time.perf_counter() - began
        self.why += f" in {1e3 * self.seconds:.0f} ms between steps" if self.measured else ""

    def _recall(self, machines: list[list[object]]) -> tuple[str, Costs] | None:
        who = self._comm
        self._facts = {
            "machines": machines,
            "layout": list(who.topology.layout),
            "backend": who.backend,
            "device": who.device.type,
            "torch": torch.__version__,
        }
        found = recall(self._facts) if who.rank == 0 else None
        text = who.gather(json.dumps([found[0], found[1].to_json()]).encode() if found else b"")[0]
        if not text:
            self.why = "prices: measured"
            return None
        day, costs = json.loads(text)
        return day, Costs.from_json(costs)

    def _holds(self, probe: GradualProbe, day: str, costs: Costs) -> bool:
        times = probe.check(costs)
        if abs(times - 1) < TOLERANCE:
            self._known, self.why = costs, f"prices: remembered from {day}"
            return True
        self.why = f"prices: an all-reduce took {times:.3g} times the one remembered from {day}: measured again"
        return False


def recall(network: dict[str, Any]) -> tuple[str, Costs] | None:
    path = _path(network)
    if path is None:
        return None
    try:
        data = json.loads(path.read_text())
        if data["network"] != network:
            raise ValueError("it belongs to another network")
        return date.fromisoformat(data["day"]).isoformat(), Costs.from_json(json.dumps(data["costs"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (*UNREADABLE, OSError) as error:
        logger.info("thinwire: what is remembered about this network cannot be read: %s: %s", path, error)
        return None


def keep(network: dict[str, Any], costs: Costs) -> None:
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
