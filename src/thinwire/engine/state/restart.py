"""Warn if torchrun has restarted a job and the job starts without its residuals."""

from __future__ import annotations

import logging
import os

from thinwire.core.program import Method, State

logger = logging.getLogger("thinwire")


def restarts() -> int:
    """Return how often torchrun has restarted the ranks of this job; 0 without torchrun."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


def warn_if_state_missing(method: Method, state: State) -> None:
    """Warn, at a first step, if this is a restarted job that has not loaded its residuals."""
    if state.step == 0 and not state.restored and method.has_residual and state.rank == 0 and (count := restarts()):
        logger.warning(
            "thinwire: restart %d of this job has loaded no state, so the residuals of %s begin at zero and the update "
            "still owed to the model is lost; call thinwire.checkpoint.load, or load_state_dict, before the first step",
            count, method.name,
        )  # fmt: skip
