"""Functions that a GPU computes by Triton kernels and all else by torch: the torch twin is the definition.

A file that uses this holds twin, kernels and launches of one function side by side. The two are equal bit for bit where
the arithmetic allows it; ``make test`` compares them in Triton's interpreter. Triton is optional, and imported at the
first launch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, cached_property
from importlib.util import find_spec
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


@cache
def triton_installed() -> bool:
    return find_spec("triton") is not None


class Kernel:
    """A Triton kernel, launched as ``kernel(programs, *arguments, CONSTANT=...)`` on the device of its tensors.

    Its lines name ``triton.language`` as ``tl``, other kernels as functions, and whole numbers of their file. Triton
    compiles it anew for numbers that are 1, or multiples of 16, unless their parameters say ``int``.
    """

    def __init__(self, source: Callable[..., None]) -> None:
        self.source = source
        self.__name__ = source.__name__

    @cached_property
    def jit(self) -> Any:
        import triton

        source = self.source
        assert isinstance(source, FunctionType)
        found = {name: source.__globals__.get(name) for name in source.__code__.co_names}
        others = {name: other.jit for name, other in found.items() if isinstance(other, Kernel)}
        numbers = {name: triton.language.constexpr(x) for name, x in found.items() if isinstance(x, int)}
        scope = {**source.__globals__, "tl": triton.language, **others, **numbers}
        copy = FunctionType(source.__code__, scope, source.__name__, source.__defaults__)
        copy.__module__, copy.__annotations__ = source.__module__, source.__annotations__
        plain = [name for name, kind in copy.__annotations__.items() if kind == "int"]
        return triton.jit(copy, do_not_specialize=plain)

    def __call__(self, programs: Any, *arguments: Any, **constants: Any) -> Any:
        device = next(x.device for x in arguments if isinstance(x, Tensor))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.jit[(programs,)](*arguments, **constants)


class Fused(Generic[P, R]):
    """What :func:`fused` makes. ``twin`` and ``launch`` give the same result."""

    def __init__(self, twin: Callable[P, R], launch: Callable[P, R], when: Callable[P, bool]) -> None:
        self.twin, self.launch, self._when = twin, launch, when
        self.__doc__ = twin.__doc__

    def serves(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Whether this is for the kernels: all tensors, and those in lists, on a GPU and of no float but fp32."""
        lists = [one if isinstance(one, (list, tuple)) else (one,) for one in (*args, *kwargs.values())]
        given = (x for some in lists for x in some if isinstance(x, Tensor))
        return (
            all(x.is_cuda and (x.dtype == torch.float32 or not x.is_floating_point()) for x in given)
            and triton_installed()
            and self._when(*args, **kwargs)
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self.launch if self.serves(*args, **kwargs) else self.twin)(*args, **kwargs)


def fused(
    twin: Callable[P, R], when: Callable[P, bool] = lambda *_, **__: True
) -> Callable[[Callable[P, R]], Fused[P, R]]:
    """Decorate a function that launches kernels for what ``twin``, with the same parameters, does in torch.

    It allocates, launches and returns, and has no other effect: the simulated card counts its launches, and takes the
    numbers from the twin. ``when``: whether the kernels know how, if not always.
    """
    return lambda launch: Fused(twin, launch, when)
