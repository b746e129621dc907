"""What a rank with local steps holds in memory: counted from shapes before anything is started, or of what runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.program import Topology, working_dtype
from thinwire.core.program.trace import memory
from thinwire.engine.local.rounds import Fragment, Rounds
from thinwire.engine.local.settings import Local

ADAM = 2
"""States that Adam and AdamW keep of each weight, in its dtype."""


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind, on the device of the weights and in host memory beside a GPU."""

    kind: str
    device: int
    host: int = 0


def held(rounds: Rounds, weights: Sequence[Tensor], optimizer_bytes: int) -> list[MemoryRow]:
    """Return what training with these rounds holds; not what a forward, or a gathering of shards, needs on top.

    ``under way`` is the most that fragments need from being sent until they are merged; nothing of it is left between
    rounds.
    """
    away, own = rounds.settings.anchors == "cpu", sum(x.nbytes for x in weights)

    def kept(kind: str, count: int, beside: int = 0) -> MemoryRow:
        return MemoryRow(kind, beside, count) if away else MemoryRow(kind, count + beside)

    fragments = rounds.fragments
    codecs = {fragment.index: _codec_state(fragment, rounds) for fragment in fragments}
    residuals, factors = (sum(one[i] for one in codecs.values()) for i in range(2))
    parts = [(f.anchors, f.momenta, f.slow) for f in fragments]
    outer, momenta, slow = (sum(x.nbytes for part in parts for x in part[i]) for i in range(3))
    travelling = sorted(fragments, key=lambda f: f.elements, reverse=True)[: rounds.most_travelling()]
    under_way = 0
    for f in travelling:
        under_way += 3 * sum(x.nbytes for x in f.anchors)  # as sent, their change, the mean of the changes
        under_way += sum(codecs[f.index])  # to come, beside those in force
        if away:
            under_way += sum(x.nbytes for some in (f.anchors, f.momenta, f.slow) for x in some) + codecs[f.index][0]
    rows = [
        MemoryRow("weights", own),
        MemoryRow("gradients", own),
        MemoryRow("optimizer", optimizer_bytes),
        kept("outer weights", outer),
        kept("outer momentum", momenta),
        kept("slow means", slow),
        kept("residuals", residuals, factors),
        MemoryRow("under way, at most", under_way),
    ]
    return [row for row in rows if row.device or row.host]


def predict_memory(
    local: Local, shapes: Iterable[tuple[str, Sequence[int]]], *, sites: int, shards: int = 1, dtype: torch.dtype
) -> list[MemoryRow]:
    """Return what the first rank of a site will hold, whose shards are the largest, under Adam.

    Args:
        local: the local steps.
        shapes: of the whole parameters, by name.
        sites: how many train independently.
        shards: ranks of a site, over which FSDP2 cuts each parameter's rows.
        dtype: of the weights.
    """
    meta, dense = {}, []
    for name, shape in shapes:
        rows = [-(-shape[0] // shards), *shape[1:]] if shape else []
        meta[name] = torch.empty(rows, dtype=dtype, device="meta")
        if local.method.dense(name, tuple(shape), False):
            dense.append(name)
    rounds = Rounds(local, meta, dense, 0, Topology(sites))
    weights = list(meta.values())
    return held(rounds, weights, ADAM * sum(x.nbytes for x in weights))


def _codec_state(fragment: Fragment, rounds: Rounds) -> tuple[int, int]:
    """Return the bytes of a fragment's residuals, and of what else the codec keeps of it."""
    residuals = others = 0
    for shapes, dtype in fragment.coded():
        state = memory(rounds.settings.method, shapes, fragment.state.topology, rank=0, dtype=working_dtype(dtype))
        residuals += sum(x.nbytes for x in state.residuals.values())
        others += sum(x.nbytes for x in (*state.locals.values(), *state.fields.values()))
    return residuals, others
