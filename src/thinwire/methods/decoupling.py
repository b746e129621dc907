"""Decoupling: the options of methods whose all-gather may wait for the next forward, and the exchange itself."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from thinwire.methods.base import all_finite, check_flag
from thinwire.methods.exchanges import padded as padded_copy
from thinwire.program import AllGather, Bucket, Method, NextForward, ReduceScatter, State


@dataclass(frozen=True, kw_only=True)
class Decoupling:
    """What ``SSGD``, ``Cast`` and ``ACP`` share as decoupled methods; see :class:`~thinwire.methods.dear.DeAR`.

    Args:
        decoupled: reduce-scatter during backward, all-gather during the next forward, in which parameters are updated.
        check_finite: one small exchange at the end of backward, so that all ranks know of a non-finite gradient.
        update_in_step: names of modules whose parameters are updated in ``optimizer.step()``; True: all.
        poison_stale: parameters hold NaN until they are updated (debugging).
    """

    decoupled: bool = False
    check_finite: bool = True
    update_in_step: bool | tuple[str, ...] = ()
    poison_stale: bool = False


def check_decoupling(method: Decoupling, *, residual: bool = False, collective: str = "flat") -> None:
    """Raise ``ValueError`` unless the options fit each other; lists of names become tuples.

    Args:
        method: to be checked.
        residual: it keeps error feedback.
        collective: how it sums over the ranks.
    """
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
    """The method's options if it is decoupled, else None."""
    return method if isinstance(method, Decoupling) and method.decoupled else None


def schedule(method: Method) -> dict[str, Any]:
    """The options of a decoupled method's schedule, for the method beside it or in its stead; else nothing."""
    options = deferring(method)
    return {} if options is None else {f.name: getattr(options, f.name) for f in fields(Decoupling)}


def decoupled_sum(
    x: Tensor, state: State, padded: Tensor | None = None, sums: int = 0, unscaled: bool = False
) -> Generator[Any, Tensor, Tensor]:
    """Sum over the world in two halves, the second as late as the next forward. Same shape; owns ``x``.

    Args:
        x: this rank's part.
        state: of the rank.
        padded: the same with zeros behind it, 1-D, where there is memory for them: the sum is put there.
        sums, unscaled: see :class:`~thinwire.program.NextForward`.
    """
    size = x.numel()
    if padded is None:
        padded = padded_copy(x, state.size)
    shard = yield ReduceScatter(padded)
    yield NextForward(sums, unscaled)
    everyone = yield AllGather(shard, out=padded)
    return everyone.reshape(-1)[:size].view(x.shape)


def average_decoupled(bucket: Bucket, state: State, *, watch: bool = False) -> Generator[Any, Tensor, None]:
    """As ``base.average_flat``, on the decoupled schedule: equal to it in rank order, bit for bit."""
    if bucket.numel == 0:
        return
    x = bucket.shares(state.size)
    total = yield from decoupled_sum(x, state, bucket.padded(state.size))
    if watch:
        state.verdict(all_finite(total))
    bucket.write(total)
