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
        guard: one small exchange at the end of backward, so that all ranks know of a non-finite gradient.
        eager: names of modules whose parameters are updated in ``optimizer.step()``; True: all.
        check: parameters hold NaN until they are updated (debugging).
    """

    decoupled: bool = False
    guard: bool = True
    eager: bool | tuple[str, ...] = ()
    check: bool = False


def check_decoupling(method: Decoupling, *, residual: bool = False, collective: str = "flat") -> None:
    """Raise ``ValueError`` unless the options fit each other; lists of names become tuples.

    Args:
        method: to be checked.
        residual: it keeps error feedback.
        collective: how it sums over the ranks.
    """
    check_flag("decoupled", method.decoupled)
    check_flag("guard", method.guard)
    check_flag("check", method.check)
    eager = (method.eager,) if isinstance(method.eager, str) else method.eager
    if isinstance(eager, list):
        eager = tuple(eager)
    if not isinstance(eager, bool) and not (isinstance(eager, tuple) and all(isinstance(n, str) for n in eager)):
        raise ValueError(f"eager={method.eager!r} must be True, False or a tuple of module names")
    object.__setattr__(method, "eager", eager)
    if not method.decoupled:
        return
    if residual and not method.guard:
        raise ValueError("guard=False would let a non-finite gradient into the residuals: leave the guard on")
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
