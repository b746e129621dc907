"""Who is late: after an error each rank leaves a note in the store; who left none within five seconds is named.

No store traffic in normal steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

WAIT_SECONDS = 5.0


class LateRanks:
    """The notes of one GradientSync.

    Args:
        ranks: global ranks of the group.
        place: this rank's place in it.
        label: equal on all ranks, different for every GradientSync.
    """

    def __init__(self, ranks: Sequence[int], place: int, label: str) -> None:
        self._ranks, self._place, self._prefix = ranks, place, f"thinwire/{label}"
        # The error handler must not share a connection with a thread that may be blocked on it.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()

    def report(self, step: int, bucket: str, where: str) -> str:
        """Leave this rank's note, wait for the others', and say in a sentence who is missing."""
        try:
            note = json.dumps({"step": step, "bucket": bucket, "where": where})
            self._store.set(f"{self._prefix}/{self._place}", note)
            missing = self._wait()
        except Exception:
            return f"rank {self._ranks[0]} (or whoever holds the store) does not answer any more"
        if missing:
            names = ", ".join(f"rank {self._ranks[place]}" for place in missing)
            return f"{names} did not report: dead or late"
        notes = {self._ranks[p]: self._read(p) for p in range(len(self._ranks))}
        places = {f"step {n['step']}, bucket {n['bucket']}": [] for n in notes.values()}  # type: ignore[var-annotated]
        for rank, n in notes.items():
            places[f"step {n['step']}, bucket {n['bucket']}"].append(rank)
        if len(places) == 1:
            return "all ranks failed at the same place"
        return "the ranks are at different places: " + "; ".join(f"{place}: ranks {r}" for place, r in places.items())

    def _wait(self) -> list[int]:
        deadline = time.monotonic() + WAIT_SECONDS
        missing = [p for p in range(len(self._ranks)) if p != self._place]
        while missing and time.monotonic() < deadline:
            missing = [p for p in missing if not self._store.check([f"{self._prefix}/{p}"])]
            time.sleep(0.05)
        return missing

    def _read(self, place: int) -> dict[str, Any]:
        note: dict[str, Any] = json.loads(self._store.get(f"{self._prefix}/{place}").decode())
        return note
