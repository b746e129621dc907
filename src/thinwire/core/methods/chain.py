"""Combine methods into one method where that is sound; refuse other combinations with a reason.

A chain only maps options: no program runs inside another. The second method changes what the first sends, and one
residual holds the error of both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from thinwire.core.methods.cast import Cast
from thinwire.core.methods.lowrank import LowRank
from thinwire.core.methods.qsgd import QSGD
from thinwire.core.methods.registry import resolve
from thinwire.core.methods.sign import SignSGD
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.terngrad import TernGrad
from thinwire.core.program import Method

_WIRES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def chain(*methods: Method | str) -> Method:
    """Return one method that does what the given methods do, in this order.

    These combinations are sound: a sparse method and ``Cast`` in 16 bits (the values are sent in 16 bits, and their
    rounding error is fed back); any method and ``SSGD`` or ``DeAR``, whose options (``deterministic``, ``decoupled``,
    ``fusion``) it takes over.

    Args:
        methods: names or instances, at least one.

    Example:
        >>> from thinwire.core.methods.topk import TopK
        >>> chain(TopK(0.01), Cast("fp16")).value_dtype
        'fp16'
    """
    if not methods:
        raise ValueError("chain() needs at least one method, for example chain(TopK(0.01), Cast('fp16'))")
    return functools.reduce(_compose, [resolve(method) for method in methods])


def _compose(first: Method, second: Method) -> Method:
    if isinstance(second, SSGD):
        return _with_schedule(first, second)
    if isinstance(first, SSGD):
        return _with_schedule(second, first)
    if _sparse(first) and _half(second):
        assert isinstance(second, Cast)
        return _with_wire(first, second)
    for applies, reason in _REFUSALS:
        if applies(first, second):
            raise ValueError(f"chain({type(first).__name__}, {type(second).__name__}) is not sound: {reason}")
    pair = f"chain({type(first).__name__}, {type(second).__name__})"
    raise ValueError(f"{pair} is not supported: a 16-bit Cast goes after a sparse method")


def _with_schedule(method: Method, plain: SSGD) -> Method:
    """Return ``method`` with those options of an SSGD that differ from the defaults."""
    known = {field.name for field in fields(method)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for option, default in SSGD().options().items():
        value, own = getattr(plain, option), getattr(method, option, default)
        if value in (default, own):
            continue
        if option not in known:
            raise ValueError(
                f"{type(method).__name__} has no option {option!r}: leave {option}={value!r} out of the chain"
            )
        if own != default:
            raise ValueError(f"{option}={own!r} and {option}={value!r} in one chain: give only one of them")
        changes[option] = value
    return replace(method, **changes) if changes else method  # type: ignore[type-var]


def _with_wire(sparse: Method, cast: Cast) -> Method:
    wire = _WIRES[cast.dtype]  # type: ignore[index]
    if sparse.value_dtype not in ("fp32", wire):  # type: ignore[attr-defined]
        raise ValueError(f"{sparse!r} is cast to {wire} a second time: give one value_dtype")
    schedule = {name: getattr(cast, name) for name in SSGD().options()}
    return _with_schedule(replace(sparse, value_dtype=wire), SSGD(**schedule))  # type: ignore[type-var]


def _sparse(method: Method) -> bool:
    return hasattr(method, "value_dtype")


def _half(method: Method) -> bool:
    return isinstance(method, Cast) and method.dtype in _WIRES


def _quantised(method: Method) -> bool:
    return isinstance(method, (SignSGD, QSGD, TernGrad)) or (isinstance(method, Cast) and not _half(method))


def _low_rank(method: Method) -> bool:
    return isinstance(method, LowRank)


def _majority(method: Method) -> bool:
    return isinstance(method, SignSGD) and method.vote == "majority"


# The first entry that applies gives the reason.
_REFUSALS: tuple[tuple[Callable[[Method, Method], bool], str], ...] = (
    (
        lambda a, b: (_majority(a) and b.has_residual) or (_majority(b) and a.has_residual),
        "a majority vote has no gradient units, so what it leaves out cannot be fed back",
    ),
    (
        lambda a, b: _low_rank(a) and _quantised(b),
        "factors are summed by an all-reduce, and the sum of codes is not the code of the sum",
    ),
    (
        lambda a, b: _low_rank(a) and _half(b),
        "bases come from the summed factors, orthogonal in fp32 but not in 16 bits; raise min_rate or lower rank",
    ),
    (
        lambda a, b: a.has_residual and b.has_residual,
        "two residuals: the first counts as sent what the second holds back, and does not feed back its error",
    ),
    (
        lambda a, b: _quantised(a),
        "what is sent are codes, not numbers that a second method could change; leave one of them out",
    ),
    (
        lambda a, b: _sparse(a) and _quantised(b),
        "codes of the chosen values would need scales of their own; use Cast('fp16') or Cast('bf16') on the values",
    ),
    (
        lambda a, b: _half(a) and not _sparse(b),
        "the 16-bit average is what is sent; leave one of them out",
    ),
    (
        lambda a, b: _half(a),
        "rounding before the choice is an error that nothing feeds back; put the Cast last",
    ),
    (
        lambda a, b: _sparse(b) or _low_rank(b),
        "the second would compress the gradient, not what the first sends; leave one of them out",
    ),
)
