"""The state of a DDP hook as a flat dict, and back, even on another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from thinwire.engine.session import Session
from thinwire.engine.state.persistence import VERSION, blank, from_flat, to_flat


def to_state_dict(session: Session, compressed: Iterable[tuple[str, Tensor]], source: str) -> dict[str, Any]:
    """Return this rank's state, with blanks for what will be kept for the compressed parameters known so far.

    Args:
        session: session of the hook.
        compressed: names and parameters.
        source: source of the names: "ddp" for ordinals, or "model".
    """
    kept, method, state = list(compressed), session.named, session.state
    blanks = {} if method.shards else blank(method, kept, state.topology, state.rank)
    shapes = {name: tuple(p.shape) for name, p in kept}  # slices become whole: buckets are DDP's
    return to_flat(session, blanks, shapes) | {"names": source, "residuals": len(state.residuals)}


def from_state_dict(session: Session, saved: Mapping[str, Any], source: str) -> None:
    """Restore the state; see ``DDPSync.load_state_dict``."""
    if saved.get("version") != VERSION or saved.get("names") not in ("ddp", "model"):
        raise ValueError(f"this is not the state of a thinwire DDP hook, version {VERSION}")
    if saved["names"] != source:
        raise ValueError(
            "the state and the hook name parameters differently: one is from ddp_hook, which counts them, the other "
            "from a framework's adapter, which knows their names; load the state where it was saved"
        )
    if saved["residuals"] and not any(key.startswith("residual/") for key in saved):
        raise ValueError(
            "the state has lost its residuals: DCP fills only what it is given, and a DDP hook knows no parameters "
            "before its first backward; load it after that, or save each rank's state_dict with torch.save"
        )
    session.state.restore(from_flat(session, saved, None))
