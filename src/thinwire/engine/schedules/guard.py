"""One small exchange at the end of a decoupled backward: whether all ranks' parts are finite, and what each used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.core.kernels.seeding import upload
from thinwire.core.methods.base import all_finite
from thinwire.engine.ranks.communicator import Alone, Communicator


@dataclass(frozen=True)
class GuardVerdict:
    """The result, equal on all ranks.

    Attributes:
        finite: waits for and returns the answer: a 0-dim bool tensor on the gradients' device.
        used: for each parameter, whether any rank used it; None: not asked.
    """

    finite: Callable[[], Tensor]
    used: list[bool] | None


def exchange(
    communicator: Communicator | Alone, shards: Iterable[Tensor], used: Sequence[bool] | None = None
) -> GuardVerdict:
    """Gather a flag, and one bit per parameter if ``used`` is given. All ranks call it.

    Only a caller of ``finite`` waits for the flags: all-gathers may begin before they have arrived.

    Args:
        communicator: of the ranks.
        shards: this rank's part of each bucket.
        used: which parameters had a gradient here. If given, the host waits for the answer.
    """
    flags = [all_finite(x) for x in shards]
    device = communicator.device
    finite = torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool, device=device)
    message = (~finite).to(torch.uint8).view(1)
    if used is not None:
        bits = torch.from_numpy(np.packbits(np.array(used, dtype=bool)))
        message = torch.cat([message, upload(bits, device)])
    answer = functools.cache(communicator.gather_later(message))
    anywhere = None
    if used is not None:
        rows = np.unpackbits(answer()[:, 1:].cpu().numpy(), axis=1, count=len(used))
        anywhere = [bool(x) for x in np.any(rows, axis=0).tolist()]
    return GuardVerdict(lambda: (answer()[:, 0] == 0).all(), anywhere)
