"""Decoupling: the options of methods whose all-gather may wait for the next forward, and the exchange itself.

Paper: Zhang et al.: DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining, ICDCS 2023,
arXiv 2302.12445.

An all-reduce is a reduce-scatter and an all-gather, at the same cost. A bucket's reduce-scatter runs during backward,
and its all-gather during the *next* forward; its parameters are updated just before the first layer that needs them. No
bytes are added. With forward f, backward b and exchange c seconds, a step takes max(f, c/2) + max(b, c/2) instead of
f + max(b, c), apart from the first and the last bucket.

Between ``backward()`` and ``step()`` the gradients cannot be read: clip with ``sync.clip_grad_norm_``. Between
``step()`` and the next forward some parameters are not up to date. Forward, ``state_dict``, evaluation and checkpoints
take care of this themselves; anything else that reads parameters (an average of weights, ``torch.save(model)``) must
call ``sync.synchronize()`` first.

Differences from the paper and its public code: any ``torch.optim`` optimizer, with the hyper-parameters that it had at
``step()``; all all-gathers are issued in ``step()``, so that no rank waits for another's forward; modules called
twice, never, or in changing order; shared weights; accumulation, loss scaling and clipping; the last update is not
lost.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from thinwire.core.checks import check_flag
from thinwire.core.methods.base import all_finite
from thinwire.core.methods.exchanges import padded as padded_copy
from thinwire.core.program import AllGather, Bucket, Method, NextForward, ReduceScatter, State


@dataclass(frozen=True, kw_only=True)
class Decoupling:
    """The options that ``SSGD``, ``Cast`` and ``ACP`` share as decoupled methods; ``DeAR`` is a decoupled ``SSGD``.

    Args:
        decoupled: reduce-scatter during backward, all-gather during the next forward, in which parameters are updated.
        check_finite: one small exchange at the end of backward, by which all ranks learn of a non-finite gradient.
            Between CPUs that share no link, only a ``GradScaler`` and ``find_unused_parameters=True`` wait for it;
            elsewhere, False saves its latency if no ``GradScaler`` is in use.
        update_in_step: names of modules whose parameters are updated in ``optimizer.step()``, because something reads
            them without calling the module; True: all, for optimizers that look at all gradients together.
        poison_stale: parameters hold NaN until they are updated, so that a read of an old value shows (debugging).
    """

    decoupled: bool = False
    check_finite: bool = True
    update_in_step: bool | tuple[str, ...] = ()
    poison_stale: bool = False


def check_decoupling(method: Decoupling, *, residual: bool = False, collective: str = "flat") -> None:
    check_flag("decoupled", method.decoupled)
    check_flag("check_finite", method.check_finite)
    check_flag("poison_stale", method.poison_stale)
    early = (method.update_in_step,) if isinstance(method.update_in_step, str) else method.update_in_step
    if isinstance(early, list):
        early = tuple(early)
    if not isinstance(early, bool) and not (isinstance(early, tuple) and all(isinstance(n, str) for n in early)):
        raise ValueError(f"update_in_step={method.update_in_step!r} must be True, False or a tuple of module names")
    object.__setattr__(method, "update_in_step", early)
    if not method.decoupled:
        return
    if residual and not method.check_finite:
        raise ValueError("check_finite=False would let a non-finite gradient into the residuals: leave it on")
    if collective != "flat":
        raise ValueError(f'decoupled=True scatters over all ranks: use collective="flat", not {collective!r}')


def deferring(method: Method) -> Decoupling | None:
    return method if isinstance(method, Decoupling) and method.decoupled else None


def schedule(method: Method) -> dict[str, Any]:
    """Return a decoupled method's schedule options, for the dense method beside it or in its place; else nothing."""
    options = deferring(method)
    return {} if options is None else {f.name: getattr(options, f.name) for f in fields(Decoupling)}


def decoupled_sum(
    x: Tensor, state: State, padded: Tensor | None = None, sums: int = 0, unscaled: bool = False
) -> Generator[Any, Tensor, Tensor]:
    """Sum over the world in two halves, the second as late as the next forward. Same shape; owns ``x``.

    ``padded``: the same, 1-D, padded with zeros, where the sum is put. ``sums``, ``unscaled``: see ``NextForward``.
    """
    size = x.numel()
    if padded is None:
        padded = padded_copy(x, state.size)
    shard = yield ReduceScatter(padded)
    yield NextForward(sums, unscaled)
    everyone = yield AllGather(shard, out=padded)
    return everyone.reshape(-1)[:size].view(x.shape)


def average_decoupled(bucket: Bucket, state: State, *, watch: bool = False) -> Generator[Any, Tensor, None]:
    """Do as ``base.average_flat``, on the decoupled schedule; bit for bit equal to it in rank order."""
    if bucket.numel == 0:
        return
    x = bucket.shares(state.size)
    total = yield from decoupled_sum(x, state, bucket.padded(state.size))
    if watch:
        state.verdict(all_finite(total))
    bucket.write(total)
